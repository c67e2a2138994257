"""The library's own masks against their definitions, and everything that a mask can tell."""

import math
from fractions import Fraction
from typing import Any

import brute_force
import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

import cinetile as ct

WAN_720P = ct.TokenGrid(21, 45, 80)
BUILDERS = {"spatial": ct.spatial_mask, "temporal": ct.temporal_mask}
both_patterns = pytest.mark.parametrize("pattern", ["spatial", "temporal"])


@given(strategies.band_examples())
def test_to_dense_is_the_definition(example: strategies.Example) -> None:
    np.testing.assert_array_equal(example.mask.to_dense(), example.kept)


@both_patterns
@pytest.mark.parametrize(
    ("grid", "width", "sink_frames"),
    [
        pytest.param(ct.TokenGrid(1, 1, 1), 0, 0, id="one token"),
        pytest.param(ct.TokenGrid(1, 3, 4), 2, 0, id="one frame"),
        pytest.param(ct.TokenGrid(1, 3, 4), 2, 1, id="one frame as sink"),
        pytest.param(ct.TokenGrid(9, 1, 1), 1, 2, id="one token a frame"),
        pytest.param(ct.TokenGrid(4, 2, 3), 0, 0, id="the diagonal alone"),
        pytest.param(ct.TokenGrid(4, 2, 3), 0, 1, id="the diagonal and the sink"),
        pytest.param(ct.TokenGrid(4, 2, 3), 5, 4, id="all frames as sink"),
        pytest.param(ct.TokenGrid(4, 2, 3), 23, 0, id="all but nothing"),
        pytest.param(ct.TokenGrid(4, 2, 3), 22, 0, id="all but two corners"),
        pytest.param(ct.TokenGrid(4, 2, 3), 1000, 0, id="wider than the sequence"),
        pytest.param(ct.TokenGrid(4, 2, 3, text_tokens=5), 3, 1, id="text last"),
        pytest.param(ct.TokenGrid(4, 2, 3, 5, text_first=True), 3, 1, id="text first"),
        pytest.param(ct.TokenGrid(4, 2, 3, 40, text_first=True), 3, 2, id="more text than video"),
        pytest.param(ct.TokenGrid(7, 5, 9), 40, 3, id="odd sizes"),
    ],
)
def test_corner_cases(pattern: Any, grid: ct.TokenGrid, width: int, sink_frames: int) -> None:
    mask = BUILDERS[pattern](grid, width=width, sink_frames=sink_frames)
    kept = brute_force.band_mask(grid, pattern, width, sink_frames)
    np.testing.assert_array_equal(mask.to_dense(), kept)
    assert mask.kept_pairs == kept.sum()
    assert mask.width == min(width, grid.num_tokens)


def test_temporal_sink_is_the_real_first_frame() -> None:
    """Unlike upstream's, whose prefix is cut off in token-major order."""
    grid = ct.TokenGrid(3, 2, 2)
    kept = ct.temporal_mask(grid, width=0, sink_frames=1).to_dense()
    assert kept[:, :4].all()
    np.testing.assert_array_equal(kept[4:, 4:], np.eye(8, dtype=bool))


def test_temporal_band_joins_the_frames_of_one_place() -> None:
    grid = ct.TokenGrid(3, 2, 2)
    kept = ct.temporal_mask(grid, width=1, sink_frames=0).to_dense()
    # Token 0 is place 0 of frame 0; its neighbour is place 0 of frame 1.
    assert np.flatnonzero(kept[0]).tolist() == [0, 4]
    # Token 8 is place 0 of frame 2, next to place 1 of frame 0.
    assert np.flatnonzero(kept[8]).tolist() == [1, 4, 8]


