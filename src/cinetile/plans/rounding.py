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

    Full tiles stay. Boundary tiles are ranked: first those on the band's centre and those that
    hold the first sink key, so that queries keep themselves and the sink; then by the fraction
    of their pairs that the mask keeps; among equals the one nearest the band's centre or the sink
    comes first. A query tile without any full tile keeps its best boundary tile whatever the
    policy says, so that no query is left without a key.

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
    by_coverage = boundary[np.lexsort((boundary, distance, -coverage))]
    required = _best_of_rows_without_full(tiles, full, by_coverage, geometry.num_q_tiles)
    keep[required] = True
    if rounding == "nearest":
        keep[boundary[coverage >= 0.5]] = True
        return keep

    essential = _holds_centre_or_first_sink_key(mask, geometry, tiles[by_coverage])
    ranked = by_coverage[np.argsort(~essential, kind="stable")]
    optional = ranked[~keep[ranked]]
    if rounding == "balanced":
        budget = int(tiles.kept[boundary].sum() - tiles.area[required].sum())
        keep[optional[_closest_to_budget(tiles.area[optional], budget)]] = True
        return keep

    carried = 0
    by_row = optional[np.argsort(tiles.q[optional], kind="stable")]
    starts = np.searchsorted(tiles.q[by_row], np.arange(geometry.num_q_tiles + 1))
    wanted = _sum_by_row(tiles, boundary, tiles.kept, geometry.num_q_tiles)
    granted = _sum_by_row(tiles, required, tiles.area, geometry.num_q_tiles)
    for row in range(geometry.num_q_tiles):
        candidates = by_row[starts[row] : starts[row + 1]]
        budget = carried + int(wanted[row] - granted[row])
        chosen = candidates[_closest_to_budget(tiles.area[candidates], budget)]
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


def _holds_centre_or_first_sink_key(
    mask: Mask, geometry: TileGeometry, tiles: Tiles
) -> Bool[np.ndarray, " tiles"]:
    query_start, query_stop = geometry.query_range(tiles.q)
    key_start, key_stop = geometry.key_range(tiles.kv)
    first_centre, last_centre = mask.band_centre(query_start), mask.band_centre(query_stop - 1)
    on_centre = (first_centre < key_stop) & (key_start <= last_centre)
    has_sink = any(segment.prefix > 0 for segment in mask.segments)
    return on_centre | ((tiles.kv == 0) & has_sink)


def _closest_to_budget(areas: Int[np.ndarray, " tiles"], budget: int) -> Int[np.ndarray, " chosen"]:
    """Which of the ranked `areas` to take so that their sum comes closest to `budget`.

    A leading run of them and, where that comes closer, one more from further behind: tiles at
    the ragged ends are smaller and make change.
    """
    sums = np.concatenate([[0], np.cumsum(areas)])
    count = int(np.argmin(np.abs(sums - budget)))
    best, chosen = abs(int(sums[count]) - budget), np.arange(count)
    for run in (count - 1, count):
        if 0 <= run < areas.size:
            with_one_more = np.abs(sums[run] + areas[run:] - budget)
            one_more = int(np.argmin(with_one_more))
            if with_one_more[one_more] < best:
                best = int(with_one_more[one_more])
                chosen = np.append(np.arange(run), run + one_more)
    return chosen


def _sum_by_row(
    tiles: Tiles,
    chosen: Int[np.ndarray, " chosen"],
    pairs: Int[np.ndarray, " tiles"],
    num_q_tiles: int,
) -> Int[np.ndarray, " rows"]:
    sums = np.zeros(num_q_tiles, np.int64)
    np.add.at(sums, tiles.q[chosen], pairs[chosen])
    return sums
