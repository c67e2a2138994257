"""`cinetile generate --mesh`, which makes its devices itself."""

import json
import os
import subprocess
import sysconfig
from pathlib import Path

from wan_models import small_pipeline

from cinetile.models.video import count_frames


def generate(tmp_path: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    script = str(Path(sysconfig.get_path("scripts")) / "cinetile")
    model = small_pipeline(tmp_path / "model")
    named = ("--model", str(model), "--out", str(tmp_path / "a.mp4"))
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [script, "generate", "a red ball", *named, "--steps", "1", *options],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"JAX_PLATFORMS": "cpu"},
    )


def test_video(tmp_path: Path) -> None:
    result = generate(tmp_path, "--mesh", "data=2,heads=2", "--json", "-")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["mesh"] == {"data": 2, "heads": 2}
    assert count_frames(tmp_path / "a.mp4") == 3


def test_rows_that_do_not_divide(tmp_path: Path) -> None:
    result = generate(tmp_path, "--mesh", "data=2", "--guidance-scale", "1")
    assert result.returncode == 2, result.stderr
    assert "divides the 1 rows of a call with 1 videos without guidance" in result.stderr
    assert not (tmp_path / "a.mp4").exists()
