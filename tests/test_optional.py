"""What needs optional packages says so, and the rest does without."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cinetile import _extras

ROOT = Path(__file__).parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

WITHOUT = """
import sys

for name in ("torch", "diffusers", "torchax"):
    sys.modules[name] = None
import cinetile
{then}
"""


def run(then: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(then=then)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_core_does_without_pytorch() -> None:
    done = run("cinetile.TokenGrid(2, 3, 4)")
    assert done.returncode == 0, done.stderr


def test_an_extra_that_is_missing_is_named() -> None:
    done = run("import cinetile.integrations.diffusers")
    assert done.returncode == 1
    assert "ImportError: cinetile.integrations.diffusers needs PyTorch: run" in done.stderr
    assert '".[diffusers]"' in done.stderr


class TestHints:
    @pytest.mark.parametrize("extra", EXTRAS)
    def test_a_hint_names_the_clone_the_versions_and_the_extra(self, extra: str) -> None:
        hint = _extras.install_hint(extra)
        assert "in a clone" in hint
        assert "--constraint constraints.txt" in hint
        assert f'".[{extra}]"' in hint

    @pytest.mark.parametrize("extra", sorted(set(EXTRAS) - {"dev", "docs"}))
    def test_extras_with_pytorch_take_its_cpu_build(self, extra: str) -> None:
        """Also where PyTorch comes through another extra of this package."""
        needed = [extra, *re.findall(r"cinetile\[(\w+)\]", " ".join(EXTRAS[extra]))]
        with_pytorch = any(name.startswith("torch>") for part in needed for name in EXTRAS[part])
        assert ("download.pytorch.org/whl/cpu" in _extras.install_hint(extra)) == with_pytorch

    def test_no_text_tells_to_install_from_an_index(self) -> None:
        """The package is on none; this test goes when it is."""
        folders = ("src", "docs", "examples", "benchmarks", "training")
        files = [file for folder in folders for file in (ROOT / folder).rglob("*")]
        files += [*ROOT.glob("*.md"), ROOT / "Makefile"]
        texts = [file for file in files if file.suffix in {".py", ".md", ""} and file.is_file()]
        old = re.compile(r"pip install [^\n`]*[\"' ]cinetile\b")
        found = [str(file) for file in texts if old.search(file.read_text(encoding="utf-8"))]
        assert found == []

    @pytest.mark.parametrize(
        "extra",
        sorted(
            set(
                re.findall(
                    r'extra="([\w-]+)"',
                    "".join(file.read_text() for file in (ROOT / "src").rglob("*.py")),
                )
            )
        ),
    )
    def test_every_extra_that_the_code_names_exists(self, extra: str) -> None:
        assert extra in EXTRAS


class TestRequire:
    def test_gives_the_module(self) -> None:
        assert _extras.require("json", extra="plot", feature="a test") is sys.modules["json"]

    @pytest.mark.parametrize("module", ["no_such_package", "no_such_package.part"])
    def test_names_what_is_missing(self, module: str) -> None:
        expected = r'^writing a video needs Known: run `pip install .*"\.\[video\]"` in a clone'
        with pytest.raises(ImportError, match=expected):
            _extras.require(module, extra="video", feature="writing a video", package="Known")

    def test_tells_a_broken_package_from_a_missing_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "broken_package.py").write_text("import no_such_library")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ImportError, match="importing it failed: No module named 'no_such"):
            _extras.require("broken_package", extra="video", feature="a test")
