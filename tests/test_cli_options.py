"""Options without effect and files that cannot be written are refused before any work."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from wan_models import small_pipeline

from cinetile.cli import main
from cinetile.models.video import count_frames

TINY = ("--grid", "3x4x5", "--width", "9", "--block-q", "12", "--block-kv", "8")
PROMPT = "a red ball rolls"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


class TestWithoutEffect:
    @pytest.mark.parametrize(
        ("option", "value"),
        [("--heads", 3), ("--heads", 1), ("--resolutions", "480p"), ("--full-width", "1.3B")],
    )
    def test_comparing_videos(self, option, value):
        result = invoke("compare", PROMPT, option, value)
        assert result.exit_code == 2
        assert f"{option} has an effect only with --shape-only" in result.stderr

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("--dtype", "float32"),
            ("--seed", 0),
            ("--height", 64),
            ("--steps", 4),
            ("--negative-prompt", "x"),
            ("--flow-shift", 3),
            ("--model", "folder"),
        ],
    )
    def test_comparing_blocks(self, option, value):
        result = invoke("compare", "--shape-only", option, value)
        assert result.exit_code == 2
        assert f"{option} has no effect with --shape-only" in result.stderr

    @pytest.mark.parametrize(
        "arguments",
        [
            ("plan", *TINY, "--mode", "split"),
            ("tune", "--grid", "3x4x5"),
            ("tune", "--grid", "3x4x5", "--mode", "naive"),
            ("tpu", *TINY, "--modes", "dense,split"),
        ],
    )
    def test_rounding_where_nothing_is_aligned(self, arguments):
        result = invoke(*arguments, "--rounding", "balanced")
        assert result.exit_code == 2
        assert "--rounding has an effect only on plans of mode aligned" in result.stderr

    @pytest.mark.parametrize("mode", [(), ("--mode", "aligned")])
    def test_rounding_of_aligned_plans(self, mode):
        assert invoke("plan", *TINY, *mode, "--rounding", "balanced").exit_code == 0

    @pytest.mark.parametrize("option", [("--text-first",), ("--prompt-length", 3)])
    def test_text_that_is_not_there(self, option):
        result = invoke("route", "--clip", "sample", "--grid", "3x4x5", *option)
        assert result.exit_code == 2
        assert f"{option[0]} has an effect only with --text-tokens" in result.stderr

    @pytest.mark.parametrize("command", ["generate", "compare"])
    def test_a_negative_prompt_without_guidance(self, tmp_path, command):
        model = small_pipeline(tmp_path / "model")
        arguments = ("--model", model, "--out", tmp_path / "a.mp4", "--guidance-scale", 1)
        result = invoke(command, PROMPT, *arguments, "--negative-prompt", "x")
        assert result.exit_code == 2
        assert "--negative-prompt has an effect only with a --guidance-scale" in result.stderr


class TestOutputs:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("file/a.png", "is no folder"),
            ("missing/a.png", "does not exist"),
            ("x" * 250 + ".png", "too long a name"),
            ("folder.png", "is a folder"),
        ],
    )
    def test_unwritable_before_work(self, tmp_path, name, message):
        (tmp_path / "file").touch()
        (tmp_path / "folder.png").mkdir()
        result = invoke("plan", *TINY, "--picture", tmp_path / name)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())
        assert result.stdout == ""

    def test_a_file_that_is_read_only(self, tmp_path, monkeypatch):
        kept = tmp_path / "kept.json"
        kept.write_text("{}")
        monkeypatch.setattr("os.access", lambda path, _: Path(path) != kept)
        result = invoke("plan", *TINY, "--json", kept)
        assert result.exit_code == 2
        assert "is read-only" in result.stderr
        assert kept.read_text() == "{}"


class TestModel:
    @pytest.mark.parametrize("command", ["generate", "compare"])
    def test_a_repository_of_the_hub(self, tmp_path, monkeypatch, command):
        monkeypatch.chdir(tmp_path)
        repository = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
        result = invoke(command, PROMPT, "--model", repository, "--out", "a.mp4")
        assert result.exit_code == 2
        assert f"hf download {repository} --local-dir DIR" in " ".join(result.stderr.split())

    @pytest.mark.parametrize("name", ["nowhere", "a/b/c", "/a/b", "../b", "file"])
    def test_what_is_no_repository(self, tmp_path, monkeypatch, name):
        monkeypatch.chdir(tmp_path)
        Path("file").touch()
        result = invoke("generate", PROMPT, "--model", name, "--out", "a.mp4")
        assert result.exit_code == 2
        assert "must be a folder in diffusers' layout" in " ".join(result.stderr.split())
        assert "hf download" not in result.stderr


class TestWithoutPyAV:
    def test_errors_name_what_was_asked_for(self, tmp_path, monkeypatch):
        clip = tmp_path / "holiday.mp4"
        clip.touch()
        monkeypatch.setitem(sys.modules, "av", None)
        with pytest.raises(ImportError, match=r"^reading the video holiday\.mp4 needs PyAV"):
            count_frames(clip)
        result = invoke("generate", PROMPT, "--out", clip)
        assert result.exit_code == 1
        assert "writing a video needs PyAV" in result.stderr
