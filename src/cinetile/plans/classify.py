"""Cutting a mask into empty, full and boundary tiles, in closed form from its band edges."""

import enum
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, UInt8

from cinetile.masks import Mask, RowSegment


class TileKind(enum.IntFlag):
    """What a kernel has to compare in a visited tile; FULL tiles need no mask at all.

    A set bit says that the comparison excludes some pair of the tile, so leaving it out would
    be wrong; a kernel that makes all of them in every masked tile is always right.
    """

    FULL = 0
    LOW = 1  # the band's lower edge crosses the tile
    HIGH = 2  # the band's upper edge crosses the tile
    SINK = 4  # the end of the sink prefix crosses the tile
    TAIL = 8  # the tile reaches past the last key


ALL_EDGES = np.uint8(TileKind.LOW | TileKind.HIGH | TileKind.SINK)


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
        kind: `TileKind` bits of each.
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

    kind = tail_kind(geometry, kv)
    partial = np.flatnonzero((kept > 0) & (kept < area))
    kind[partial] |= _crossing_edges(mask, geometry, q[partial], kv[partial])
    return Tiles(q, kv, kept, area, kind)[np.flatnonzero(kept)]


def count_candidates(mask: Mask, geometry: TileGeometry) -> int:
    """Tiles that `visited_tiles` looks at; memory is proportional to the number of query tiles."""
    runs = _runs(mask, geometry)
    return int((runs.prefix_stop + np.maximum(runs.band_stop - _band_start(runs), 0)).sum())


def tail_kind(geometry: TileGeometry, kv: Int[np.ndarray, " tiles"]) -> UInt8[np.ndarray, " tiles"]:
    """TAIL for tiles that reach past the last key, FULL for all others."""
    past_the_end = (kv + 1) * geometry.block_kv > geometry.num_tokens
    return np.where(past_the_end, TileKind.TAIL, TileKind.FULL).astype(np.uint8)


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


def _crossing_edges(
    mask: Mask,
    geometry: TileGeometry,
    q: Int[np.ndarray, " tiles"],
    kv: Int[np.ndarray, " tiles"],
) -> UInt8[np.ndarray, " tiles"]:
    """`TileKind` bits of boundary tiles: which comparisons exclude something in each."""
    query_start, query_stop = geometry.query_range(q)
    key_start, key_stop = geometry.key_range(kv)
    kind = np.zeros(q.shape, np.uint8)
    owners = np.zeros(q.shape, np.int64)
    for segment in mask.segments:
        first = np.maximum(query_start, segment.start)
        last = np.minimum(query_stop, segment.stop) - 1
        inside = first <= last
        owners += inside
        band_start = np.maximum(key_start, segment.prefix)
        sink = (key_start < segment.prefix) & (segment.prefix < key_stop)
        low = (segment.low(last) > band_start) & (band_start < key_stop)
        high = segment.high(first) < key_stop
        kind |= np.where(inside & sink, TileKind.SINK, 0).astype(np.uint8)
        kind |= np.where(inside & low, TileKind.LOW, 0).astype(np.uint8)
        kind |= np.where(inside & high, TileKind.HIGH, 0).astype(np.uint8)
    # Rows of different segments differ in every edge, so none of them may be left out.
    kind[owners > 1] |= ALL_EDGES
    return kind


def _area(
    geometry: TileGeometry, q: Int[np.ndarray, " tiles"], kv: Int[np.ndarray, " tiles"]
) -> Int[np.ndarray, " tiles"]:
    query_start, query_stop = geometry.query_range(q)
    key_start, key_stop = geometry.key_range(kv)
    return (query_stop - query_start) * (key_stop - key_start)
