"""`cinetile generate`."""

import json
import os
import signal
import subprocess
import sysconfig
from pathlib import Path

import jax
import numpy as np
import pytest
from click.testing import CliRunner, Result
from commands import heeding_interrupts
from wan_models import small_pipeline

import cinetile as ct
from cinetile.cli import main
from cinetile.models.video import count_frames

PROMPT = "a red ball rolls"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_pipeline(tmp_path_factory.mktemp("wan") / "model")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["generate", *map(str, arguments)])


def test_help():
    result = invoke("--help")
    assert result.exit_code == 0
    examples = result.output.split("Examples:")[1].strip().splitlines()
    assert all(line.strip().startswith("cinetile generate ") for line in examples)


class TestVideo:
    def test_file_and_table(self, model: Path, tmp_path: Path):
        out = tmp_path / "ball.mp4"
        result = invoke(PROMPT, "--model", model, "--out", out)
        assert result.exit_code == 0, result.output
        assert count_frames(out) == 3
        assert "3 frames of 24x16" in result.stdout
        assert "denoising ..." in result.stderr
        assert f"wrote {out}" in result.stderr
        assert list(tmp_path.iterdir()) == [out]

    def test_json(self, model: Path, tmp_path: Path):
        out = tmp_path / "ball.mp4"
        options = ("--steps", 2, "--seed", 5, "--num-frames", 2, "--flow-shift", 5, "--json", "-")
        result = invoke(PROMPT, "--model", model, "--out", out, *options)
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        assert document["size"]["num_frames"] == 2
        assert document["size"]["tokens"] == 2 * 2 * 3
        assert document["steps"] == len(document["step_seconds"]) == 2
        assert document["seed"] == 5
        assert document["out"] == str(out)
        assert set(document["seconds"]) == {"prompt", "weights", "denoising", "decoding", "all"}

    def test_seed_and_options_matter(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        written: list[np.ndarray] = []

        def keep(path: Path, frames: np.ndarray, **_: object) -> None:
            del path
            written.append(frames)

        monkeypatch.setattr("cinetile.models.video.write_video", keep)

        def frames(*options: object) -> np.ndarray:
            out = tmp_path / "one.mp4"
            assert invoke(PROMPT, "--model", model, "--out", out, *options).exit_code == 0
            return written[-1]

        plain = frames()
        np.testing.assert_array_equal(frames("--seed", 0), plain)
        for options in (("--seed", 1), ("--guidance-scale", 9), ("--flow-shift", 9)):
            assert np.abs(frames(*options) - plain).max() > 0.01

    def test_rounding_is_told(self, model: Path, tmp_path: Path):
        result = invoke(PROMPT, "--model", model, "--out", tmp_path / "a.mp4", "--width", 31)
        assert result.exit_code == 0
        assert result.stderr.startswith("warning: the video's size is rounded down: width 31 -> 24")


class TestSmallCheckpoint:
    def test_is_taken_where_no_model_is_named(self, tmp_path: Path):
        out = tmp_path / "ball.mp4"
        result = invoke("a red ball rolls to the right", "--steps", 2, "--out", out)
        assert result.exit_code == 0, result.output
        assert "9 frames of 64x64" in result.stdout
        assert result.stderr.startswith("9 frames of 64x64, 576 tokens, 2 steps\n")
        assert count_frames(out) == 9

    def test_unknown_words_are_told_once(self, tmp_path: Path):
        result = invoke("a cat 猫", "--steps", 1, "--out", tmp_path / "cat.mp4")
        assert result.exit_code == 0, result.output
        told = "warning: prompt has words that the model does not know: 'cat', '猫'"
        assert result.stderr.splitlines()[0] == told
        assert result.stderr.count("does not know") == 1


class TestPolicy:
    def test_preset(self, model: Path, tmp_path: Path):
        options = ("--policy", "moderate", "--json", tmp_path / "ball.json")
        result = invoke(PROMPT, "--model", model, "--out", tmp_path / "ball.mp4", *options)
        assert result.exit_code == 0, result.output
        assert "% spatial" in result.stdout
        document = json.loads((tmp_path / "ball.json").read_text())
        assert document["policy"]["mode"] == "aligned"
        # 3 steps of 2 layers with 2 heads, for the prompt and for the negative prompt.
        assert sum(document["head_calls"].values()) == 24
        assert document["head_calls"]["dense"] >= 12

    def test_file(self, model: Path, tmp_path: Path):
        path = tmp_path / "policy.json"
        ct.SparsityPolicy(density=0.4, dense_steps=()).to_file(path)
        options = ("--policy", path, "--json", "-")
        result = invoke(PROMPT, "--model", model, "--out", tmp_path / "ball.mp4", *options)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["policy"]["density"] == 0.4

    def test_low_density_warns_in_a_line(self, model: Path, tmp_path: Path):
        path = tmp_path / "policy.json"
        path.write_text('{"density": 0.1}')
        result = invoke(PROMPT, "--model", model, "--out", tmp_path / "ball.mp4", "--policy", path)
        assert result.exit_code == 0, result.output
        assert result.stderr.startswith("warning: density 0.1 is below 0.2")

    @pytest.mark.parametrize("policy", ["bold", "nowhere.json"])
    def test_unknown(self, model: Path, tmp_path: Path, policy: str):
        result = invoke(
            PROMPT, "--model", model, "--out", tmp_path / "ball.mp4", "--policy", policy
        )
        assert result.exit_code == 2
        assert "--policy must be one of conservative, moderate, aggressive, svg" in result.stderr


class TestMesh:
    """What makes a video on a mesh is in tests/devices."""

    def test_too_few_devices(self, model: Path, tmp_path: Path):
        count = len(jax.devices())  # jax has started: no more can be made
        out = tmp_path / "a.mp4"
        result = invoke(PROMPT, "--model", model, "--out", out, "--mesh", f"heads={count + 1}")
        assert result.exit_code == 2
        needs = f"needs {count + 1} devices, jax has {count} (cpu)"
        assert f"a mesh of {count + 1} heads {needs}" in result.stderr

    @pytest.mark.parametrize("mesh", ["4", "heads", "heads=0", "heads=2,heads=2", "tokens=2", ""])
    def test_no_mesh(self, tmp_path: Path, mesh: str):
        result = invoke(PROMPT, "--out", tmp_path / "a.mp4", "--mesh", mesh)
        assert result.exit_code == 2
        assert "does not name devices along data, sequence, heads, each once" in result.stderr


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--steps", 0), "num_inference_steps must be at least 1"),
            (("--height", 3), "height must be at least 8, got 3"),
            (("--seed", -1), "seed must be at least 0"),
            (("--fps", 0), "fps must be at least 1"),
            (("--guidance-scale-2", 3), "guidance_scale_2 is for pipelines"),
            (("--flow-shift", 0), "flow_shift must be above 0"),
            (("--negative-prompt", "red " * 30), "negative_prompt must have at most 10 tokens"),
        ],
    )
    def test_options(self, model: Path, tmp_path: Path, options: tuple, message: str):
        result = invoke(PROMPT, "--model", model, "--out", tmp_path / "a.mp4", *options)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [("  ", "prompt must not be empty"), ("red " * 30, "prompt must have at most 10 tokens")],
    )
    def test_prompts(self, model: Path, tmp_path: Path, prompt: str, message: str):
        result = invoke(prompt, "--model", model, "--out", tmp_path / "a.mp4")
        assert result.exit_code == 2
        assert message in result.stderr

    def test_model(self, tmp_path: Path):
        result = invoke(PROMPT, "--model", tmp_path / "nowhere", "--out", tmp_path / "a.mp4")
        assert result.exit_code == 2
        assert "model must be a folder in diffusers' layout" in result.stderr

    def test_folder_without_weights(self, tmp_path: Path):
        folder = small_pipeline(tmp_path / "model")
        (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
        result = invoke(PROMPT, "--model", folder, "--out", tmp_path / "a.mp4")
        assert result.exit_code == 2
        assert "holds no weights" in result.stderr

    @pytest.mark.parametrize("out", ["nowhere/a.mp4", "a.avi"])
    def test_output(self, model: Path, tmp_path: Path, out: str):
        result = invoke(PROMPT, "--model", model, "--out", tmp_path / out)
        assert result.exit_code == 2
        assert "--out" in result.stderr

    @pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
    def test_interrupt_leaves_nothing(self, model: Path, tmp_path: Path):
        script = str(Path(sysconfig.get_path("scripts")) / "cinetile")
        named = ("--model", str(model), "--out", str(tmp_path / "a.mp4"))
        process = subprocess.Popen(
            heeding_interrupts(script, "generate", PROMPT, "--steps", "5000", *named),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("denoising"):
                break
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 130
        assert stdout == ""
        assert stderr.strip() == "Interrupted."
        assert not list(tmp_path.iterdir())
