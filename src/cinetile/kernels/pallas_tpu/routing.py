"""From routes to grid steps: the head and the tile word of each step of the flat grid."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from cinetile.kernels.pallas_tpu.tables import StepTables


class HeadOrder(NamedTuple):
    """The heads that one kernel runs, in execution order; may be traced.

    Attributes:
        heads: all heads, those that run first.
        plans: plan of each head.
        num_active: number of heads that run.
        padding_start: first padding key of each head.
        padding_stop: first key after the padding of each head; equal starts and stops mean none.
    """

    heads: Int[Array, " heads"]
    plans: Int[Array, " heads"]
    num_active: Int[Array, ""]
    padding_start: Int[Array, " heads"]
    padding_stop: Int[Array, " heads"]


class StepTable(NamedTuple):
    """Decodes a grid step into a head and the index of its tile word.

    Heads have different numbers of steps. Steps are divided into granules short enough that each
    contains at most one boundary between heads; a lookup and a comparison then give the head.

    Attributes:
        lookup: position in the head order at the start of each granule.
        first_step: first step of each position, then the number of steps.
        shift: offset from a step to the index of its word.
        head: head at each position.
        plan: plan of each position.
        padding_start: first padding key of each position's head.
        padding_stop: first key after it.
    """

    lookup: Int[Array, " granules"]
    first_step: Int[Array, " heads_plus_1"]
    shift: Int[Array, " heads"]
    head: Int[Array, " heads"]
    plan: Int[Array, " heads"]
    padding_start: Int[Array, " heads"]
    padding_stop: Int[Array, " heads"]

    @property
    def num_steps(self) -> Int[Array, ""]:
        return self.first_step[-1]


def order_heads(
    plans: Int[Array, " heads"],
    active: Bool[Array, " heads"],
    padding: tuple[Int[Array, " heads"], Int[Array, " heads"]] | None = None,
) -> HeadOrder:
    """Moves the active heads to the front; the order is stable.

    Args:
        plans: plan of each head.
        active: which heads run.
        padding: first padding key of each head and the first key after its padding; None if no
            head has padding.
    """
    heads = jnp.argsort(~active, stable=True).astype(jnp.int32)
    start, stop = (jnp.zeros_like(heads),) * 2 if padding is None else padding
    return HeadOrder(heads, plans[heads], active.sum(dtype=jnp.int32), start[heads], stop[heads])


def step_table(order: HeadOrder, tables: StepTables, index: int | Int[Array, ""]) -> StepTable:
    """The steps of one range of query tiles.

    Args:
        order: the heads to run; their plans count in `tables`.
        tables: words of all plans.
        index: index of the range.
    """
    heads = order.heads.size
    bits = tables.granule_bits()
    running = jnp.arange(heads) < order.num_active
    steps = jnp.where(running, jnp.asarray(tables.lengths)[index][order.plans], 0)
    first_step = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(steps, dtype=jnp.int32)])
    granule_starts = np.arange(tables.granules(heads), dtype=np.int32) << bits
    lookup = jnp.searchsorted(first_step, granule_starts, side="right") - 1
    shift = jnp.asarray(tables.starts)[index][order.plans] - first_step[:-1]
    return StepTable(
        jnp.clip(lookup, 0, heads - 1).astype(jnp.int32),
        first_step,
        shift,
        order.heads,
        order.plans,
        order.padding_start,
        order.padding_stop,
    )
