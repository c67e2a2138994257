"""A plan's tiles as a loop wants them: for each outer tile, full inner ones first, then masked."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from cinetile.plans import TileKind, TilePlan


@dataclass(frozen=True, eq=False)
class Visits:
    """Inner tiles that each outer tile visits.

    Attributes:
        start: where the full tiles of each outer tile start in `inner`.
        masked_start: where its masked tiles start, which is where the full ones end.
        stop: where its masked tiles end.
        inner: inner tiles of all outer tiles, one after the other.
    """

    start: Int[np.ndarray, " outer"]
    masked_start: Int[np.ndarray, " outer"]
    stop: Int[np.ndarray, " outer"]
    inner: Int[np.ndarray, " tiles"]


def key_visits(plan: TilePlan) -> Visits:
    """Key tiles that each query tile visits."""
    return _visits(plan.tile_q, plan.tile_kv, plan.tile_kind, plan.geometry.num_q_tiles)


def query_visits(plan: TilePlan) -> Visits:
    """Query tiles that each key tile visits: the same tiles, seen from the keys."""
    return _visits(plan.tile_kv, plan.tile_q, plan.tile_kind, plan.geometry.num_kv_tiles)


def _visits(outer: np.ndarray, inner: np.ndarray, kind: np.ndarray, num_outer: int) -> Visits:
    masked = kind != TileKind.FULL
    order = np.lexsort((inner, masked, outer))
    # Full and masked tiles alternate as sections of the sorted tiles: two for each outer tile.
    section = 2 * outer[order].astype(np.int64) + masked[order]
    bounds = np.searchsorted(section, np.arange(2 * num_outer + 1)).astype(np.int32)
    return Visits(bounds[:-1:2], bounds[1::2], bounds[2::2], inner[order])