class TestExamples:
    """Facts that hold for every mask of the library, upstream's included."""

    @given(strategies.examples)
    def test_kept_pairs_and_density(self, example: strategies.Example) -> None:
        assert type(example.mask.kept_pairs) is int
        assert example.mask.kept_pairs == example.kept.sum()
        assert example.mask.density == example.kept.sum() / example.kept.size

    @given(strategies.examples)
    def test_no_row_is_empty(self, example: strategies.Example) -> None:
        assert example.mask.to_dense().any(axis=1).all()

    @given(strategies.examples, st.data())
    def test_row_edges(self, example: strategies.Example, data: st.DataObject) -> None:
        tokens = example.mask.num_tokens
        rows = np.array(data.draw(st.lists(st.integers(0, tokens - 1), max_size=6)), np.int64)
        edges = example.mask.row_edges(rows)
        assert [edge.dtype for edge in edges] == [np.int32] * 3
        prefix, low, high = (edge[:, None] for edge in edges)
        keys = np.arange(tokens)
        kept = (keys < prefix) | ((low <= keys) & (keys < high))
        np.testing.assert_array_equal(kept, example.placed[rows])
        assert (low <= high).all()

    @given(strategies.examples)
    def test_row_edges_of_all_rows(self, example: strategies.Example) -> None:
        every_row = np.arange(example.mask.num_tokens)
        np.testing.assert_array_equal(example.mask.row_edges(), example.mask.row_edges(every_row))

    @given(strategies.examples, st.data())
    def test_count_kept_of_a_rectangle(
        self, example: strategies.Example, data: st.DataObject
    ) -> None:
        cuts = st.integers(0, example.mask.num_tokens)
        rows, columns = (sorted((data.draw(cuts), data.draw(cuts))) for _ in range(2))
        count = example.mask.count_kept(*(np.array([cut]) for cut in (*rows, *columns)))
        assert count.tolist() == [example.placed[slice(*rows), slice(*columns)].sum()]

    @given(strategies.tilings())
    def test_count_kept_of_many_rectangles(
        self, tiling: tuple[strategies.Example, int, int]
    ) -> None:
        example, block_q, block_kv = tiling
        tokens = example.mask.num_tokens
        row, column = np.arange(0, tokens, block_q), np.arange(0, tokens, block_kv)
        counts = example.mask.count_kept(
            row[:, None],
            np.minimum(row + block_q, tokens)[:, None],
            column[None, :],
            np.minimum(column + block_kv, tokens)[None, :],
        )
        by_row = np.add.reduceat(example.placed.astype(int), row, axis=0)
        np.testing.assert_array_equal(counts, np.add.reduceat(by_row, column, axis=1))

    @given(strategies.examples)
    def test_orders_are_permutations(self, example: strategies.Example) -> None:
        every_token = np.arange(example.mask.num_tokens)
        for order in (example.mask.query_order, example.mask.key_order):
            np.testing.assert_array_equal(np.sort(order.indices(example.mask.grid)), every_token)


@both_patterns
@pytest.mark.parametrize("text", [0, 5])
@pytest.mark.parametrize("sink_frames", [0, 1, 4])
def test_density_one_is_dense(pattern: str, text: int, sink_frames: int) -> None:
    grid = ct.TokenGrid(4, 3, 5, text_tokens=text)
    mask = BUILDERS[pattern](grid, density=1.0, sink_frames=sink_frames)
    assert mask.density == 1.0
    assert mask.to_dense().all()


def test_dense_mask() -> None:
    mask = ct.dense_mask(ct.TokenGrid(4, 3, 5, text_tokens=2))
    assert mask.to_dense().all()
    assert mask.kept_pairs == 62**2
    assert mask.width is None
    assert str(mask) == "dense mask on 4x3x5 + 2 text = 62 tokens, 100.00% of the pairs kept"


def test_str_is_readable() -> None:
    assert str(ct.spatial_mask(WAN_720P, 0.35)) == (
        "spatial mask on 21x45x80 = 75,600 tokens, 38.87% of the pairs kept"
    )


class TestGroundTruth:
    """Wan 2.1 at 720p and density 0.35; see the case study in the field notes."""

    def test_width(self) -> None:
        assert ct.width_from_density(75_600, 0.35) == 14_720
        assert ct.spatial_mask(WAN_720P, 0.35).width == 14_720

    def test_sink(self) -> None:
        prefix, _, _ = ct.spatial_mask(WAN_720P, 0.35).row_edges()
        assert set(prefix.tolist()) == {3600}

    def test_kept_fraction(self) -> None:
        assert ct.spatial_mask(WAN_720P, 0.35).density == pytest.approx(0.38873, abs=5e-6)

    def test_the_upstream_mask_is_the_same(self) -> None:
        upstream = ct.svg_mask(WAN_720P, "spatial", 0.35)
        assert upstream.segments == ct.spatial_mask(WAN_720P, 0.35).segments


def kept_pairs_row_by_row(grid: ct.TokenGrid, pattern: str, width: int, sink_frames: int) -> int:
    """Kept pairs in O(N): each row's band keys outside the sink, and the sink."""
    per_frame = grid.height * grid.width
    position = np.arange(grid.frames * per_frame)
    frame = position // per_frame if pattern == "spatial" else position % grid.frames
    outside = np.concatenate([[0], np.cumsum(frame >= sink_frames)])
    first = np.maximum(position - width, 0)
    stop = np.minimum(position + width + 1, position.size)
    sink = position.size * sink_frames * per_frame
    return int((outside[stop] - outside[first]).sum()) + sink


