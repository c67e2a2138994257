"""The loop order of a plan's tiles: for each outer tile, its inner tiles grouped by kind."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from cinetile.kernels.padding import holds_text
from cinetile.plans import TileKind, TilePlan


@dataclass(frozen=True, eq=False)
class Visits:
    """Inner tiles that each outer tile visits: pairs of full, single full, and masked tiles.

    Attributes:
        pair_start: where the pairs of each outer tile start in `inner`. A pair stands for two
            full tiles, the one that `inner` names and the next.
        single_start: where its single full tiles start, which is where the pairs end.
        masked_start: where its masked tiles start.
        stop: where its masked tiles end.
        inner: inner tiles of all outer tiles, one section after the other.
    """

    pair_start: Int[np.ndarray, " outer"]
    single_start: Int[np.ndarray, " outer"]
    masked_start: Int[np.ndarray, " outer"]
    stop: Int[np.ndarray, " outer"]
    inner: Int[np.ndarray, " visits"]


def key_visits(plan: TilePlan, *, pairs: bool, mask_prompt: bool = False) -> Visits:
    """Key tiles that each query tile visits; with `pairs`, neighbouring full tiles form pairs.

    With `mask_prompt`, all tiles that hold text are masked, also those that the plan has as full.
    """
    q, kv, masked = plan.tile_q, plan.tile_kv, _masked(plan, mask_prompt)
    first_of_pair = _first_of_pair(q, kv, masked) if pairs else np.zeros_like(masked)
    return _sections(q, kv, masked, first_of_pair, plan.geometry.num_q_tiles)


def query_visits(plan: TilePlan, *, mask_prompt: bool = False) -> Visits:
    """Query tiles that each key tile visits: the transposed list, without pairs."""
    masked = _masked(plan, mask_prompt)
    no_pairs = np.zeros_like(masked)
    return _sections(plan.tile_kv, plan.tile_q, masked, no_pairs, plan.geometry.num_kv_tiles)


def _masked(plan: TilePlan, mask_prompt: bool) -> Bool[np.ndarray, " tiles"]:
    masked = plan.tile_kind != TileKind.FULL
    return masked | holds_text(plan, plan.tile_kv) if mask_prompt else masked


def _first_of_pair(
    q: Int[np.ndarray, " tiles"], kv: Int[np.ndarray, " tiles"], masked: Bool[np.ndarray, " tiles"]
) -> Bool[np.ndarray, " tiles"]:
    """Which tiles start a pair: every second one of a run of full neighbours that has a next."""
    joins_previous = np.zeros(q.shape, bool)
    joins_previous[1:] = (np.diff(q) == 0) & (np.diff(kv) == 1) & ~masked[1:] & ~masked[:-1]
    position = np.arange(q.size)
    run_start = np.maximum.accumulate(np.where(joins_previous, 0, position))
    has_next = np.append(joins_previous[1:], False)
    return has_next & ((position - run_start) % 2 == 0)


def _sections(
    outer: Int[np.ndarray, " tiles"],
    inner: Int[np.ndarray, " tiles"],
    masked: Bool[np.ndarray, " tiles"],
    first_of_pair: Bool[np.ndarray, " tiles"],
    num_outer: int,
) -> Visits:
    second_of_pair = np.append(False, first_of_pair[:-1])
    visited = np.flatnonzero(~second_of_pair)
    kind = np.where(first_of_pair, 0, 1 + masked)[visited]
    section = 3 * outer[visited].astype(np.int64) + kind
    order = np.argsort(section, kind="stable")
    bounds = np.searchsorted(section[order], np.arange(3 * num_outer + 1)).astype(np.int32)
    return Visits(
        pair_start=bounds[:-1:3],
        single_start=bounds[1::3],
        masked_start=bounds[2::3],
        stop=bounds[3::3],
        inner=inner[visited][order],
    )
