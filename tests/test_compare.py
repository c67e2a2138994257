"""`cinetile compare`: two videos from the same noise."""

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from click.testing import CliRunner, Result
from wan_models import change_json, small_pipeline

import cinetile as ct
from cinetile.cli import main
from cinetile.lab.compare.pictures import difference, played_again, side_by_side
from cinetile.lab.compare.videos import VideoComparison, compare_videos
from cinetile.models.video import count_frames
from cinetile.models.wan import WanPipeline

PROMPT = "a red ball rolls"
TILES: dict[str, Any] = {"block_q": 4, "block_kv": 4, "width_multiple": 1, "dense_layers": ()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_pipeline(tmp_path_factory.mktemp("wan") / "model")


@pytest.fixture(scope="module")
def pipe(model: Path) -> WanPipeline:
    return WanPipeline.from_pretrained(model)


@pytest.fixture(scope="module")
def compared(pipe: WanPipeline) -> VideoComparison:
    policy = ct.SparsityPolicy(0.3, dense_steps=((0, 1),), **TILES)
    return compare_videos(pipe, PROMPT, policy, seed=3)


class TestComparison:
    def test_the_dense_side_is_the_plain_video(
        self, pipe: WanPipeline, compared: VideoComparison
    ) -> None:
        plain = pipe(PROMPT, seed=3).frames[0]
        np.testing.assert_allclose(compared.dense.frames, plain, atol=1e-5)

    def test_the_sparse_side_is_the_video_of_the_policy(
        self, pipe: WanPipeline, compared: VideoComparison
    ) -> None:
        policy = ct.SparsityPolicy(0.3, dense_steps=((0, 1),), **TILES)
        np.testing.assert_allclose(
            compared.sparse.frames, pipe(PROMPT, seed=3, policy=policy).frames[0], atol=1e-5
        )
        assert compared.psnr.max() < 60

    def test_metrics_are_those_of_the_frames(self, compared: VideoComparison) -> None:
        for name in ("psnr", "ssim", "flip"):
            expected = getattr(ct.metrics, name)(compared.sparse.frames, compared.dense.frames)
            np.testing.assert_array_equal(getattr(compared, name), expected)

    def test_times(self, compared: VideoComparison) -> None:
        for side in (compared.dense, compared.sparse):
            assert len(side.step_seconds) == 3
            assert side.denoise_s == pytest.approx(sum(side.step_seconds))
            assert side.rounds_s == (pytest.approx(side.denoise_s),)
            assert side.attention_share.value is None
        assert compared.speedup.reason == "measured in 1 round, at least 3 are needed"

    def test_routes_are_those_of_the_prompt(self, compared: VideoComparison) -> None:
        calls = [entry["pattern"] for entry in compared.routes.entries]
        assert len(calls) == 3 * 2 * 2  # steps, layers, heads
        assert calls.count("dense") == 4

    def test_density_1_changes_nothing(self, pipe: WanPipeline) -> None:
        policy = ct.SparsityPolicy(1.0, dense_steps=(), mode="split", **TILES)
        result = compare_videos(pipe, PROMPT, policy, seed=1, num_inference_steps=2)
        assert result.psnr.min() > 90
        assert result.ssim.min() > 0.9999

    def test_rounds(self, pipe: WanPipeline) -> None:
        stages: list[str] = []
        policy = ct.SparsityPolicy(0.3, dense_steps=(), **TILES)
        result = compare_videos(
            pipe,
            PROMPT,
            policy,
            repeats=2,
            num_inference_steps=1,
            progress=lambda stage, *_: stages.append(stage) if stage not in stages[-1:] else None,
        )
        denoising = [stage for stage in stages if "denoising" in stage]
        assert denoising == [
            *2 * ["dense: denoising", "sparse: denoising", "no attention: denoising"],
        ]
        assert len(result.dense.step_seconds) == 1

    def test_bad_rounds(self, pipe: WanPipeline) -> None:
        with pytest.raises(ValueError, match="repeats must be at least 1"):
            compare_videos(pipe, PROMPT, ct.SparsityPolicy(), repeats=0)


class TestPictures:
    def test_abreast(self) -> None:
        dense = np.zeros((2, 16, 24, 3), np.float32)
        sparse = np.full((2, 16, 24, 3), 0.1, np.float32)
        video = side_by_side(dense, sparse)
        assert video.shape == (2, 28 + 160, 3 * 240 + 2 * 8, 3)
        assert video[:, 28:, :240].max() == 0
        np.testing.assert_allclose(video[:, 28:, 248:488], 0.1)
        np.testing.assert_allclose(video[:, 28:, 496:], 0.4, atol=1e-6)

    def test_panels_are_named(self) -> None:
        video = np.zeros((1, 16, 24, 3), np.float32)
        strip = side_by_side(video, video)[0, :28]
        names = (strip[:, :240], strip[:, 248:488], strip[:, 496:])
        assert all(0 < (name < 0.5).mean() < 0.2 for name in names)
        assert not np.array_equal(names[0], names[1])

    @pytest.mark.parametrize(("frames", "fps", "expected"), [(9, 16, 54), (81, 16, 81), (1, 8, 24)])
    def test_short_videos_are_played_again(self, frames: int, fps: int, expected: int) -> None:
        video = np.random.default_rng(0).random((frames, 2, 2, 3)).astype(np.float32)
        longer = played_again(video, fps)
        assert len(longer) == expected
        np.testing.assert_array_equal(longer[-frames:], video)

    def test_large_videos_stay_as_they_are(self) -> None:
        video = np.zeros((1, 300, 401, 3), np.float32)
        assert side_by_side(video, video).shape == (1, 328, 3 * 401 + 2 * 8 + 1, 3)

    def test_difference_has_an_end(self) -> None:
        black, white = np.zeros((1, 4, 4, 3), np.float32), np.ones((1, 4, 4, 3), np.float32)
        assert difference(black, white).max() == 1


def picture_size(video: Path) -> tuple[int, int]:
    with av.open(str(video)) as container:
        return container.streams.video[0].width, container.streams.video[0].height


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


class TestCommand:
    def test_help(self) -> None:
        result = invoke("--help")
        assert result.exit_code == 0
        examples = result.output.split("Examples:")[1].strip().splitlines()
        assert all(line.strip().startswith("cinetile compare ") for line in examples)
        assert "[default: moderate]" in " ".join(result.output.split())

    def test_files_and_json(self, model: Path, tmp_path: Path) -> None:
        policy = tmp_path / "policy.json"
        ct.SparsityPolicy(0.3, dense_steps=((0, 1),), **TILES).to_file(policy)
        out, picture, routes, written = (
            tmp_path / name for name in ("c.mp4", "c.png", "r.csv", "c.json")
        )
        result = invoke(
            *(PROMPT, "--model", model, "--policy", policy, "--seed", 3),
            *("--out", out, "--picture", picture, "--routes", routes, "--json", written),
        )
        assert result.exit_code == 0, result.output
        assert "speed-up" in result.stdout
        assert "PSNR" in result.stdout
        assert "dense: denoising ..." in result.stderr
        assert count_frames(out) == 24  # three frames at 8 a second, played eight times
        assert picture_size(out) == (736, 188)
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert len(routes.read_text().splitlines()) == 1 + 12
        document = json.loads(written.read_text())
        assert set(document["dense"]) >= {"denoise_s", "attention_share"}
        assert document["speedup"] is None
        assert document["no_speedup_reason"] == "measured in 1 round, at least 3 are needed"
        assert "No speed-up is stated: measured in 1 round" in result.stdout
        assert document["psnr_min"] == min(document["psnr"])
        assert document["flip_max"] == max(document["flip"])
        assert len(document["ssim"]) == document["size"]["num_frames"] == 3
        assert sum(document["routes"].values()) == 12
        assert document["policy"]["density"] == 0.3

    def test_only_json(self, model: Path, tmp_path: Path) -> None:
        routes = tmp_path / "routes.png"
        result = invoke(PROMPT, "--model", model, "--steps", 2, "--routes", routes, "--json", "-")
        assert result.exit_code == 0, result.output
        assert routes.read_bytes().startswith(b"\x89PNG")
        assert json.loads(result.stdout)["policy"]["dense_steps"] == [[0.0, 0.275]]

    def test_a_size_that_the_checkpoint_cannot_make(self, tmp_path: Path) -> None:
        folder = small_pipeline(tmp_path / "model")
        change_json(folder / "generation.json", trained_sizes=[[3, 16, 24]])
        written = tmp_path / "c.json"
        result = invoke(PROMPT, "--model", folder, "--height", 32, "--steps", 2, "--json", written)
        assert result.exit_code == 0, result.output
        assert result.stderr.startswith("warning: ")
        assert result.stderr.count("expect noise at 3 frames of 24x32") == 1
        assert "PSNR, SSIM and FLIP say little" in " ".join(result.stdout.split())
        assert json.loads(written.read_text())["is_trained_size"] is False

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((), "PROMPT is missing"),
            (("--shape-only", PROMPT), "PROMPT has no effect with --shape-only"),
            (("--shape-only", "--out", "c.mp4"), "--out has no effect with --shape-only"),
            (("--shape-only", "--policy", "bold"), "--policy must be one of"),
            (("--shape-only", "--heads", 0), "heads must be at least 1"),
            (("--shape-only", "--resolutions", "8k"), "must hold names of 480p"),
        ],
    )
    def test_bad_input_without_a_model(self, arguments: tuple[object, ...], message: str) -> None:
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert message in result.stderr

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("",), "prompt must not be empty"),
            ((PROMPT, "--policy", "bold"), "--policy must be one of"),
            ((PROMPT, "--repeats", 0), "repeats must be at least 1"),
            ((PROMPT, "--seed", -1), "seed must be at least 0"),
            ((PROMPT, "--height", 4), "height must be"),
            ((PROMPT, "--out", "nowhere/c.mp4"), "nowhere' does not exist"),
            ((PROMPT, "--picture", "c.gif"), "must end in .png"),
            ((PROMPT, "--implementation", "none"), "implementation must be None, one of"),
        ],
    )
    def test_bad_input(self, model: Path, arguments: tuple[object, ...], message: str) -> None:
        result = invoke(*arguments, "--model", model)
        assert result.exit_code == 2
        assert message in result.stderr
