"""Pictures: written whole, showing what the plans do, and without side effects."""

import sys

import matplotlib
import matplotlib.figure
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

import cinetile as ct
from cinetile.lab import pictures
from cinetile.lab.bench import LadderConfig, Workload, run_ladder
from cinetile.plans.plan import Mode

GRID = ct.TokenGrid(5, 6, 8)
COLOURS = {"skipped": pictures._SKIPPED, "full": pictures._FULL, "masked": pictures._MASKED}


def make_plans(mask=None, block_q=40, block_kv=48):
    mask = ct.spatial_mask(GRID, width=60) if mask is None else mask
    modes: tuple[Mode, ...] = ("dense", "naive", "split", "aligned")
    return tuple(ct.plan_tiles(mask, block_q, block_kv, mode) for mode in modes)


def share_of(path, colour: str) -> float:
    """Share of a picture's pixels that have exactly a colour."""
    pixels = imread(path)[..., :3]
    return float(np.all(np.abs(pixels - to_rgb(COLOURS[colour])) < 1 / 255, axis=-1).mean())


class TestPlanPicture:
    def test_shows_every_kind_of_tile(self, tmp_path):
        pictures.plan_picture(make_plans(), tmp_path / "plan.png")
        for colour in COLOURS:
            assert share_of(tmp_path / "plan.png", colour) > 0.01

    def test_dense_attention_has_no_skipped_tile(self, tmp_path):
        dense, naive, *_ = make_plans()
        pictures.plan_picture((dense,), tmp_path / "dense.png")
        pictures.plan_picture((naive,), tmp_path / "naive.png")
        assert share_of(tmp_path / "dense.png", "full") > 0.3
        # Each legend holds one small patch of every colour.
        assert share_of(tmp_path / "dense.png", "skipped") < 0.01
        assert share_of(tmp_path / "naive.png", "full") < 0.01

    @pytest.mark.parametrize(
        "mask",
        [
            ct.temporal_mask(GRID, width=50, sink_frames=2),
            ct.temporal_mask(GRID, width=0, sink_frames=5),
            ct.dense_mask(GRID),
            ct.svg_mask(
                ct.TokenGrid(5, 6, 8, text_tokens=20),
                "temporal",
                0.5,
                model="hunyuan",
                prompt_length=7,
            ),
            ct.spatial_mask(ct.TokenGrid(5, 6, 8, text_tokens=9, text_first=True), width=30),
            ct.spatial_mask(ct.TokenGrid(1, 1, 1), width=0),
        ],
        ids=lambda mask: mask.name,
    )
    def test_any_mask_can_be_drawn(self, mask, tmp_path):
        pictures.plan_picture(make_plans(mask), tmp_path / "plan.png")
        assert imread(tmp_path / "plan.png").std() > 0.05

    def test_more_tiles_than_pixels_are_mixed(self, tmp_path):
        plans = make_plans(block_q=1, block_kv=1)
        many = ct.plan_tiles(ct.spatial_mask(ct.TokenGrid(5, 12, 20), width=300), 1, 1)
        pictures.plan_picture((*plans[:1], many), tmp_path / "plan.png")
        assert share_of(tmp_path / "plan.png", "full") > 0.05

    def test_no_plans(self, tmp_path):
        with pytest.raises(ValueError, match="at least one plan"):
            pictures.plan_picture((), tmp_path / "plan.png")

    def test_leaves_the_callers_matplotlib_alone(self, tmp_path):
        before = dict(matplotlib.rcParams)
        pictures.plan_picture(make_plans(), tmp_path / "plan.png")
        assert dict(matplotlib.rcParams) == before
        if "matplotlib.pyplot" in sys.modules:
            assert not sys.modules["matplotlib.pyplot"].get_fignums()


class TestLadderPicture:
    def test_shows_maps_and_bars(self, tmp_path):
        shape = Workload(GRID, width=60, head_dim=8, block_q=40, block_kv=48)
        config = LadderConfig(shape, repeats=1, check_rows=4)
        pictures.ladder_picture(run_ladder(config), config.plans(), tmp_path / "ladder.png")
        pictures.plan_picture(tuple(config.plans().values()), tmp_path / "plan.png")
        ladder, plan = imread(tmp_path / "ladder.png"), imread(tmp_path / "plan.png")
        assert ladder.shape[0] > plan.shape[0]
        below = ladder[plan.shape[0] :, :, :3]
        blue = np.all(np.abs(below - to_rgb(pictures._FULL)) < 1 / 255, axis=-1)
        assert blue.mean() > 0.05

    def test_modes_that_did_not_run_are_not_drawn(self, tmp_path):
        shape = Workload(GRID, width=60, head_dim=8, block_q=40, block_kv=48)
        config = LadderConfig(shape, modes=("split",), repeats=1, check_rows=4)
        pictures.ladder_picture(run_ladder(config), config.plans(), tmp_path / "ladder.png")
        assert share_of(tmp_path / "ladder.png", "masked") > 0.01


class TestFiles:
    def test_old_picture_survives_a_failure(self, tmp_path, monkeypatch):
        path = tmp_path / "plan.png"
        path.write_bytes(b"old")

        def fail(_self, file, **_options):
            file.write(b"half")
            raise OSError("disk full")

        monkeypatch.setattr(matplotlib.figure.Figure, "savefig", fail)
        with pytest.raises(OSError, match="disk full"):
            pictures.plan_picture(make_plans(), path)
        assert path.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [path]

    def test_missing_matplotlib_says_what_to_install(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ImportError, match=r'matplotlib: run .*"\.\[plot\]"'):
            pictures.plan_picture(make_plans(), tmp_path / "plan.png")
        assert not list(tmp_path.iterdir())
