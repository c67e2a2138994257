"""Cutting a mask into empty, full and boundary tiles, in closed form from its band edges."""

import enum
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, UInt8

from cinetile.masks import Mask, RowSegment


class TileKind(enum.IntEnum):
    """Whether a visited tile needs a mask.

    A kernel finds out from the plan's row edges what to compare in a masked tile; comparing with
    every edge and with the end of the keys is always right.
    """

    FULL = 0  # every pair is kept
    MASKED = 1  # some pairs are not kept, or the tile reaches past the last key


@dataclass(frozen=True)
class TileGeometry:
    """Tile sizes over a sequence, and the positions that a tile covers.

    Attributes:
        num_tokens: queries and keys of the sequence.
        block_q: queries in a tile.
        block_kv: keys in a tile.
    """

    num_tokens: int
    block_q: int
    block_kv: int

    @property
    def num_q_tiles(self) -> int:
        return -(-self.num_tokens // self.block_q)

    @property
    def num_kv_tiles(self) -> int:
        return -(-self.num_tokens // self.block_kv)

    @property
    def num_tiles(self) -> int:
        """Tiles of dense attention."""
        return self.num_q_tiles * self.num_kv_tiles

    def query_range(
        self, tile: Int[np.ndarray, "..."]
    ) -> tuple[Int[np.ndarray, "..."], Int[np.ndarray, "..."]]:
        """First and one-past-last query of each query tile."""
        start = tile * self.block_q
        return start, np.minimum(start + self.block_q, self.num_tokens)

    def key_range(
        self, tile: Int[np.ndarray, "..."]
    ) -> tuple[Int[np.ndarray, "..."], Int[np.ndarray, "..."]]:
        """First and one-past-last key of each key tile."""
        start = tile * self.block_kv
        return start, np.minimum(start + self.block_kv, self.num_tokens)


@dataclass(frozen=True)
class Tiles:
    """Tiles of a plan, sorted by query tile and then by key tile.

    Attributes:
        q: query tile of each.
        kv: key tile of each.
        kept: pairs that the mask keeps in each.
        area: pairs of real queries and keys in each.
        kind: `TileKind` of each.
    """

    q: Int[np.ndarray, " tiles"]
    kv: Int[np.ndarray, " tiles"]
    kept: Int[np.ndarray, " tiles"]
    area: Int[np.ndarray, " tiles"]
    kind: UInt8[np.ndarray, " tiles"]

    def __getitem__(self, index: np.ndarray) -> "Tiles":
        return Tiles(
            self.q[index], self.kv[index], self.kept[index], self.area[index], self.kind[index]
        )


def every_tile(geometry: TileGeometry) -> Tiles:
    """All tiles of dense attention; only the ragged last keys need a comparison."""
    q, kv = (
        index.reshape(-1).astype(np.int64)
        for index in np.indices((geometry.num_q_tiles, geometry.num_kv_tiles))
    )
    area = _area(geometry, q, kv)
    return Tiles(q, kv, area, area, tail_kind(geometry, kv))


def visited_tiles(mask: Mask, geometry: TileGeometry) -> Tiles:
    """The tiles in which `mask` keeps at least one pair.

    Time and memory are proportional to the number of tiles returned.
    """
    q, kv, surely_full = _expand(_runs(mask, geometry))
    area = _area(geometry, q, kv)
    kept = area.copy()
    unsure = np.flatnonzero(~surely_full)
    query_start, query_stop = geometry.query_range(q[unsure])
    key_start, key_stop = geometry.key_range(kv[unsure])
    kept[unsure] = mask.count_kept(query_start, query_stop, key_start, key_stop)

    kind = np.where(kept < area, TileKind.MASKED, tail_kind(geometry, kv)).astype(np.uint8)
    return Tiles(q, kv, kept, area, kind)[np.flatnonzero(kept)]


def count_candidates(mask: Mask, geometry: TileGeometry) -> int:
    """Tiles that `visited_tiles` looks at; memory is proportional to the number of query tiles."""
    runs = _runs(mask, geometry)
    return int((runs.prefix_stop + np.maximum(runs.band_stop - _band_start(runs), 0)).sum())


def tail_kind(geometry: TileGeometry, kv: Int[np.ndarray, " tiles"]) -> UInt8[np.ndarray, " tiles"]:
    """Returns MASKED for tiles that reach past the last key, FULL for all others."""
    past_the_end = (kv + 1) * geometry.block_kv > geometry.num_tokens
    return np.where(past_the_end, TileKind.MASKED, TileKind.FULL).astype(np.uint8)


@dataclass(frozen=True)
class _Runs:
    """Runs of key tiles for each of `q`: a prefix and a band, and what of them is surely full."""

    q: Int[np.ndarray, " rows"]
    prefix_stop: Int[np.ndarray, " rows"]
    band_start: Int[np.ndarray, " rows"]
    band_stop: Int[np.ndarray, " rows"]
    full_prefix_stop: Int[np.ndarray, " rows"]
    full_band_start: Int[np.ndarray, " rows"]
    full_band_stop: Int[np.ndarray, " rows"]


def _runs(mask: Mask, geometry: TileGeometry) -> _Runs:
    return _merge_segments([_segment_runs(s, geometry) for s in mask.segments], geometry)


def _band_start(runs: _Runs) -> Int[np.ndarray, " rows"]:
    """First key tile of the band that the prefix does not hold already."""
    return np.maximum(runs.band_start, runs.prefix_stop)


def _segment_runs(segment: RowSegment, geometry: TileGeometry) -> _Runs:
    block_q, block_kv = geometry.block_q, geometry.block_kv
    q = np.arange(segment.start // block_q, -(-segment.stop // block_q), dtype=np.int64)
    first = np.maximum(q * block_q, segment.start)
    last = np.minimum((q + 1) * block_q, segment.stop) - 1
    lowest, highest = segment.low(first), segment.high(last)
    prefix = np.full_like(q, segment.prefix)
    return _Runs(
        q,
        prefix_stop=-(-prefix // block_kv),
        band_start=lowest // block_kv,
        band_stop=np.where(highest > lowest, -(-highest // block_kv), lowest // block_kv),
        full_prefix_stop=prefix // block_kv,
        full_band_start=-(-segment.low(last) // block_kv),
        full_band_stop=segment.high(first) // block_kv,
    )


def _merge_segments(runs: list[_Runs], geometry: TileGeometry) -> _Runs:
    """Joins the runs of segments that share a query tile; nothing in those is surely full."""
    num_rows = geometry.num_q_tiles
    owners = np.zeros(num_rows, np.int64)
    prefix_stop = np.zeros(num_rows, np.int64)
    band_start = np.full(num_rows, geometry.num_kv_tiles, np.int64)
    band_stop = np.zeros(num_rows, np.int64)
    full_prefix_stop = np.zeros(num_rows, np.int64)
    full_band_start = np.zeros(num_rows, np.int64)
    full_band_stop = np.zeros(num_rows, np.int64)
    for run in runs:
        owners[run.q] += 1
        prefix_stop[run.q] = np.maximum(prefix_stop[run.q], run.prefix_stop)
        has_band = run.band_stop > run.band_start
        start = np.where(has_band, run.band_start, geometry.num_kv_tiles)
        band_start[run.q] = np.minimum(band_start[run.q], start)
        band_stop[run.q] = np.maximum(band_stop[run.q], np.where(has_band, run.band_stop, 0))
        full_prefix_stop[run.q] = run.full_prefix_stop
        full_band_start[run.q] = run.full_band_start
        full_band_stop[run.q] = run.full_band_stop
    alone = owners == 1
    return _Runs(
        np.arange(num_rows),
        prefix_stop,
        band_start,
        band_stop,
        np.where(alone, full_prefix_stop, 0),
        full_band_start,
        np.where(alone, full_band_stop, 0),
    )


def _expand(
    runs: _Runs,
) -> tuple[Int[np.ndarray, " tiles"], Int[np.ndarray, " tiles"], np.ndarray]:
    """Query tile, key tile and "surely full" of every candidate, in order."""
    band_start = _band_start(runs)
    band_count = np.maximum(runs.band_stop - band_start, 0)
    counts = runs.prefix_stop + band_count
    row = np.repeat(np.arange(runs.q.size), counts)
    position = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    gap = band_start - runs.prefix_stop
    kv = position + np.where(position >= runs.prefix_stop[row], gap[row], 0)
    surely_full = (kv < runs.full_prefix_stop[row]) | (
        (runs.full_band_start[row] <= kv) & (kv < runs.full_band_stop[row])
    )
    return runs.q[row], kv, surely_full


def _area(
    geometry: TileGeometry, q: Int[np.ndarray, " tiles"], kv: Int[np.ndarray, " tiles"]
) -> Int[np.ndarray, " tiles"]:
    query_start, query_stop = geometry.query_range(q)
    key_start, key_stop = geometry.key_range(kv)
    return (query_stop - query_start) * (key_stop - key_start)
