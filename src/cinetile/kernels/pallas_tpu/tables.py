"""A tile plan as tables for the kernel: tile words, row edges, and their extremes."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from cinetile.kernels.padding import holds_text
from cinetile.kernels.pallas_tpu.config import SMEM_LIMIT_BYTES, KernelConfig, Part
from cinetile.plans import TileKind, TilePlan

# A tile word: query tile (13 bits) | key tile (13 bits) | flags (5 bits); never negative.
ROW_START = 1  # first tile of its query tile: reset the state
ROW_END = 2  # last tile of its query tile: normalise and write
FULL = 4  # every pair is kept
MASKED = 8  # some edge crosses the tile: its units find out which
NAIVE = 16  # with MASKED: evaluate the whole mask on every unit
FLAG_BITS = 5
INDEX_BITS = 13
MAX_TILES = 1 << INDEX_BITS

EXTREMES = 6  # of a unit: prefix min, max, low min, max, high min, max
EDGES = 3  # of a query: prefix, low, high


@dataclass(frozen=True, eq=False)
class StepTables:
    """Tables of several plans with equal block sizes, divided into ranges of query tiles.

    One range is one run of the kernel. There are several only if the words of a long sequence
    exceed the scalar memory.

    Attributes:
        words: tile words of all plans, concatenated and padded. Query tiles count from the
            start of the range.
        extremes: `EXTREMES` of each unit of the range's query tiles, per plan.
        starts: start of each plan's words in `words`.
        lengths: number of words of each plan.
        first_row: first query tile of each range.
        edges: the three edges of each query in each plan.
    """

    words: Int[np.ndarray, "ranges words"]
    extremes: Int[np.ndarray, "ranges plans extremes_of_units"]
    starts: Int[np.ndarray, "ranges plans"]
    lengths: Int[np.ndarray, "ranges plans"]
    first_row: Int[np.ndarray, " ranges"]
    edges: Int[np.ndarray, "plans 3 padded_queries"]

    def granule_bits(self) -> int:
        """log2 of a granule: steps that contain at most one boundary between heads."""
        return int(self.lengths.min()).bit_length() - 1

    def granules(self, heads: int) -> int:
        """Number of granules that cover all steps of `heads` heads."""
        return (heads * int(self.lengths.max()) >> self.granule_bits()) + 1

    def smem_bytes(self, heads: int) -> int:
        """Bytes of scalar memory of the prefetched tables of one range."""
        per_head = 6 * heads + 2
        table = self.words.shape[1] + self.extremes[0].size + self.granules(heads) + per_head
        return 4 * table


def step_tables(
    plans: Sequence[TilePlan], config: KernelConfig, heads: int, *, limit: int = SMEM_LIMIT_BYTES
) -> StepTables:
    """Tables of plans with the block sizes of `config`, in as few ranges as fit scalar memory."""
    rows = plans[0].geometry.num_q_tiles
    edges = [_padded_edges(plan) for plan in plans]
    extremes = [_unit_extremes(edge, plan, config) for edge, plan in zip(edges, plans, strict=True)]
    words = [_row_words(plan, config) for plan in plans]
    cut = functools.partial(_cut, words, extremes, np.stack(edges))
    fitting = (tables for tables in map(cut, range(1, rows)) if tables.smem_bytes(heads) <= limit)
    return next(fitting, None) or cut(rows)


def tile_words(plan: TilePlan, config: KernelConfig) -> Int[np.ndarray, " words"]:
    """Words of all visited tiles of one plan, for counting what the kernel does."""
    return np.concatenate(_row_words(plan, config))


def unit_extremes(
    plan: TilePlan, config: KernelConfig
) -> Int[np.ndarray, "q_tiles groups extremes"]:
    """`EXTREMES` of each unit of one plan."""
    rows = plan.geometry.num_q_tiles
    return _unit_extremes(_padded_edges(plan), plan, config).reshape(rows, config.groups, EXTREMES)


def unpack_words(
    words: Int[np.ndarray, "..."],
) -> tuple[Int[np.ndarray, "..."], Int[np.ndarray, "..."], Int[np.ndarray, "..."]]:
    """Query tile, key tile and flags of tile words."""
    index_mask = MAX_TILES - 1
    return words >> (FLAG_BITS + INDEX_BITS), (words >> FLAG_BITS) & index_mask, words & 31


def _padded_edges(plan: TilePlan) -> Int[np.ndarray, "3 padded_queries"]:
    prefix, low, high = _normalised_edges(plan)
    missing = plan.geometry.num_q_tiles * plan.block_q - prefix.size
    return np.pad(np.stack([prefix, low, high]), ((0, 0), (0, missing)), mode="edge")


def _normalised_edges(plan: TilePlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Clips edges to the keys, and lets a prefix that reaches its band become part of it."""
    keys = plan.mask.num_tokens
    prefix, low, high = (np.clip(edge, 0, keys) for edge in plan.row_edges())
    touching = (high <= low) | (prefix >= low)
    high = np.where(touching, np.where(high <= low, prefix, np.maximum(prefix, high)), high)
    return np.where(touching, 0, prefix), np.where(touching, 0, low), high


