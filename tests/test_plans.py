"""Tile plans against brute force: classification, modes, rounding, files, hashing, pictures."""

import copy
import dataclasses
import functools
import itertools
import json
import os
import pickle
import tempfile
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st

import cinetile as ct
from cinetile import TileKind

WAN_480P = ct.TokenGrid(21, 30, 52)
WAN_720P = ct.TokenGrid(21, 45, 80)
WAN_1080P = ct.TokenGrid(21, 67, 120)
WAN_1440P = ct.TokenGrid(21, 90, 160)
BUILDERS = {"spatial": ct.spatial_mask, "temporal": ct.temporal_mask}
ROUNDINGS: list[Any] = ["balanced", "row", "nearest", "keep"]

Tiling = tuple[strategies.Example, int, int]
every_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)


@dataclasses.dataclass(frozen=True)
class Tile:
    """One tile by brute force: its real queries and keys and what the mask keeps of them."""

    q: int
    kv: int
    rows: np.ndarray
    keys: np.ndarray
    kept: np.ndarray
    past_the_end: bool

    @property
    def full(self) -> bool:
        return bool(self.kept.all())

    @property
    def empty(self) -> bool:
        return not self.kept.any()


def brute_tiles(tiling: Tiling) -> dict[tuple[int, int], Tile]:
    example, block_q, block_kv = tiling
    tokens = example.mask.num_tokens
    placed = example.placed
    starts = itertools.product(range(0, tokens, block_q), range(0, tokens, block_kv))
    tiles = {}
    for row, key in starts:
        rows = np.arange(row, min(row + block_q, tokens))
        keys = np.arange(key, min(key + block_kv, tokens))
        q, kv = row // block_q, key // block_kv
        kept = placed[np.ix_(rows, keys)]
        tiles[q, kv] = Tile(q, kv, rows, keys, kept, key + block_kv > tokens)
    return tiles


def kinds(plan: ct.TilePlan) -> dict[tuple[int, int], TileKind]:
    tiles = zip(plan.tile_q.tolist(), plan.tile_kv.tolist(), strict=True)
    return dict(zip(tiles, map(TileKind, plan.tile_kind.tolist()), strict=True))


def kept_by_comparisons(plan: ct.TilePlan, tile: Tile) -> np.ndarray:
    """What a kernel keeps of a masked tile."""
    prefix, low, high = (edge[:, None] for edge in plan.row_edges(tile.rows))
    return (tile.keys < prefix) | ((tile.keys >= low) & (tile.keys < high))


def kind_of(masked: bool) -> TileKind:
    return TileKind.MASKED if masked else TileKind.FULL


