"""Tile plans: the tiles that a kernel visits for one mask, and what it must do in each."""

import functools
import hashlib
import os
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int, UInt8

from cinetile import _checks
from cinetile.files import reading
from cinetile.grid import TokenGrid
from cinetile.masks import Mask
from cinetile.masks.edges import MAX_POSITION
from cinetile.masks.mask import keeps, require_small_grid, to_frame_major
from cinetile.plans import files, picture
from cinetile.plans.classify import (
    TileGeometry,
    TileKind,
    Tiles,
    count_candidates,
    every_tile,
    tail_kind,
    visited_tiles,
)
from cinetile.plans.rounding import ROUNDINGS, round_tiles

Mode = Literal["dense", "naive", "split", "aligned"]
MODES: tuple[str, ...] = ("dense", "naive", "split", "aligned")
Rounding = Literal["balanced", "row", "nearest", "keep"]

_SETTINGS = ("block_q", "block_kv", "mode", "rounding")
# A plan is planned again when it is loaded. Up to so many candidate tiles cost nothing of note;
# beyond, rounding keeps at least one tile of so many.
_ALWAYS_PLANNED, _MOST_CANDIDATES_PER_TILE = 1 << 20, 64

# Tables of more tiles would index more than the kernels' int32 offsets serve well.
MAX_TILES = 1 << 27
# What planning holds at its peak for each query tile and each candidate tile.
_BYTES_PER_ROW, _BYTES_PER_TILE = 200, 150


@dataclass(frozen=True)
class PlanStats:
    """What a plan visits and keeps.

    Attributes:
        kept_pairs: query-key pairs that the plan computes and keeps.
        kept_fraction: the same as a fraction of all pairs.
        tiles_total: tiles of dense attention.
        tiles_visited: tiles that a kernel runs.
        tiles_masked: visited tiles in which pairs are masked out.
        masked_fraction: the same as a fraction of the visited tiles.
        pairs_added: kept pairs that the mask leaves out.
        pairs_dropped: pairs of the mask that the plan leaves out.
    """

    kept_pairs: int
    kept_fraction: float
    tiles_total: int
    tiles_visited: int
    tiles_masked: int
    masked_fraction: float
    pairs_added: int
    pairs_dropped: int


