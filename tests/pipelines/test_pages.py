"""The how-to page and the example of `cinetile.integrations.diffusers`."""

# diffusers exports its names lazily, which pyright does not follow.
# pyright: reportPrivateImportUsage=false

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import diffusers
import torch
from tiny_pipelines import PIPELINES

import cinetile.integrations.diffusers as ctd

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/howto/diffusers.md").read_text()
BLOCKS = re.compile(r"^```py\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_table_is_that_of_the_descriptions() -> None:
    assert f"\n\n{ctd.family_table()}\n" in PAGE


@pytest.mark.parametrize("name", ctd.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert (
        f"::: cinetile.integrations.diffusers.{name}\n"
        in (ROOT / "docs/reference/python.md").read_text()
    )


def test_every_class_is_there() -> None:
    """What the descriptions name exists in this version of diffusers."""
    for family in ctd.FAMILIES:
        for name in (*family.models, *family.pipelines):
            assert isinstance(getattr(diffusers, name), type), name


@pytest.mark.filterwarnings("ignore:density .* is lost:UserWarning")
def test_the_code_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny pipeline that takes any prompt, and small sizes whatever it is asked for."""
    tiny = PIPELINES[0]

    class AnyPrompt:
        def __init__(self) -> None:
            self.pipe = tiny.build()
            self.transformer, self.scheduler = self.pipe.transformer, self.pipe.scheduler

        def __call__(self, prompt: str, **_: Any) -> Any:
            del prompt
            return type("Result", (), {"frames": tiny.run(self.pipe)})

    def from_pretrained(*_: Any, **__: Any) -> Any:
        return AnyPrompt()

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", from_pretrained)
    code = "\n".join(BLOCKS.findall(PAGE))
    assert code.count("enable_sparse_attention(") == 3
    exec(compile(code, "diffusers.md", "exec"), {"__name__": "__main__"})


def test_the_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        sys, "argv", ["example", "--tiny", "--frames", "17", "--steps", "4", "--width", "128"]
    )
    before = torch.get_rng_state()
    runpy.run_path(str(ROOT / "examples/diffusers_pipeline.py"), run_name="__main__")
    torch.set_rng_state(before)
    printed = capsys.readouterr().out
    assert "Wan 2.1 and 2.2, 5x8x8 = 320 tokens: 8 of 24 self-attention calls sparse" in printed
    assert re.search(r"relative difference of the results: 0\.\d+", printed)
