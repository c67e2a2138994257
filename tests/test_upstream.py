"""The masks of Sparse VideoGen against an independent statement of what upstream computes."""

from typing import Any

import brute_force
import numpy as np
import pytest
import strategies
from hypothesis import given

import cinetile as ct

both_patterns = pytest.mark.parametrize("pattern", ["spatial", "temporal"])


def grid_of(model: str, frames: int, height: int, width: int, text: int) -> ct.TokenGrid:
    return ct.TokenGrid(frames, height, width, text, text_first=model == "cogvideox")


# Large enough for widths of several multiples of 128.
BY_DENSITY = [
    pytest.param("wan", (7, 8, 9, 0), 0.35, {}, id="wan-504"),
    pytest.param("wan", (5, 20, 26, 0), 0.25, {}, id="wan-2600"),
    pytest.param("wan", (3, 30, 33, 0), 0.8, {}, id="wan-2970"),
    pytest.param("wan", (4, 8, 16, 0), 0.75, {}, id="wan-512-width-exactly-256"),
    pytest.param("wan", (2, 5, 7, 0), 0.9, {}, id="wan-70-wider-than-the-sequence"),
    pytest.param("hunyuan", (6, 9, 10, 36), 0.6, {}, id="hunyuan-576"),
    pytest.param("hunyuan", (6, 9, 10, 36), 0.6, {"prompt_length": 11}, id="hunyuan-576-padded"),
    pytest.param("hunyuan", (5, 20, 24, 100), 0.5, {"prompt_length": 0}, id="hunyuan-2500-no-text"),
    pytest.param("hunyuan", (4, 8, 16, 0), 0.75, {}, id="hunyuan-512-width-exactly-256"),
    pytest.param("hunyuan", (3, 5, 8, 10), 0.4, {}, id="hunyuan-130-width-rounds-to-0"),
    pytest.param("cogvideox", (6, 9, 10, 36), 0.6, {}, id="cogvideox-576"),
    pytest.param("cogvideox", (6, 9, 10, 36), 0.6, {"sink": True}, id="cogvideox-576-sink"),
    pytest.param("cogvideox", (5, 18, 22, 226), 0.7, {"sink": True}, id="cogvideox-2206-sink"),
    pytest.param("cogvideox", (3, 5, 8, 10), 0.4, {}, id="cogvideox-130-width-rounds-to-0"),
]


@both_patterns
@pytest.mark.parametrize(("model", "sizes", "density", "options"), BY_DENSITY)
def test_by_density(pattern: Any, model: Any, sizes: Any, density: float, options: Any) -> None:
    grid = grid_of(model, *sizes)
    two_frame = brute_force.upstream_width(grid, density, model)
    kept = brute_force.upstream_mask(grid, pattern, model, two_frame, **options)
    mask = ct.svg_mask(grid, pattern, density, model=model, **options)
    np.testing.assert_array_equal(mask.to_dense(), kept)
    assert mask.kept_pairs == kept.sum()


@given(strategies.upstream_examples())
def test_by_width(example: strategies.Example) -> None:
    np.testing.assert_array_equal(example.mask.to_dense(), example.kept)
    assert example.mask.kept_pairs == example.kept.sum()


@pytest.mark.parametrize("density", [0.05, 0.15, 0.25, 0.3, 0.35, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        pytest.param("wan", (21, 45, 80, 0), id="wan-720p"),
        pytest.param("wan", (21, 30, 52, 0), id="wan-480p"),
        pytest.param("hunyuan", (33, 45, 80, 0), id="hunyuan-720p-no-text"),
        pytest.param("hunyuan", (33, 45, 80, 256), id="hunyuan-720p"),
        pytest.param("cogvideox", (11, 48, 85, 226), id="cogvideox-1.5"),
    ],
)
def test_widths_of_real_models(model: Any, sizes: Any, density: float) -> None:
    """Kept pairs by density equal those by the width that upstream rounds to."""
    grid = grid_of(model, *sizes)
    two_frame = brute_force.upstream_width(grid, density, model)
    by_width = ct.svg_mask(grid, "spatial", width=two_frame, model=model)
    by_density = ct.svg_mask(grid, "spatial", density, model=model)
    assert by_density.segments == by_width.segments


@pytest.mark.parametrize("multiples", range(2, 25))
@pytest.mark.parametrize("model", ["wan", "hunyuan", "cogvideox"])
def test_whole_multiples_round_as_upstream(model: Any, multiples: int) -> None:
    """Where the width is a whole multiple of 128, the order of float operations decides."""
    grid = ct.TokenGrid(6, 23, 25)  # 3,450 tokens; frames are no multiple of 128
    density = 1 - (1 - 128 * multiples / grid.num_tokens) ** 2
    two_frame = brute_force.upstream_width(grid, density, model)
    assert abs(two_frame - 128 * multiples) <= 128
    by_width = ct.svg_mask(grid, "spatial", width=two_frame, model=model)
    assert ct.svg_mask(grid, "spatial", density, model=model).segments == by_width.segments