class TestClassification:
    @given(strategies.tilings())
    def test_split(self, tiling: Tiling) -> None:
        found = kinds(ct.plan_tiles(*unpacked(tiling), mode="split"))
        assert found == {
            place: kind_of(not tile.full or tile.past_the_end)
            for place, tile in brute_tiles(tiling).items()
            if not tile.empty
        }

    @given(strategies.tilings())
    def test_naive(self, tiling: Tiling) -> None:
        found = kinds(ct.plan_tiles(*unpacked(tiling), mode="naive"))
        assert found == {
            place: TileKind.MASKED for place, tile in brute_tiles(tiling).items() if not tile.empty
        }

    @given(strategies.tilings())
    def test_dense(self, tiling: Tiling) -> None:
        found = kinds(ct.plan_tiles(*unpacked(tiling), mode="dense"))
        assert found == {
            place: kind_of(tile.past_the_end) for place, tile in brute_tiles(tiling).items()
        }

    @every_rounding
    @given(strategies.tilings())
    def test_aligned_tiles_are_whole(self, rounding: Any, tiling: Tiling) -> None:
        found = kinds(ct.plan_tiles(*unpacked(tiling), mode="aligned", rounding=rounding))
        tiles = brute_tiles(tiling)
        for place, kind in found.items():
            assert kind == kind_of(tiles[place].past_the_end), f"tile {place}"
            assert not tiles[place].empty, f"tile {place}"
        assert found.keys() >= {place for place, tile in tiles.items() if tile.full}

    @given(strategies.tilings())
    def test_the_comparisons_are_right_in_every_tile(self, tiling: Tiling) -> None:
        plan = ct.plan_tiles(*unpacked(tiling), mode="split")
        tiles = brute_tiles(tiling)
        wrong = [
            place
            for place in kinds(plan)
            if not np.array_equal(kept_by_comparisons(plan, tiles[place]), tiles[place].kept)
        ]
        assert not wrong

    @given(strategies.tilings(), st.sampled_from(["dense", "naive", "split", "aligned"]))
    def test_tables(self, tiling: Tiling, mode: Any) -> None:
        plan = ct.plan_tiles(*unpacked(tiling), mode=mode)
        tokens, block_q = plan.grid.num_tokens, plan.block_q
        starts = plan.row_starts
        assert starts[0] == 0
        assert starts.size == -(-tokens // block_q) + 1
        assert starts[-1] == plan.tile_kv.size == plan.tile_kind.size == plan.tile_q.size
        assert (np.diff(starts) > 0).all(), "a query tile visits nothing"
        assert np.all(np.diff(plan.tile_kv)[np.diff(plan.tile_q) == 0] > 0)
        assert np.all(np.diff(plan.tile_q) >= 0)
        assert plan.tile_kv.max() <= (tokens - 1) // plan.block_kv

    @given(strategies.tilings(), st.sampled_from(["dense", "naive", "split", "aligned"]))
    def test_tile_map(self, tiling: Tiling, mode: Any) -> None:
        plan = ct.plan_tiles(*unpacked(tiling), mode=mode)
        expected = np.zeros(plan.tile_map().shape, np.uint8)
        for place, kind in kinds(plan).items():
            expected[place] = 1 if kind == TileKind.FULL else 2
        np.testing.assert_array_equal(plan.tile_map(), expected)


def unpacked(tiling: Tiling) -> tuple[ct.Mask, int, int]:
    example, block_q, block_kv = tiling
    return example.mask, block_q, block_kv


class TestKeptPairs:
    @pytest.mark.parametrize("mode", ["naive", "split"])
    @given(strategies.tilings())
    def test_exact_modes_keep_the_mask(self, mode: Any, tiling: Tiling) -> None:
        example = tiling[0]
        plan = ct.plan_tiles(*unpacked(tiling), mode=mode)
        assert plan.is_exact
        np.testing.assert_array_equal(plan.mask_kept(), example.kept)
        assert plan.stats.kept_pairs == example.kept.sum()
        assert (plan.stats.pairs_added, plan.stats.pairs_dropped) == (0, 0)

    @given(strategies.tilings())
    def test_dense_keeps_everything(self, tiling: Tiling) -> None:
        plan = ct.plan_tiles(*unpacked(tiling), mode="dense")
        assert plan.mask_kept().all()
        assert plan.stats.kept_fraction == 1.0
        assert plan.stats.pairs_added == (~tiling[0].kept).sum()
        assert plan.stats.pairs_dropped == 0

    @every_rounding
    @given(strategies.tilings())
    def test_aligned_leaves_no_row_empty(self, rounding: Any, tiling: Tiling) -> None:
        plan = ct.plan_tiles(*unpacked(tiling), mode="aligned", rounding=rounding)
        assert not plan.is_exact
        assert plan.mask_kept().any(axis=1).all()

    @every_rounding
    @given(strategies.tilings())
    def test_aligned_pairs(self, rounding: Any, tiling: Tiling) -> None:
        example = tiling[0]
        plan = ct.plan_tiles(*unpacked(tiling), mode="aligned", rounding=rounding)
        kept = plan.mask_kept()
        assert plan.stats.kept_pairs == kept.sum()
        assert plan.stats.kept_fraction == kept.sum() / kept.size
        assert plan.stats.pairs_added == (kept & ~example.kept).sum()
        assert plan.stats.pairs_dropped == (example.kept & ~kept).sum()

    @given(strategies.tilings())
    def test_keep_all_drops_nothing(self, tiling: Tiling) -> None:
        plan = ct.plan_tiles(*unpacked(tiling), mode="aligned", rounding="keep")
        assert plan.stats.pairs_dropped == 0
        assert not (tiling[0].kept & ~plan.mask_kept()).any()

    @given(strategies.tilings())
    def test_nearest(self, tiling: Tiling) -> None:
        """At least half covered, and the best tile of a row that would have none."""
        found = kinds(ct.plan_tiles(*unpacked(tiling), mode="aligned", rounding="nearest"))
        tiles = brute_tiles(tiling)
        wanted = {place for place, tile in tiles.items() if 2 * tile.kept.sum() >= tile.kept.size}
        rows_with_full = {q for (q, _), tile in tiles.items() if tile.full}
        assert found.keys() >= wanted
        for q, kv in found.keys() - wanted:
            row = [tile.kept.mean() for (other, _), tile in tiles.items() if other == q]
            assert q not in rows_with_full
            assert tiles[q, kv].kept.mean() == max(row)
            assert not any(q == other for other, _ in wanted)

    @pytest.mark.parametrize("pattern", ["spatial", "temporal"])
    @pytest.mark.parametrize(
        ("grid", "block_q", "block_kv"),
        [
            (ct.TokenGrid(21, 20, 20), 512, 1024),
            (WAN_480P, 3328, 1536),
            (WAN_720P, 3328, 1536),
        ],
        ids=["sink-within-a-tile", "480p", "720p"],
    )
    def test_queries_keep_the_sink_and_themselves(
        self, grid: ct.TokenGrid, block_q: int, block_kv: int, pattern: str
    ) -> None:
        """Although a tile may hold little else; up to the end of the sink, which may be cut off."""
        mask = BUILDERS[pattern](grid, 0.35)
        plan = ct.plan_tiles(mask, block_q, block_kv, "aligned")
        rows = np.arange(0, grid.num_tokens, 31)
        own_key = np.argsort(mask.key_order.indices(grid))[mask.query_order.indices(grid)[rows]]
        kept = plan.kept_keys(rows)
        assert kept[:, 0].all()
        not_in_sink = own_key >= mask.row_edges(rows)[0]
        assert kept[np.arange(rows.size), own_key][not_in_sink].all()

    @given(strategies.tilings(), st.sampled_from(["naive", "split", "aligned", "dense"]), st.data())
    def test_kept_keys_of_some_rows(self, tiling: Tiling, mode: Any, data: st.DataObject) -> None:
        plan = ct.plan_tiles(*unpacked(tiling), mode=mode)
        every_row = plan.kept_keys(np.arange(plan.grid.num_tokens))
        rows = data.draw(st.lists(st.integers(0, plan.grid.num_tokens - 1), max_size=5))
        some = np.array(rows, np.int64)
        np.testing.assert_array_equal(plan.kept_keys(some), every_row[some])

    @given(strategies.tilings(), st.sampled_from(["naive", "split", "aligned", "dense"]))
    def test_tile_counts(self, tiling: Tiling, mode: Any) -> None:
        plan = ct.plan_tiles(*unpacked(tiling), mode=mode)
        masked = sum(kind != TileKind.FULL for kind in kinds(plan).values())
        stats = plan.stats
        assert stats.tiles_total == len(brute_tiles(tiling))
        assert stats.tiles_visited == len(kinds(plan))
        assert stats.tiles_masked == masked
        assert stats.masked_fraction == masked / len(kinds(plan))

    def test_mask_kept_refuses_large_grids(self) -> None:
        plan = ct.plan_tiles(ct.spatial_mask(ct.TokenGrid(8193, 1, 1), width=5), 512, 512)
        with pytest.raises(ValueError, match=r"mask_kept .* at most 8,192 tokens, got 8,193"):
            plan.mask_kept()


class TestBudget:
    """Aligned plans keep about as many pairs as the mask."""

    @pytest.mark.parametrize("rounding", ["balanced", "row"])
    @given(strategies.tilings())
    def test_within_half_a_tile(self, rounding: Any, tiling: Tiling) -> None:
        """Apart from what must be kept: a tile of rows that have no full one."""
        plan = ct.plan_tiles(*unpacked(tiling), mode="aligned", rounding=rounding)
        tiles = brute_tiles(tiling)
        rows_with_full = {q for (q, _), tile in tiles.items() if tile.full}
        missing: dict[int, int] = {}
        for (q, _), tile in tiles.items():
            if q not in rows_with_full and not tile.empty:
                missing[q] = max(missing.get(q, 0), int((~tile.kept).sum()))
        half = max(tile.kept.size for tile in tiles.values()) / 2
        error = plan.stats.kept_pairs - int(tiling[0].kept.sum())
        assert -half <= error <= half + sum(missing.values())

    @settings(max_examples=100)
    @given(strategies.tilings())
    def test_balanced_is_as_close_as_required_tiles_let_it(self, tiling: Tiling) -> None:
        """It overshoots by more than half a tile only if it keeps nothing that it need not."""
        plan = ct.plan_tiles(*unpacked(tiling), mode="aligned")
        tiles = brute_tiles(tiling)
        half = max(tile.kept.size for tile in tiles.values()) / 2
        if plan.stats.kept_pairs - tiling[0].kept.sum() > half:
            full = {place for place, tile in tiles.items() if tile.full}
            optional = kinds(plan).keys() - full
            rows = [q for q, _ in optional]
            assert len(set(rows)) == len(rows)
            assert set(rows).isdisjoint({q for q, _ in full})

    @pytest.mark.parametrize("rounding", ["balanced", "row"])
    @pytest.mark.parametrize("pattern", ["spatial", "temporal"])
    @pytest.mark.parametrize(
        ("block_q", "block_kv"), [(3328, 1536), (3024, 1008), (1024, 1024), (2048, 512)]
    )
    @pytest.mark.parametrize(
        ("grid", "density"),
        [
            pytest.param(grid, density, id=f"{name}-{density}")
            for name, grid in (("480p", WAN_480P), ("720p", WAN_720P), ("1080p", WAN_1080P))
            for density in (0.15, 0.25, 0.35, 0.5, 0.65, 0.8)
        ],
    )
    def test_within_half_a_percent(
        self,
        grid: ct.TokenGrid,
        density: float,
        block_q: int,
        block_kv: int,
        pattern: str,
        rounding: Any,
    ) -> None:
        mask = BUILDERS[pattern](grid, density)
        plan = ct.plan_tiles(mask, block_q, block_kv, "aligned", rounding=rounding)
        error = abs(plan.stats.kept_pairs - mask.kept_pairs)
        # Row by row, a budget of 40 large tiles cannot be met to half a percent but by luck.
        by_luck = rounding == "row" and grid == WAN_480P and density == 0.15 and block_q > 3000
        assert error <= (block_q * block_kv / 2 if by_luck else 0.005 * mask.kept_pairs)
        assert plan.stats.kept_pairs == (
            mask.kept_pairs + plan.stats.pairs_added - plan.stats.pairs_dropped
        )

    @pytest.mark.parametrize("pattern", ["spatial", "temporal"])
    def test_rows_stay_balanced(self, pattern: str) -> None:
        """What "row" is for: no query tile is a tile and a half off, whatever the others do."""
        mask = BUILDERS[pattern](WAN_720P, 0.35)
        plan = ct.plan_tiles(mask, 1024, 1024, "aligned", rounding="row")
        tokens = mask.num_tokens
        start = np.arange(0, tokens, 1024)
        stop = np.minimum(start + 1024, tokens)
        zero, all_keys = np.zeros_like(start), np.full_like(start, tokens)
        keys = np.minimum((plan.tile_kv + 1) * 1024, tokens) - plan.tile_kv * 1024
        kept = np.add.reduceat(keys, plan.row_starts[:-1]) * (stop - start)
        error = kept - mask.count_kept(start, stop, zero, all_keys)
        assert np.abs(error).max() <= 1.5 * 1024**2
        assert np.abs(np.cumsum(error)).max() <= 0.5 * 1024**2


class TestTies:
    """Among boundary tiles of equal coverage the nearest to the band's centre or sink stays."""

    @pytest.mark.parametrize("rounding", ["balanced", "row", "nearest"])
    @pytest.mark.parametrize("pattern", ["spatial", "temporal"])
    @pytest.mark.parametrize("block_q", [5, 6, 9])
    def test_centre_first(self, block_q: int, pattern: str, rounding: Any) -> None:
        """Every tile of a diagonal's row has the same coverage, and each row may keep one."""
        mask = BUILDERS[pattern](ct.TokenGrid(9, 5, 2), width=0, sink_frames=0)
        plan = ct.plan_tiles(mask, block_q, 1, "aligned", rounding=rounding)
        assert (np.diff(plan.row_starts) == 1).all()
        middle = plan.tile_q * block_q + (block_q - 1) / 2
        assert np.abs(plan.tile_kv - middle).max() <= 1

    @pytest.mark.parametrize(
        ("pattern", "width"),
        [("spatial", 5), ("spatial", 9), ("temporal", 7), ("temporal", 11)],
    )
    def test_sink_first(self, pattern: str, width: int) -> None:
        """The end of the sink covers half of its tile, as the band does of some of its own."""
        mask = BUILDERS[pattern](ct.TokenGrid(9, 1, 6), width=width, sink_frames=1)
        tiling = strategies.Example(mask, mask.to_dense()), 1, 4
        found = kinds(ct.plan_tiles(*unpacked(tiling), mode="aligned"))
        half = {place for place, tile in brute_tiles(tiling).items() if tile.kept.mean() == 0.5}
        end_of_sink = {place for place in half if place[1] == 1}
        assert end_of_sink - found.keys(), "the budget must cut among equals to show anything"
        assert end_of_sink & found.keys()
        assert not (half - end_of_sink) & found.keys()


class TestGroundTruth:
    """Wan 2.1 at 720p, density 0.35, tiles of 3328 x 1536; see the field notes."""

    def plan(self, mode: Any, block_q: int = 3328, block_kv: int = 1536) -> ct.TilePlan:
        return ct.plan_tiles(ct.spatial_mask(WAN_720P, 0.35), block_q, block_kv, mode)

    @pytest.mark.parametrize("mode", ["naive", "split"])
    def test_tiles(self, mode: str) -> None:
        stats = self.plan(mode).stats
        assert (stats.tiles_total, stats.tiles_visited) == (1150, 509)
        assert stats.kept_fraction == pytest.approx(0.38873, abs=5e-6)

    def test_masked_tiles(self) -> None:
        assert self.plan("naive").stats.masked_fraction == 1.0
        assert self.plan("split").stats.masked_fraction == pytest.approx(0.2755, abs=0.02)

    def test_dense(self) -> None:
        stats = self.plan("dense").stats
        assert stats.tiles_visited == stats.tiles_total == 1150
        assert stats.tiles_masked == 23  # the last key tile is ragged: 50 * 1536 > 75,600

    def test_aligned_masks_little(self) -> None:
        stats = self.plan("aligned").stats
        assert stats.masked_fraction <= 0.0222
        assert stats.kept_fraction == pytest.approx(0.38873, rel=0.005)

    @pytest.mark.parametrize(("block_q", "block_kv"), [(3024, 1008), (3024, 3024), (1008, 3024)])
    def test_aligned_masks_nothing_where_blocks_divide(self, block_q: int, block_kv: int) -> None:
        assert self.plan("aligned", block_q, block_kv).stats.tiles_masked == 0

    @pytest.mark.parametrize("mode", ["dense", "aligned"])
    def test_padded_queries_need_no_mask(self, mode: str) -> None:
        plan = self.plan(mode, 3328, 1008)
        assert WAN_720P.num_tokens % 3328
        assert plan.stats.tiles_masked == 0

    def test_case_study_masks_least_at_small_query_blocks(self) -> None:
        """16.95 % at 1024 x 1536 in the case study."""
        stats = self.plan("split", 1024, 1536).stats
        assert stats.masked_fraction == pytest.approx(0.1695, abs=0.02)


@pytest.mark.parametrize("pattern", ["spatial", "temporal"])
@pytest.mark.parametrize("mode", ["split", "aligned"])
class TestPlanningMemory:
    def peak(self, grid: ct.TokenGrid, pattern: str, mode: Any) -> tuple[int, int]:
        """Bytes at the peak, and tiles visited."""
        mask = BUILDERS[pattern](grid, 0.35)
        tracemalloc.start()
        try:
            plan = ct.plan_tiles(mask, 1024, 512, mode)
            return tracemalloc.get_traced_memory()[1], plan.stats.tiles_visited
        finally:
            tracemalloc.stop()

    def test_1440p(self, pattern: str, mode: str) -> None:
        peak, _ = self.peak(WAN_1440P, pattern, mode)
        assert peak < 64 << 20

    @pytest.mark.parametrize("grid", [WAN_720P, WAN_1440P], ids=["720p", "1440p"])
    def test_by_tile(self, grid: ct.TokenGrid, pattern: str, mode: str) -> None:
        """Neither a pair nor a token of the sequence costs anything."""
        peak, visited = self.peak(grid, pattern, mode)
        assert peak < (1 << 20) + 400 * visited


class TestArguments:
    MASK = ct.spatial_mask(ct.TokenGrid(3, 2, 2), width=2)

    @pytest.mark.parametrize("name", ["block_q", "block_kv"])
    @pytest.mark.parametrize("value", [0, -5])
    def test_blocks_below_one(self, name: str, value: int) -> None:
        blocks: Any = {"block_q": 4, "block_kv": 4, name: value}
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
            ct.plan_tiles(self.MASK, **blocks)

    @pytest.mark.parametrize("name", ["block_q", "block_kv"])
    @pytest.mark.parametrize("value", [2.0, "8", None, True])
    @pytest.mark.usefixtures("unchecked")
    def test_blocks_that_are_no_integers(self, name: str, value: Any) -> None:
        blocks: Any = {"block_q": 4, "block_kv": 4, name: value}
        with pytest.raises(TypeError, match=f"{name} must be an integer, got"):
            ct.plan_tiles(self.MASK, **blocks)

    @pytest.mark.usefixtures("unchecked")
    def test_no_mask(self) -> None:
        mask: Any = np.ones((4, 4), bool)
        with pytest.raises(TypeError, match="mask must be a cinetile mask, got ndarray"):
            ct.plan_tiles(mask, 4, 4)

    @pytest.mark.usefixtures("unchecked")
    def test_unknown_mode(self) -> None:
        mode: Any = "sparse"
        with pytest.raises(ValueError, match=r"mode must be one of 'dense',.* got 'sparse'"):
            ct.plan_tiles(self.MASK, 4, 4, mode)

    @pytest.mark.usefixtures("unchecked")
    def test_unknown_rounding(self) -> None:
        rounding: Any = "up"
        with pytest.raises(ValueError, match=r"rounding must be one of 'balanced'.* got 'up'"):
            ct.plan_tiles(self.MASK, 4, 4, "aligned", rounding=rounding)

    @pytest.mark.parametrize("mode", ["dense", "naive", "split"])
    def test_rounding_without_aligned(self, mode: Any) -> None:
        with pytest.raises(ValueError, match=f"rounding is for mode 'aligned' only.*{mode}"):
            ct.plan_tiles(self.MASK, 4, 4, mode, rounding="row")

    def test_balanced_is_the_default_rounding(self) -> None:
        plan = ct.plan_tiles(self.MASK, 4, 4, "aligned")
        assert plan.rounding == "balanced"
        assert plan == ct.plan_tiles(self.MASK, 4, 4, "aligned", rounding="balanced")

    def test_split_is_the_default_mode(self) -> None:
        plan = ct.plan_tiles(self.MASK, 4, 4)
        assert (plan.mode, plan.rounding) == ("split", None)

    def test_blocks_far_beyond_the_sequence(self) -> None:
        plan = ct.plan_tiles(self.MASK, 10**9, 10**9)
        assert plan.stats.tiles_total == 1
        np.testing.assert_array_equal(plan.mask_kept(), self.MASK.to_dense())


VARIANTS = {
    "split": ct.plan_tiles(ct.spatial_mask(ct.TokenGrid(3, 2, 2, 2), width=2), 4, 5),
    "aligned": ct.plan_tiles(
        ct.temporal_mask(ct.TokenGrid(5, 2, 3), width=3), 4, 4, "aligned", rounding="row"
    ),
    "naive": ct.plan_tiles(
        ct.svg_mask(
            ct.TokenGrid(3, 2, 2, 4), "temporal", width=3, model="hunyuan", prompt_length=2
        ),
        5,
        3,
        "naive",
    ),
    "dense": ct.plan_tiles(ct.dense_mask(ct.TokenGrid(2, 2, 2, 1, text_first=True)), 4, 4, "dense"),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_suffix = pytest.mark.parametrize("suffix", [".json", ".npz"])


class TestFiles:
    @every_suffix
    @every_variant
    def test_round_trip(self, variant: str, suffix: str, tmp_path: Path) -> None:
        plan = VARIANTS[variant]
        plan.save(tmp_path / f"plan{suffix}")
        loaded = ct.TilePlan.load(tmp_path / f"plan{suffix}")
        assert loaded == plan
        assert hash(loaded) == hash(plan)
        assert loaded.mask == plan.mask
        assert loaded.stats == plan.stats
        np.testing.assert_array_equal(loaded.mask_kept(), plan.mask_kept())

    @every_suffix
    @settings(max_examples=20)
    @given(strategies.tilings(), st.sampled_from(["naive", "split", "aligned", "dense"]))
    def test_round_trip_of_any_plan(self, suffix: str, tiling: Tiling, mode: Any) -> None:
        plan = ct.plan_tiles(*unpacked(tiling), mode=mode)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, f"plan{suffix}")
            plan.save(path)
            assert ct.TilePlan.load(path) == plan

    @every_suffix
    def test_saving_again_replaces(self, suffix: str, tmp_path: Path) -> None:
        path = tmp_path / f"plan{suffix}"
        VARIANTS["split"].save(path)
        VARIANTS["aligned"].save(path)
        assert ct.TilePlan.load(path) == VARIANTS["aligned"]
        assert list(tmp_path.iterdir()) == [path]

    @every_suffix
    def test_a_failed_save_leaves_the_old_file(
        self, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / f"plan{suffix}"
        VARIANTS["split"].save(path)

        def no_space(*_: object) -> None:
            raise OSError("no space left")

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", no_space)
            with pytest.raises(OSError, match="no space left"):
                VARIANTS["aligned"].save(path)
        assert ct.TilePlan.load(path) == VARIANTS["split"]
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize("name", ["plan.yaml", "plan", "plan.json.gz"])
    def test_unknown_suffix(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"path must end in \.json or \.npz"):
            VARIANTS["split"].save(tmp_path / name)
        with pytest.raises(ValueError, match=r"\.json or \.npz"):
            ct.TilePlan.load(tmp_path / name)
        assert not list(tmp_path.iterdir())

    @every_suffix
    def test_missing_file(self, suffix: str, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            ct.TilePlan.load(tmp_path / f"plan{suffix}")

    @every_suffix
    def test_missing_folder(self, suffix: str, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            VARIANTS["split"].save(tmp_path / "nowhere" / f"plan{suffix}")


def edit_mask(**changes: Any) -> Any:
    def edit(content: dict[str, Any]) -> None:
        content["mask"].update(changes)

    return edit


def edit_segment(**changes: Any) -> Any:
    def edit(content: dict[str, Any]) -> None:
        content["mask"]["segments"][0].update(changes)

    return edit


def edit_settings(**changes: Any) -> Any:
    def edit(content: dict[str, Any]) -> None:
        content["settings"].update(changes)

    return edit


def remove(key: str) -> Any:
    def edit(content: dict[str, Any]) -> None:
        del content[key]

    return edit


def put(key: str, value: Any) -> Any:
    def edit(content: dict[str, Any]) -> None:
        content[key] = value

    return edit


def edit_table(name: str, change: Any) -> Any:
    def edit(content: dict[str, Any]) -> None:
        content["tables"][name] = change(content["tables"][name])

    return edit


EDITS = {
    "other format": put("format", "cinetile.policy"),
    "newer version": put("version", 2),
    "no format": remove("format"),
    "no version": remove("version"),
    "no mask": remove("mask"),
    "no settings": remove("settings"),
    "no tables": remove("tables"),
    "mask of the wrong type": put("mask", [1, 2]),
    "settings of the wrong type": put("settings", [1, 2]),
    "tables of the wrong type": put("tables", [1, 2]),
    "unknown mask field": edit_mask(colour="red"),
    "mask without segments": edit_mask(segments=[]),
    "grid of no frames": edit_mask(grid={"frames": 0, "height": 1, "width": 1}),
    "another grid": edit_mask(grid={"frames": 4, "height": 2, "width": 2}),
    "a shorter grid": edit_mask(grid={"frames": 1, "height": 1, "width": 1}),
    "unknown layout": edit_mask(query_order={"layout": "diagonal"}),
    "segment beyond the grid": edit_segment(stop=10_000),
    "segment before the grid": edit_segment(start=-7),
    "another prefix": edit_segment(prefix=9),
    "another name, which no table shows": edit_mask(name="other"),
    "another fingerprint": put("fingerprint", "0"),
    "no fingerprint": remove("fingerprint"),
    "huge prefix": edit_segment(prefix=10**30),
    "prefix of the wrong type": edit_segment(prefix="many"),
    "edge without fields": edit_segment(low={}),
    "unknown segment field": edit_segment(colour="red"),
    "other block": edit_settings(block_q=3),
    "block of zero": edit_settings(block_kv=0),
    "block of the wrong type": edit_settings(block_q="4"),
    "huge block": edit_settings(block_q=10**30),
    "unknown mode": edit_settings(mode="sparse"),
    "other mode": edit_settings(mode="naive"),
    "unknown setting": edit_settings(colour="red"),
    "a key tile changed": edit_table("tile_kv", lambda table: [table[0] + 1, *table[1:]]),
    "a kind changed": edit_table("tile_kind", lambda table: [table[0] ^ 1, *table[1:]]),
    "a row shorter": edit_table("row_starts", lambda table: table[:-1]),
    "tiles out of order": edit_table("tile_kv", lambda table: table[::-1]),
    "table of the wrong type": edit_table("tile_kv", lambda _: "none"),
    "ragged table": edit_table("tile_kv", lambda table: [[1], [1, 2], *table]),
    "table that is missing": lambda content: content["tables"].pop("tile_kind"),
    "table of an unknown name": lambda content: content["tables"].update(colours=[1]),
}


@pytest.mark.usefixtures("unchecked")
class TestCorruptFiles:
    """Nothing but a ValueError that names the file, and never another plan."""

    def refuse(self, path: Path) -> None:
        with pytest.raises(ValueError, match=r"plan\..*: .*; expected a tile plan"):
            ct.TilePlan.load(path)

    @pytest.mark.parametrize("edit", EDITS)
    def test_edited_json(self, edit: str, tmp_path: Path) -> None:
        path = tmp_path / "plan.json"
        VARIANTS["split"].save(path)
        content = json.loads(path.read_text())
        EDITS[edit](content)
        path.write_text(json.dumps(content))
        self.refuse(path)

    @pytest.mark.parametrize(
        "edit", [edit for edit in EDITS if "tables" not in edit and edit != "ragged table"]
    )
    def test_edited_npz(self, edit: str, tmp_path: Path) -> None:
        path = tmp_path / "plan.npz"
        VARIANTS["split"].save(path)
        with np.load(path) as archive:
            content = json.loads(str(archive["header"]))
            content["tables"] = {
                name: archive[name].tolist() for name in archive.files if name != "header"
            }
        EDITS[edit](content)
        tables = {name: np.asarray(table) for name, table in content.pop("tables").items()}
        header: Any = np.array(json.dumps(content))
        arrays: Any = {"header": header, **tables}
        np.savez(path, **arrays)
        self.refuse(path)

    @every_suffix
    @pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.9, 0.99])
    def test_truncated(self, fraction: float, suffix: str, tmp_path: Path) -> None:
        path = tmp_path / f"plan{suffix}"
        VARIANTS["split"].save(path)
        content = path.read_bytes()
        path.write_bytes(content[: int(fraction * len(content))])
        self.refuse(path)

    @every_suffix
    @pytest.mark.parametrize(
        "content",
        [b"", b"hello", b"\xff\xfe\x00\x80" * 9, b"[]", b"null", b"7", b"{}", b"PK\x03\x04"],
    )
    def test_other_content(self, content: bytes, suffix: str, tmp_path: Path) -> None:
        path = tmp_path / f"plan{suffix}"
        path.write_bytes(content)
        self.refuse(path)

    @pytest.mark.parametrize("part", range(0, 100, 4))
    def test_damaged_npz(self, part: int, tmp_path: Path) -> None:
        """A byte flipped: refused, or in a place that says nothing about the plan."""
        path = tmp_path / "plan.npz"
        VARIANTS["split"].save(path)
        content = bytearray(path.read_bytes())
        content[len(content) * part // 100] ^= 0xFF
        path.write_bytes(content)
        try:
            loaded = ct.TilePlan.load(path)
        except ValueError as error:
            assert "; expected a tile plan" in str(error)  # noqa: PT017
        else:
            assert loaded == VARIANTS["split"]

    def test_npz_without_a_header(self, tmp_path: Path) -> None:
        path = tmp_path / "plan.npz"
        np.savez(path, tile_kv=np.arange(3))
        self.refuse(path)

    def test_npz_of_pickles(self, tmp_path: Path) -> None:
        """Loading must run nobody's code."""
        path = tmp_path / "plan.npz"
        header: Any = np.array([{"a": 1}], dtype=object)
        np.savez(path, header=header)
        self.refuse(path)

    def test_npy_under_the_name_of_npz(self, tmp_path: Path) -> None:
        path = tmp_path / "plan.npz"
        with path.open("wb") as file:
            np.save(file, np.arange(3))
        self.refuse(path)

    def test_zip_of_something_else(self, tmp_path: Path) -> None:
        path = tmp_path / "plan.npz"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("header.txt", "{}")
        self.refuse(path)


class TestIdentity:
    @every_variant
    def test_equal_plans(self, variant: str) -> None:
        plan = VARIANTS[variant]
        mode: Any = plan.mode
        rounding: Any = plan.rounding
        again = ct.plan_tiles(plan.mask, plan.block_q, plan.block_kv, mode, rounding=rounding)
        assert again is not plan
        assert again == plan
        assert hash(again) == hash(plan)
        assert again.fingerprint == plan.fingerprint
        assert len({plan, again}) == 1

    @pytest.mark.parametrize(
        "changed",
        [
            {"block_q": 3},
            {"block_kv": 3},
            {"mode": "naive"},
            {"mode": "aligned"},
            {"mode": "aligned", "rounding": "keep"},
            {"mask": ct.spatial_mask(ct.TokenGrid(3, 2, 2), width=3)},
            {"mask": ct.temporal_mask(ct.TokenGrid(3, 2, 2), width=2)},
            {"mask": ct.spatial_mask(ct.TokenGrid(3, 4, 1), width=2)},
        ],
        ids=[
            "block_q",
            "block_kv",
            "naive",
            "aligned",
            "aligned-keep",
            "width",
            "pattern",
            "shape-with-the-same-tables",
        ],
    )
    def test_unequal_plans(self, changed: dict[str, Any]) -> None:
        mask = ct.spatial_mask(ct.TokenGrid(3, 2, 2), width=2)
        settings = {"mask": mask, "block_q": 4, "block_kv": 4}
        assert ct.plan_tiles(**settings) != ct.plan_tiles(**{**settings, **changed})

    def test_policies_that_round_alike_differ(self) -> None:
        """Their tables may be the same; what they promise is not."""
        mask = ct.dense_mask(ct.TokenGrid(3, 2, 2))
        plans = {ct.plan_tiles(mask, 4, 4, "aligned", rounding=rounding) for rounding in ROUNDINGS}
        assert len(plans) == len(ROUNDINGS)

    def test_other_types(self) -> None:
        assert VARIANTS["split"] != "split"

    def test_static_argument_of_jit(self) -> None:
        """Two equal plans share one trace; another plan does not."""
        traced = []

        @functools.partial(jax.jit, static_argnums=0)
        def visited(plan: ct.TilePlan, array: jax.Array) -> jax.Array:
            traced.append(plan)
            return array * plan.stats.tiles_visited

        mask = ct.spatial_mask(ct.TokenGrid(3, 2, 2), width=2)
        for block in (4, 4, 3, 4):
            plan = ct.plan_tiles(mask, block, block)
            assert visited(plan, jnp.ones(())) == plan.stats.tiles_visited
        assert [plan.block_q for plan in traced] == [4, 3]

    @every_variant
    @pytest.mark.parametrize("table", ["row_starts", "tile_kv", "tile_kind"])
    def test_tables_are_read_only(self, variant: str, table: str) -> None:
        with pytest.raises(ValueError, match="read-only"):
            getattr(VARIANTS[variant], table)[0] = 1

    def test_plans_are_frozen(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            VARIANTS["split"].block_q = 3  # pyright: ignore[reportAttributeAccessIssue]

    @every_variant
    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))]
    )
    def test_copies_and_pickles_are_equal(self, variant: str, duplicate: Any) -> None:
        assert duplicate(VARIANTS[variant]) == VARIANTS[variant]