@both_patterns
@pytest.mark.parametrize("sink_frames", [0, 1, 2])
@pytest.mark.parametrize(
    ("grid", "density"),
    [
        pytest.param(ct.TokenGrid(21, 30, 52), 0.15, id="480p"),
        pytest.param(WAN_720P, 0.35, id="720p"),
        pytest.param(ct.TokenGrid(21, 67, 120), 0.5, id="1080p"),
        pytest.param(ct.TokenGrid(21, 90, 160), 0.25, id="1440p"),
        pytest.param(ct.TokenGrid(5, 101, 103), 0.77, id="odd"),
    ],
)
def test_kept_pairs_of_real_sizes(
    pattern: str, sink_frames: int, grid: ct.TokenGrid, density: float
) -> None:
    mask = BUILDERS[pattern](grid, density, sink_frames=sink_frames)
    assert mask.width is not None
    assert mask.kept_pairs == kept_pairs_row_by_row(grid, pattern, mask.width, sink_frames)


class TestWidths:
    @given(st.integers(1, 10**6), st.floats(1e-6, 1.0))
    def test_width_is_the_least_that_reaches_the_density(self, tokens: int, density: float) -> None:
        width = ct.width_from_density(tokens, density, multiple=1)
        assert 0 < width <= tokens
        assert ct.density_from_width(tokens, width) >= density - 1e-12
        assert ct.density_from_width(tokens, width - 1) < density + 1e-12

    @given(st.integers(1, 10**6), st.data())
    def test_round_trip(self, tokens: int, data: st.DataObject) -> None:
        width = data.draw(st.integers(1, tokens))
        density = ct.density_from_width(tokens, width)
        again = ct.width_from_density(tokens, density, multiple=1)
        # A density is a float: near 1, where the parabola is flat, it fixes no single width.
        slack = 1 + math.sqrt(2e-16) * tokens if density > 0.999 else 1
        assert abs(again - width) <= slack

    @given(st.integers(1, 4000), st.data())
    def test_density_from_width_counts_pairs(self, tokens: int, data: st.DataObject) -> None:
        """All pairs but two triangles; upstream counts the diagonal half, as areas do."""
        width = data.draw(st.integers(0, tokens))
        pairs = tokens**2 - (tokens - width) ** 2
        assert ct.density_from_width(tokens, width) == float(Fraction(pairs, tokens**2))

    @pytest.mark.parametrize(
        ("density", "multiple", "width"),
        [
            (0.35, 128, 14_720),
            (0.35, 1, 14_650),
            (0.35, 1000, 15_000),
            (1.0, 128, 75_600),
            (1e-9, 128, 128),
        ],
    )
    def test_rounding(self, density: float, multiple: int, width: int) -> None:
        assert ct.width_from_density(75_600, density, multiple=multiple) == width

    def test_text_takes_its_share(self) -> None:
        # Of 1,000 tokens 100 are text, whose dense rows and columns take a fifth of the pairs.
        expected = math.ceil(1000 * (1 - math.sqrt(1 - 0.3)))
        assert ct.width_from_density(1000, 0.5, text_tokens=100, multiple=1) == expected
        assert ct.density_from_width(1000, expected, text_tokens=100) == pytest.approx(
            0.5, abs=2e-3
        )

    def test_density_is_at_most_one(self) -> None:
        assert ct.density_from_width(10, 9, text_tokens=5) == 1.0
        assert ct.density_from_width(10, 99) == 1.0

    @both_patterns
    def test_masks_round_up(self, pattern: str) -> None:
        grid = ct.TokenGrid(5, 8, 9)
        assert BUILDERS[pattern](grid, 0.3).width == 128
        assert BUILDERS[pattern](grid, 0.3, multiple=1).width == math.ceil(360 * (1 - 0.7**0.5))

    def test_masks_leave_out_the_text(self) -> None:
        grid = ct.TokenGrid(5, 8, 9, text_tokens=30)
        width = ct.width_from_density(390, 0.5, text_tokens=30)
        assert ct.spatial_mask(grid, 0.5).width == width


GRID = ct.TokenGrid(3, 4, 5)