@dataclass(frozen=True, eq=False, repr=False)
class TilePlan:
    """The live tiles of one mask, as a compressed sparse row table over query tiles.

    Plans are frozen, compare and hash by content, and so serve as static arguments of `jax.jit`.
    Build them with `plan_tiles`.

    Attributes:
        mask: the mask that was planned.
        block_q: queries in a tile.
        block_kv: keys in a tile.
        mode: "dense", "naive", "split" or "aligned".
        rounding: policy of an aligned plan; None in other modes.
        row_starts: where each query tile's entries start in the tables, and their end.
        tile_kv: key tile of each visited tile, ascending within a query tile.
        tile_kind: `TileKind` of each visited tile; 0 needs no mask.
        stats: what the plan visits and keeps.
    """

    mask: Mask
    block_q: int
    block_kv: int
    mode: str
    rounding: str | None
    row_starts: Int[np.ndarray, " q_tiles_plus_1"]
    tile_kv: Int[np.ndarray, " tiles"]
    tile_kind: UInt8[np.ndarray, " tiles"]
    stats: PlanStats

    def __post_init__(self) -> None:
        for table in (self.row_starts, self.tile_kv, self.tile_kind):
            table.setflags(write=False)

    @property
    def grid(self) -> TokenGrid:
        return self.mask.grid

    @property
    def geometry(self) -> TileGeometry:
        return TileGeometry(self.mask.num_tokens, self.block_q, self.block_kv)

    @property
    def tile_q(self) -> Int[np.ndarray, " tiles"]:
        """Query tile of each visited tile."""
        rows = np.arange(self.geometry.num_q_tiles, dtype=np.int32)
        return np.repeat(rows, np.diff(self.row_starts))

    @property
    def is_exact(self) -> bool:
        """Whether masked tiles follow the mask's edges; else they only cut off the last keys."""
        return self.mode in ("naive", "split")

    def row_edges(
        self, rows: Int[np.ndarray, " rows"] | None = None
    ) -> tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " rows"], Int[np.ndarray, " rows"]]:
        """What masked tiles keep: prefix, first and one-past-last band key of each query (int32).

        A query keeps key `k` of a masked tile if `k < prefix` or `low <= k < high`. Keys past
        the last one are never kept.
        """
        if self.is_exact:
            return self.mask.row_edges(rows)
        size = self.mask.num_tokens if rows is None else len(rows)
        end = np.full(size, self.mask.num_tokens, np.int32)
        return end, end, end

    def kept_keys(self, rows: Int[np.ndarray, " rows"]) -> Bool[np.ndarray, "rows tokens"]:
        """Which keys each of some query rows keeps, in the mask's orders, read off the tables."""
        rows = np.asarray(rows)
        keys = np.arange(self.mask.num_tokens)
        prefix, low, high = (edge[:, None] for edge in self.row_edges(rows))
        inside = keeps(keys, prefix, low, high)

        visited = np.zeros((rows.size, self.geometry.num_kv_tiles), bool)
        masked = np.zeros_like(visited)
        for index, tile in enumerate(rows // self.block_q):
            entries = slice(self.row_starts[tile], self.row_starts[tile + 1])
            visited[index, self.tile_kv[entries]] = True
            masked[index, self.tile_kv[entries]] = self.tile_kind[entries] != TileKind.FULL
        tile_of_key = keys // self.block_kv
        return visited[:, tile_of_key] & (inside | ~masked[:, tile_of_key])

    def mask_kept(self) -> Bool[np.ndarray, "tokens tokens"]:
        """The pairs that this plan keeps, queries and keys in frame-major order.

        Raises:
            ValueError: the grid has more than 8,192 tokens.
        """
        require_small_grid("mask_kept", self.mask.num_tokens)
        return to_frame_major(self.kept_keys(np.arange(self.mask.num_tokens)), self.mask)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of everything that the plan says; equal plans have equal ones."""
        digest = hashlib.sha256(repr((self.mask, *self._settings)).encode())
        for table in (self.row_starts, self.tile_kv, self.tile_kind):
            digest.update(table.tobytes())
        return digest.hexdigest()

    @property
    def _settings(self) -> tuple[int, int, str, str | None]:
        return self.block_q, self.block_kv, self.mode, self.rounding

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TilePlan):
            return NotImplemented
        return self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        rounding = f", rounding={self.rounding!r}" if self.rounding else ""
        return (
            f"TilePlan({self.mask.name!r}, grid={self.grid.frames}x{self.grid.height}x"
            f"{self.grid.width}, block_q={self.block_q}, block_kv={self.block_kv}, "
            f"mode={self.mode!r}{rounding}, tiles={self.stats.tiles_visited}/"
            f"{self.stats.tiles_total})"
        )

    def __str__(self) -> str:
        stats = self.stats
        return "\n".join(
            [
                repr(self),
                f"keeps {stats.kept_fraction:.2%} of the pairs, visits {stats.tiles_visited:,} of "
                f"{stats.tiles_total:,} tiles, masks {stats.masked_fraction:.2%} of them",
                picture.text_picture(self.tile_map()),
            ]
        )

    def tile_map(self) -> UInt8[np.ndarray, "q_tiles kv_tiles"]:
        """State of each tile: 0 skipped, 1 full, 2 masked. One byte a tile, for pictures."""
        states = np.zeros((self.geometry.num_q_tiles, self.geometry.num_kv_tiles), np.uint8)
        masked = self.tile_kind != TileKind.FULL
        states[self.tile_q, self.tile_kv] = np.where(masked, picture.MASKED, picture.FULL)
        return states

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a `.json` or `.npz` file, whole or not at all.

        Raises:
            ValueError: the suffix is neither of them.
        """
        files.write(
            path,
            mask=self.mask,
            settings={
                "block_q": self.block_q,
                "block_kv": self.block_kv,
                "mode": self.mode,
                "rounding": self.rounding,
            },
            tables={name: getattr(self, name) for name in files.TABLES},
            fingerprint=self.fingerprint,
        )

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "TilePlan":
        """Reads a plan that `save` wrote, and checks its tables before anything can use them.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is no plan, is damaged, or its tables do not fit its mask.
        """
        stored = files.read(path)
        with reading(path, files.EXPECTED):
            _require_matching_size(stored)
            plan = plan_tiles(stored.mask, **stored.settings)
            for name in files.TABLES:
                if not np.array_equal(getattr(plan, name), stored.tables[name]):
                    raise ValueError(
                        f"{name} is not what its mask and settings give, so it is damaged or from "
                        "a version that rounds otherwise"
                    )
            if plan.fingerprint != stored.fingerprint:
                raise ValueError("its mask was changed")
        return plan


def _require_matching_size(stored: files.StoredPlan) -> None:
    """Raises ValueError if planning again would cost far more than the stored tables explain."""
    settings, tiles = stored.settings, len(stored.tables["tile_kv"])
    if not isinstance(settings, dict) or set(settings) != set(_SETTINGS):
        raise ValueError(f"settings must be {', '.join(_SETTINGS)}, got {_checks.shown(settings)}")
    block_q, block_kv = (
        _checks.integer(name, settings[name], minimum=1, maximum=MAX_POSITION)
        for name in ("block_q", "block_kv")
    )
    geometry = TileGeometry(stored.mask.num_tokens, block_q, block_kv)
    if len(stored.tables["row_starts"]) != geometry.num_q_tiles + 1:
        raise ValueError(
            f"row_starts has {len(stored.tables['row_starts']):,} entries, wanted "
            f"{geometry.num_q_tiles + 1:,} for its grid and block_q"
        )
    dense = settings["mode"] == "dense"
    candidates = geometry.num_tiles if dense else count_candidates(stored.mask, geometry)
    if candidates > max(_ALWAYS_PLANNED, _MOST_CANDIDATES_PER_TILE * tiles):
        raise ValueError(
            f"tile_kv has {tiles:,} tiles, where its mask and settings give about {candidates:,}"
        )


def plan_tiles(
    mask: Mask,
    block_q: int,
    block_kv: int,
    mode: Mode = "split",
    *,
    rounding: Rounding | None = None,
) -> TilePlan:
    """Cuts a mask into tiles and decides which to visit and which to mask.

    - "dense": visits every tile and keeps every pair, whatever the mask; the baseline.
    - "naive": visits the tiles that hold a kept pair and masks all of them.
    - "split": the same pairs, but only tiles that an edge crosses are masked.
    - "aligned": boundary tiles are kept whole or skipped at an equal pair budget, so that only
      tiles that reach past the last key are masked. Which pairs are kept changes.

    Takes time and memory proportional to the number of visited tiles; no N x N array.

    Args:
        mask: what each query keeps.
        block_q: queries in a tile, from 1.
        block_kv: keys in a tile, from 1.
        mode: see above.
        rounding: how an aligned plan rounds boundary tiles: "balanced" (default, the pair budget
            of the whole plan), "row" (of each query tile), "nearest" (at least half covered) or
            "keep" (all of them). The budget is met to within half
            a tile, unless query tiles without any full tile need more.

    Raises:
        TypeError: `mask` is no mask or a block size no integer.
        ValueError: a block size is below 1, the mode or rounding is unknown, or the plan would
            have more than 134,217,728 tiles or not fit in memory.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a cinetile mask, got {type(mask).__name__}")
    block_q = _checks.integer("block_q", block_q, minimum=1, maximum=MAX_POSITION)
    block_kv = _checks.integer("block_kv", block_kv, minimum=1, maximum=MAX_POSITION)
    _checks.choice("mode", mode, MODES)
    if rounding is not None:
        if mode != "aligned":
            raise ValueError(f"rounding is for mode 'aligned' only, got {mode=}")
        _checks.choice("rounding", rounding, ROUNDINGS)
    elif mode == "aligned":
        rounding = "balanced"

    geometry = TileGeometry(mask.num_tokens, block_q, block_kv)
    _require_plannable(mask, geometry, mode)
    if mode == "dense":
        tiles = every_tile(geometry)
        pairs_added, pairs_dropped = mask.num_tokens**2 - mask.kept_pairs, 0
    else:
        tiles = visited_tiles(mask, geometry)
        pairs_added = pairs_dropped = 0
    if mode == "naive":
        tiles = replace(tiles, kind=np.full_like(tiles.kind, TileKind.MASKED))
    elif rounding is not None:
        keep = round_tiles(mask, geometry, tiles, rounding)
        pairs_dropped = int(tiles.kept[~keep].sum())
        tiles = tiles[np.flatnonzero(keep)]
        pairs_added = int((tiles.area - tiles.kept).sum())
        tiles = replace(tiles, kept=tiles.area, kind=tail_kind(geometry, tiles.kv))
    return TilePlan(
        mask=mask,
        block_q=block_q,
        block_kv=block_kv,
        mode=mode,
        rounding=rounding,
        row_starts=np.searchsorted(tiles.q, np.arange(geometry.num_q_tiles + 1)).astype(np.int32),
        tile_kv=tiles.kv.astype(np.int32),
        tile_kind=tiles.kind,
        stats=_stats(mask, geometry, tiles, pairs_added, pairs_dropped),
    )


def _require_plannable(mask: Mask, geometry: TileGeometry, mode: str) -> None:
    """Raises ValueError, before anything large is allocated, if a plan would be too large."""
    what = (
        f"planning {mask.grid} in tiles of {geometry.block_q:,} x {geometry.block_kv:,} "
        "(block_q x block_kv)"
    )
    rows = geometry.num_q_tiles
    _checks.memory(what, rows * _BYTES_PER_ROW)
    if rows <= MAX_TILES:
        tiles = geometry.num_tiles if mode == "dense" else count_candidates(mask, geometry)
    else:
        tiles = rows
    nbytes = tiles * _BYTES_PER_TILE
    if tiles > MAX_TILES:
        raise ValueError(
            f"{what} would visit {tiles:,} tiles and take {_checks.size(nbytes)}; at most "
            f"{MAX_TILES:,} tiles are taken: use larger tiles or a smaller grid"
        )
    _checks.memory(f"{what}, which visits {tiles:,} tiles,", nbytes)


def _stats(
    mask: Mask, geometry: TileGeometry, tiles: Tiles, pairs_added: int, pairs_dropped: int
) -> PlanStats:
    kept_pairs = int(tiles.kept.sum())
    tiles_masked = int(np.count_nonzero(tiles.kind))
    return PlanStats(
        kept_pairs=kept_pairs,
        kept_fraction=kept_pairs / mask.num_tokens**2,
        tiles_total=geometry.num_q_tiles * geometry.num_kv_tiles,
        tiles_visited=tiles.kv.size,
        tiles_masked=tiles_masked,
        masked_fraction=tiles_masked / tiles.kv.size,
        pairs_added=pairs_added,
        pairs_dropped=pairs_dropped,
    )
