# Every target works on a fresh machine: it first installs what it needs into $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
AOT := $(VENV)-aot
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PIP := $(BIN)/python $(PIP_INSTALL)
INSTALL_INPUTS := pyproject.toml constraints.txt

.PHONY: demo test test-rivals test-parity tpu-aot lint docs bench clean

demo: $(VENV)/.demo  ## the case study's ladder on a real 720p clip: a table, and a picture in out/
	@mkdir -p out
	$(BIN)/cinetile ladder --video 81x720x1280 --clip sample --heads 1 --repeats 2 \
	  --picture out/ladder.png --json out/ladder.json

test: $(VENV)/.dev  ## the test suite
	$(BIN)/python -m pytest -n 2

test-rivals: $(VENV)/.dev $(VENV)/.bench  ## the tests that need PyTorch
	$(BIN)/python -m pytest -n 2 tests/test_bench.py tests/test_cli.py

test-parity: $(VENV)/.dev $(VENV)/.parity  ## the Wan models against the diffusers of today
	$(BIN)/python -m pytest -n 0 tests/parity

tpu-aot: $(AOT)/.ready  ## compile the TPU kernel for v6e, v5p and tpu7x; needs no TPU
	$(AOT)/bin/python -m pytest tests/tpu_aot

lint: $(VENV)/.dev  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.docs  ## the documentation as HTML in out/docs
	$(BIN)/mkdocs build --strict --quiet --site-dir out/docs

bench: $(VENV)/.bench  ## the figures in docs/measurements.md
	$(BIN)/python -m benchmarks.portable_kernel

clean:
	rm -rf $(VENV) $(AOT) out

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Its own environment: libtpu is large, and nothing else needs it.
$(AOT)/.ready: $(INSTALL_INPUTS)
	$(PYTHON) -m venv $(AOT)
	$(AOT)/bin/python $(PIP_INSTALL) --editable '.[tpu-aot]' beartype hypothesis pytest
	@touch $@

$(VENV)/.demo: $(VENV)/bin/python $(INSTALL_INPUTS)
	$(PIP) --editable '.[plot,video,wan]'
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python $(INSTALL_INPUTS)
	$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/bin/python $(INSTALL_INPUTS)
	$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/.parity: $(VENV)/bin/python $(INSTALL_INPUTS)
	$(PIP) --editable '.[parity]'
	@touch $@

$(VENV)/.bench: $(VENV)/bin/python $(INSTALL_INPUTS)
	$(PIP) --editable '.[plot,video,rivals]'
	@touch $@