@pytest.mark.parametrize("model", ["wan", "hunyuan", "cogvideox"])
def test_density_one_follows_upstream(model: Any) -> None:
    """Which is not dense: the text's share is taken off, and the width may be rounded down."""
    grid = grid_of(model, 6, 9, 10, 0 if model == "wan" else 36)
    two_frame = brute_force.upstream_width(grid, 1.0, model)
    kept = brute_force.upstream_mask(grid, "spatial", model, two_frame)
    np.testing.assert_array_equal(ct.svg_mask(grid, "spatial", 1.0, model=model).to_dense(), kept)


def test_temporal_prefix_is_in_the_placed_order() -> None:
    """Upstream's sink of a temporal head is not the first frame; `temporal_mask` is for that."""
    grid = ct.TokenGrid(3, 2, 2)
    kept = ct.svg_mask(grid, "temporal", width=0).to_dense()
    # The first 4 tokens in token-major order: place 0 of all frames and place 1 of frame 0.
    assert np.flatnonzero(kept.all(axis=0)).tolist() == [0, 1, 4, 8]


def test_padded_text_attends_to_padded_text_alone() -> None:
    grid = ct.TokenGrid(2, 1, 3, text_tokens=4)
    kept = ct.svg_mask(grid, "spatial", width=1, model="hunyuan", prompt_length=1).to_dense()
    np.testing.assert_array_equal(kept[7:], np.arange(10)[None, :].repeat(3, 0) >= 7)
    assert not kept[:7, 7:].any()
    assert kept[6, :7].all()


@pytest.mark.parametrize(
    ("model", "width", "farthest"), [("wan", 3, 3), ("hunyuan", 3, 2), ("cogvideox", 3, 2)]
)
def test_width_tells_the_largest_distance(model: Any, width: int, farthest: int) -> None:
    assert ct.svg_mask(ct.TokenGrid(3, 2, 2), "spatial", width=width, model=model).width == farthest


GRID = ct.TokenGrid(3, 2, 4)
TEXT_LAST = ct.TokenGrid(3, 2, 4, text_tokens=6)
TEXT_FIRST = ct.TokenGrid(3, 2, 4, text_tokens=6, text_first=True)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("grid", "options", "message"),
    [
        (GRID, {"pattern": "diagonal", "width": 1}, "pattern must be one of 'spatial', 'temporal'"),
        (GRID, {"model": "sora", "width": 1}, "model must be one of 'wan', 'hunyuan', 'cogvideox'"),
        (GRID, {}, "exactly one of density and width"),
        (GRID, {"density": 0.5, "width": 1}, "exactly one of density and width"),
        (GRID, {"density": 0.0}, r"density must lie in \(0, 1\]"),
        (GRID, {"density": 1.1}, r"density must lie in \(0, 1\]"),
        (GRID, {"density": float("nan")}, "density must be finite"),
        (GRID, {"width": -1}, "width must be at least 0"),
        (TEXT_LAST, {"width": 1}, "'wan' attends only to video, got grid.text_tokens=6"),
        (TEXT_FIRST, {"width": 1, "model": "hunyuan"}, "text after the video.*grid.text_first"),
        (TEXT_LAST, {"width": 1, "model": "cogvideox"}, "text before the video.*grid.text_first"),
        (GRID, {"width": 1, "prompt_length": 0}, "prompt_length is for model 'hunyuan' only"),
        (
            TEXT_LAST,
            {"width": 1, "model": "hunyuan", "prompt_length": 7},
            "prompt_length must be at most 6",
        ),
        (
            TEXT_LAST,
            {"width": 1, "model": "hunyuan", "prompt_length": -1},
            "prompt_length must be at least 0",
        ),
        (GRID, {"width": 1, "model": "hunyuan", "sink": True}, "sink must be False .* 'hunyuan'"),
        (GRID, {"width": 0, "model": "hunyuan"}, "width must be above 0"),
        (GRID, {"width": 0, "model": "cogvideox"}, "width must be above 0"),
        (GRID, {"width": 0, "sink": False, "model": "cogvideox"}, "width must be above 0"),
        (
            TEXT_LAST,
            {"width": 0, "model": "hunyuan", "prompt_length": 0},
            "width must be above 0",
        ),
        (TEXT_LAST, {"density": 0.2, "model": "hunyuan"}, "density must exceed 0.4"),
    ],
)
def test_errors(grid: ct.TokenGrid, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ct.svg_mask(grid, **{"pattern": "spatial", **options})


@pytest.mark.usefixtures("unchecked")
def test_prompt_length_must_be_an_integer() -> None:
    prompt_length: Any = 2.5
    with pytest.raises(TypeError, match="prompt_length must be an integer"):
        ct.svg_mask(TEXT_LAST, "spatial", width=1, model="hunyuan", prompt_length=prompt_length)


def test_width_that_rounds_down_to_nothing_says_so() -> None:
    """A small clip without text: upstream would keep no key at all."""
    with pytest.raises(ValueError, match="width must be above 0"):
        ct.svg_mask(GRID, "spatial", 0.3, model="hunyuan")
