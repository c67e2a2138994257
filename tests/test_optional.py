"""What needs optional packages says so, and the rest does without."""

import subprocess
import sys

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
    assert "ImportError: cinetile.integrations.diffusers needs PyTorch and diffusers" in done.stderr
    assert "pip install 'cinetile[diffusers]'" in done.stderr