class TestErrors:
    def test_to_dense_refuses_large_grids(self) -> None:
        with pytest.raises(ValueError, match=r"to_dense .* at most 8,192 tokens, got 8,193"):
            ct.spatial_mask(ct.TokenGrid(8193, 1, 1), width=5).to_dense()

    def test_to_dense_takes_the_largest(self) -> None:
        assert ct.spatial_mask(ct.TokenGrid(8192, 1, 1), width=0).to_dense().sum() > 8192

    @pytest.mark.parametrize("density", [0.0, -0.1, 1.0000001, 35])
    @pytest.mark.parametrize("build", [*BUILDERS.values()])
    @pytest.mark.usefixtures("unchecked")
    def test_density_outside_its_range(self, build: Any, density: float) -> None:
        with pytest.raises(ValueError, match=r"density must lie in \(0, 1\], got"):
            build(GRID, density)

    @pytest.mark.parametrize("density", [math.nan, math.inf])
    @pytest.mark.parametrize("build", [*BUILDERS.values()])
    def test_density_that_is_no_number(self, build: Any, density: float) -> None:
        with pytest.raises(ValueError, match="density must be finite"):
            build(GRID, density)

    @pytest.mark.usefixtures("unchecked")
    def test_density_of_the_wrong_type(self) -> None:
        density: Any = "much"
        with pytest.raises(TypeError, match="density must be a number, got 'much'"):
            ct.spatial_mask(GRID, density)

    @pytest.mark.parametrize("build", [*BUILDERS.values()])
    @pytest.mark.parametrize("options", [{}, {"density": 0.5, "width": 3}])
    def test_density_and_width(self, build: Any, options: Any) -> None:
        with pytest.raises(ValueError, match="exactly one of density and width"):
            build(GRID, **options)

    @pytest.mark.parametrize("build", [*BUILDERS.values()])
    def test_negative_width(self, build: Any) -> None:
        with pytest.raises(ValueError, match="width must be at least 0, got -1"):
            build(GRID, width=-1)

    @pytest.mark.parametrize("build", [*BUILDERS.values()])
    @pytest.mark.usefixtures("unchecked")
    def test_fractional_width(self, build: Any) -> None:
        with pytest.raises(TypeError, match=r"width must be an integer, got 2\.5"):
            build(GRID, width=2.5)

    @pytest.mark.parametrize("build", [*BUILDERS.values()])
    @pytest.mark.parametrize(
        ("sink_frames", "message"), [(-1, "at least 0, got -1"), (4, "at most 3, got 4")]
    )
    def test_sink_outside_the_video(self, build: Any, sink_frames: int, message: str) -> None:
        with pytest.raises(ValueError, match=f"sink_frames must be {message}"):
            build(GRID, width=1, sink_frames=sink_frames)

    @pytest.mark.parametrize("build", [*BUILDERS.values()])
    def test_multiple_of_zero(self, build: Any) -> None:
        with pytest.raises(ValueError, match="multiple must be at least 1, got 0"):
            build(GRID, 0.5, multiple=0)

    @pytest.mark.parametrize("build", [*BUILDERS.values()])
    def test_text_that_takes_all_of_the_density(self, build: Any) -> None:
        grid = ct.TokenGrid(3, 4, 5, text_tokens=20)
        with pytest.raises(ValueError, match=r"density must exceed 0\.5, .* 20 text tokens"):
            build(grid, 0.5)

    @pytest.mark.parametrize(
        ("arguments", "options", "message"),
        [
            ((0, 0.5), {}, "num_tokens must be at least 1"),
            ((10, 0.0), {}, "density must lie in"),
            ((10, 0.5), {"text_tokens": 11}, "text_tokens must be at most 10"),
            ((10, 0.5), {"multiple": 0}, "multiple must be at least 1"),
        ],
    )
    def test_width_from_density(self, arguments: Any, options: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ct.width_from_density(*arguments, **options)

    @pytest.mark.parametrize(
        ("arguments", "options", "message"),
        [
            ((0, 1), {}, "num_tokens must be at least 1"),
            ((10, -1), {}, "width must be at least 0"),
            ((10, 1), {"text_tokens": -1}, "text_tokens must be at least 0"),
        ],
    )
    def test_density_from_width(self, arguments: Any, options: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ct.density_from_width(*arguments, **options)


@pytest.mark.parametrize("num_tokens", [4_096, 75_600, 302_400])
def test_width_survives_the_way_through_its_density(num_tokens: int) -> None:
    for width in range(0, num_tokens, 128):
        density = ct.density_from_width(num_tokens, width)
        if density > 0:
            assert ct.width_from_density(num_tokens, density) == width


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("text_first", ["no", 1, None])
def test_text_first_of_the_wrong_type(text_first: Any) -> None:
    with pytest.raises(TypeError, match="text_first must be True or False"):
        ct.TokenGrid(2, 2, 2, 3, text_first)
