"""The documentation: its code runs, its links lead somewhere, and it lists what is public."""

import re
import runpy
from pathlib import Path

import pytest

import cinetile as ct

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TORCH_PAGES = ("gpu.md",)
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)")


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if PYTHON_BLOCK.search(page.read_text())], ids=page_name
)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page, one after the other, as a reader would type them."""
    if page.name in TORCH_PAGES:
        pytest.importorskip("torch", reason="PyTorch (extra `rivals`) is missing")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(PYTHON_BLOCK.findall(page.read_text()))
    exec(compile(code, page_name(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("name", ct.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert getattr(ct, name).__doc__
    assert f"::: cinetile.{name}\n" in (ROOT / "docs/reference/python.md").read_text()


def test_options_are_those_of_the_commands() -> None:
    """`python .ci/write_options.py` writes the page anew."""
    script = runpy.run_path(str(ROOT / ".ci/write_options.py"))
    page = script["PAGE"].read_text()
    assert page == script["options_page"](script["main"])
    assert "`--policy NAME\\|FILE`" in page