def _unit_extremes(
    edges: Int[np.ndarray, "3 padded_queries"], plan: TilePlan, config: KernelConfig
) -> Int[np.ndarray, " extremes_of_units"]:
    tiles = np.arange(plan.geometry.num_q_tiles)[:, None] * config.block_q
    starts = (tiles + np.arange(config.groups) * config.group).ravel()
    extremes = np.stack(
        [reduce.reduceat(edge, starts) for edge in edges for reduce in (np.minimum, np.maximum)], 1
    )
    extremes[starts >= plan.mask.num_tokens] = 0  # no queries, so nothing to compute
    return extremes.astype(np.int32).ravel()


def _row_words(plan: TilePlan, config: KernelConfig) -> list[Int[np.ndarray, " tiles"]]:
    """Words of each query tile; a query tile without tiles gets one word that only writes."""
    last_unit = (plan.geometry.num_q_tiles - 1) * plan.block_q + (config.groups - 1) * config.group
    has_empty_units = last_unit >= plan.mask.num_tokens
    words = []
    for row in range(plan.geometry.num_q_tiles):
        entries = slice(plan.row_starts[row], plan.row_starts[row + 1])
        unmasked = plan.tile_kind[entries] == TileKind.FULL
        if row == plan.geometry.num_q_tiles - 1 and has_empty_units:
            unmasked[:] = False
        if config.padding:
            unmasked &= ~holds_text(plan, plan.tile_kv[entries])
        chosen = _of_part(unmasked, config.part)
        masked = MASKED | NAIVE if plan.mode == "naive" else MASKED
        flags = np.where(unmasked, FULL, masked)[chosen]
        tiles = plan.tile_kv[entries][chosen]
        if not tiles.size:
            flags, tiles = np.zeros(1, np.int64), np.zeros(1, np.int32)
        flags[0] |= ROW_START
        flags[-1] |= ROW_END
        words.append(row << (FLAG_BITS + INDEX_BITS) | tiles << FLAG_BITS | flags)
    return words


def _of_part(unmasked: np.ndarray, part: Part) -> np.ndarray:
    if part == "all":
        return np.ones_like(unmasked)
    return unmasked if part == "full" else ~unmasked


def _cut(
    words: list[list[np.ndarray]],
    extremes: list[np.ndarray],
    edges: Int[np.ndarray, "plans 3 padded_queries"],
    ranges: int,
) -> StepTables:
    rows = len(words[0])
    bounds = np.linspace(0, rows, ranges + 1).astype(np.int64)
    units = extremes[0].size // rows
    first_row, stops = bounds[:-1], bounds[1:]
    most_rows = int(np.diff(bounds).max())
    words_of = [
        [np.concatenate(plan[first:stop]) - (first << (FLAG_BITS + INDEX_BITS)) for plan in words]
        for first, stop in zip(first_row, stops, strict=True)
    ]
    lengths = np.array([[plan.size for plan in range_words] for range_words in words_of])
    padded_words = np.zeros((ranges, lengths.sum(axis=1).max()), np.int32)
    padded_extremes = np.zeros((ranges, len(words), most_rows * units), np.int32)
    for index, (first, stop) in enumerate(zip(first_row, stops, strict=True)):
        joined = np.concatenate(words_of[index])
        padded_words[index, : joined.size] = joined
        for plan, extreme in enumerate(extremes):
            padded_extremes[index, plan, : (stop - first) * units] = extreme[
                first * units : stop * units
            ]
    return StepTables(
        padded_words,
        padded_extremes,
        starts=(np.cumsum(lengths, axis=1) - lengths).astype(np.int32),
        lengths=lengths.astype(np.int32),
        first_row=first_row.astype(np.int32),
        edges=edges.astype(np.int32),
    )
