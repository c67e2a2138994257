"""Rounding boundary tiles to keep or skip, so that a plan needs no mask inside any tile."""

import numpy as np
from jaxtyping import Bool, Float, Int

from cinetile.masks import Mask
from cinetile.plans.classify import TileGeometry, Tiles

ROUNDINGS: tuple[str, ...] = ("balanced", "row", "nearest", "keep")


def round_tiles(
    mask: Mask, geometry: TileGeometry, tiles: Tiles, rounding: str
) -> Bool[np.ndarray, " tiles"]:
    """Chooses which visited tiles an aligned plan keeps whole.

    Full tiles stay. Boundary tiles are ranked by the fraction of their pairs that the mask
    keeps; among equals the one nearest the band's centre or the sink comes first. A query tile
    without any full tile keeps its best boundary tile whatever the policy says.

    - "balanced": the best-ranked tiles of the whole plan whose pairs come closest to what the
      mask keeps in all boundary tiles.
    - "row": the same within each query tile, the remainder carried on to the next one, so that
      rows stay balanced.
    - "nearest": tiles of which the mask keeps at least half.
    - "keep": every boundary tile; a superset of the mask's pairs.

    Returns:
        Whether each tile is kept.
    """
    full = tiles.kept == tiles.area
    boundary = np.flatnonzero(~full)
    keep = full.copy()
    if rounding == "keep":
        keep[boundary] = True
        return keep

    coverage = tiles.kept[boundary] / tiles.area[boundary]
    distance = _distance(mask, geometry, tiles[boundary])
    order = np.lexsort((boundary, distance, -coverage))
    ranked = boundary[order]
    required = _best_of_rows_without_full(tiles, full, ranked, geometry.num_q_tiles)
    keep[required] = True
    if rounding == "nearest":
        keep[boundary[coverage >= 0.5]] = True
        return keep

    optional = ranked[~keep[ranked]]
    if rounding == "balanced":
        budget = int(tiles.kept[boundary].sum() - tiles.area[required].sum())
        keep[optional[: _closest_count(tiles.area[optional], budget)]] = True
        return keep

    carried = 0
    by_row = optional[np.argsort(tiles.q[optional], kind="stable")]
    starts = np.searchsorted(tiles.q[by_row], np.arange(geometry.num_q_tiles + 1))
    wanted = _sum_by_row(tiles, boundary, tiles.kept, geometry.num_q_tiles)
    granted = _sum_by_row(tiles, required, tiles.area, geometry.num_q_tiles)
    for row in range(geometry.num_q_tiles):
        candidates = by_row[starts[row] : starts[row + 1]]
        budget = carried + int(wanted[row] - granted[row])
        chosen = candidates[: _closest_count(tiles.area[candidates], budget)]
        keep[chosen] = True
        carried = budget - int(tiles.area[chosen].sum())
    return keep


def _distance(mask: Mask, geometry: TileGeometry, tiles: Tiles) -> Float[np.ndarray, " tiles"]:
    """Keys between a tile's centre and its row's band centre; 0 for tiles that hold sink keys."""
    query_start, query_stop = geometry.query_range(tiles.q)
    key_start, key_stop = geometry.key_range(tiles.kv)
    middle = (query_start + query_stop) // 2
    prefix, _, _ = mask.row_edges(middle)
    distance = np.abs((key_start + key_stop) / 2 - mask.band_centre(middle))
    return np.where(key_start < prefix, 0.0, distance)


def _best_of_rows_without_full(
    tiles: Tiles,
    full: Bool[np.ndarray, " tiles"],
    ranked: Int[np.ndarray, " boundary"],
    num_q_tiles: int,
) -> Int[np.ndarray, " required"]:
    has_full = np.zeros(num_q_tiles, bool)
    has_full[tiles.q[full]] = True
    candidates = ranked[~has_full[tiles.q[ranked]]]
    _, first = np.unique(tiles.q[candidates], return_index=True)
    return candidates[first]


def _closest_count(areas: Int[np.ndarray, " tiles"], budget: int) -> int:
    """How many leading `areas` sum up closest to `budget`."""
    sums = np.concatenate([[0], np.cumsum(areas)])
    return int(np.argmin(np.abs(sums - budget)))


def _sum_by_row(
    tiles: Tiles,
    chosen: Int[np.ndarray, " chosen"],
    pairs: Int[np.ndarray, " tiles"],
    num_q_tiles: int,
) -> Int[np.ndarray, " rows"]:
    sums = np.zeros(num_q_tiles, np.int64)
    np.add.at(sums, tiles.q[chosen], pairs[chosen])
    return sums