class TestPictures:
    def test_repr(self) -> None:
        plan = ct.plan_tiles(ct.spatial_mask(WAN_720P, 0.35), 3328, 1536, "aligned")
        assert repr(plan) == (
            "TilePlan('spatial', grid=21x45x80, block_q=3328, block_kv=1536, mode='aligned', "
            f"rounding='balanced', tiles={plan.stats.tiles_visited}/1150)"
        )

    def test_small_plan_shows_every_tile(self) -> None:
        mask = ct.spatial_mask(ct.TokenGrid(4, 1, 3), width=3, sink_frames=1)
        head, stats, *picture, legend = str(ct.plan_tiles(mask, 3, 3)).split("\n")
        assert head.startswith("TilePlan('spatial'")
        assert stats == "keeps 64.58% of the pairs, visits 12 of 16 tiles, masks 41.67% of them"
        assert picture == ["█▒··", "██▒·", "█▒█▒", "█·▒█"]
        assert legend.startswith("queries down, keys across")

    def test_single_tile(self) -> None:
        plan = ct.plan_tiles(ct.dense_mask(ct.TokenGrid(1, 1, 1)), 1, 1)
        assert str(plan).split("\n")[2] == "█"

    @pytest.mark.parametrize("mode", ["dense", "naive", "split", "aligned"])
    def test_huge_plan_fits_the_terminal(self, mode: Any) -> None:
        plan = ct.plan_tiles(ct.spatial_mask(WAN_1440P, 0.35), 1024, 512, mode)
        _, _, *picture, _ = str(plan).split("\n")
        assert len(picture) == 32
        assert {len(row) for row in picture} == {64}
        assert set("".join(picture)) <= set("█▒░·")

    @given(strategies.tilings(), st.sampled_from(["naive", "split", "aligned", "dense"]))
    def test_any_plan_prints(self, tiling: Tiling, mode: Any) -> None:
        plan = ct.plan_tiles(*unpacked(tiling), mode=mode)
        rows, columns = plan.tile_map().shape
        _, _, *picture, _ = str(plan).split("\n")
        assert len(picture) == min(rows, 32)
        assert {len(row) for row in picture} == {min(columns, 64)}
