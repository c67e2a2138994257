# Every target works on a fresh machine: it first installs what it needs into $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
AOT := $(VENV)-aot
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PIP := $(BIN)/python $(PIP_INSTALL)
# What builds the native kernel: in the environment itself, so that it is not fetched each time.
BUILD_TOOLS := scikit-build-core jaxlib
INSTALL_PACKAGE := --no-build-isolation --editable
INSTALL_INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*.h native/*.cpp native/kernels/*)
SANITIZED := $(VENV)-sanitized
SANITIZERS = $(shell g++ -print-file-name=libasan.so):$(shell g++ -print-file-name=libubsan.so)

.PHONY: demo test test-devices test-rivals test-parity test-diffusers test-sanitized test-arm tpu-aot lint docs bench bench-diffusers clean

demo: $(VENV)/.demo  ## the ladder on a real 720p clip, then a video with dense and sparse attention: out/
	@mkdir -p out
	$(BIN)/cinetile ladder --video 81x720x1280 --clip sample --heads 1 --repeats 3 \
	  --picture out/ladder.png --json out/ladder.json
	$(BIN)/cinetile compare "a striped red ball rolls to the right over a dark background" \
	  --repeats 3 --out out/compare.mp4 --picture out/compare.png --json out/compare.json
	@printf '\nPictures, the video and the numbers are in out/.\n'
	@printf 'To use cinetile in this shell: source %s/bin/activate\n' "$(VENV)"

test: $(VENV)/.dev  ## the test suite
	$(BIN)/python -m pytest -n 2

test-devices: $(VENV)/.dev  ## the tests of many devices: eight virtual ones, and several processes
	XLA_FLAGS=--xla_force_host_platform_device_count=8 $(BIN)/python -m pytest -n 2 tests/devices

test-rivals: $(VENV)/.dev $(VENV)/.bench  ## the tests that need PyTorch
	$(BIN)/python -m pytest -n 2 tests/test_bench.py tests/test_cli.py \
	  tests/test_torch_windows.py tests/test_torch_engines.py "tests/test_docs.py::test_code_runs[docs/howto/gpu.md]"

test-parity: $(VENV)/.dev $(VENV)/.parity  ## the Wan models against the diffusers of today
	$(BIN)/python -m pytest -n 0 tests/parity

test-diffusers: $(VENV)/.dev $(VENV)/.diffusers  ## pipelines of diffusers, with tiny random weights
	$(BIN)/python -m pytest -n 2 tests/pipelines
	CINETILE_TEST_TORCHAX=1 $(BIN)/python -m pytest -n 0 tests/pipelines/test_torchax.py

test-sanitized: $(SANITIZED)/.ready  ## the native kernel's tests, with checks of its memory and arithmetic
	LD_PRELOAD=$(SANITIZERS) ASAN_OPTIONS=detect_leaks=0 \
	  $(SANITIZED)/bin/python -m pytest -n 2 tests/test_cpu.py tests/test_direct.py

test-arm: $(VENV)/.dev  ## the native kernel's paths for Arm, cross-compiled and under emulation
	.ci/test-arm $(abspath $(BIN))/python

tpu-aot: $(AOT)/.ready  ## compile the TPU kernel for v6e, v5p and tpu7x; needs no TPU
	$(AOT)/bin/python -m pytest tests/tpu_aot

lint: $(VENV)/.dev  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/clang-format --dry-run --Werror $(wildcard native/*.h native/*.cpp native/*/*.h native/*/*.cpp)

docs: $(VENV)/.docs  ## the documentation as HTML in out/docs
	$(BIN)/mkdocs build --strict --quiet --site-dir out/docs

bench: $(VENV)/.bench  ## the figures in docs/measurements.md
	$(BIN)/python -m benchmarks.cpu_kernel
	$(BIN)/python -m benchmarks.portable_kernel

bench-diffusers: $(VENV)/.diffusers  ## one block of Wan 1.3B's shape in diffusers; takes minutes
	$(BIN)/python -m benchmarks.diffusers_block

clean:
	rm -rf $(VENV) $(AOT) $(SANITIZED) out

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(BUILD_TOOLS)

# Its own environment: libtpu is large, and nothing else needs it.
$(AOT)/.ready: $(INSTALL_INPUTS)
	$(PYTHON) -m venv $(AOT)
	$(AOT)/bin/python $(PIP_INSTALL) $(BUILD_TOOLS)
	$(AOT)/bin/python $(PIP_INSTALL) $(INSTALL_PACKAGE) '.[tpu-aot]' beartype hypothesis pytest
	@touch $@

$(SANITIZED)/.ready: $(INSTALL_INPUTS)
	$(PYTHON) -m venv $(SANITIZED)
	$(SANITIZED)/bin/python $(PIP_INSTALL) $(BUILD_TOOLS)
	$(SANITIZED)/bin/python $(PIP_INSTALL) $(INSTALL_PACKAGE) . beartype hypothesis pytest pytest-xdist \
	  --config-settings cmake.define.CINETILE_SANITIZE=address,undefined
	@touch $@

$(VENV)/.demo: $(VENV)/bin/python $(INSTALL_INPUTS)
	$(PIP) $(INSTALL_PACKAGE) '.[metrics,plot,video,wan]'
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python $(INSTALL_INPUTS)
	$(PIP) $(INSTALL_PACKAGE) '.[dev]'
	@touch $@

$(VENV)/.diffusers: $(VENV)/bin/python $(INSTALL_INPUTS)
	$(PIP) $(INSTALL_PACKAGE) '.[torchax]'
	@touch $@

$(VENV)/.docs: $(VENV)/bin/python $(INSTALL_INPUTS)
	$(PIP) $(INSTALL_PACKAGE) '.[docs]'
	@touch $@

$(VENV)/.parity: $(VENV)/bin/python $(INSTALL_INPUTS)
	$(PIP) $(INSTALL_PACKAGE) '.[parity]'
	@touch $@

$(VENV)/.bench: $(VENV)/bin/python $(INSTALL_INPUTS)
	$(PIP) $(INSTALL_PACKAGE) '.[plot,video,rivals]'
	@touch $@
