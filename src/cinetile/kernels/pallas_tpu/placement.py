"""Moving the tokens of each head to the order that its plan's mask prefers, and back."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from cinetile.grid import TokenGrid, TokenOrder


def move_heads(
    move: Callable[..., Array],
    array: Shaped[Array, "heads tokens ..."],
    routes: Int[Array, " heads"],
    orders: Sequence[TokenOrder],
    grid: TokenGrid,
) -> Shaped[Array, "heads tokens ..."]:
    """Moves each head's tokens; heads whose order is the user's are copied at most.

    Args:
        move: `place` or `restore`.
        array: tokens of all heads.
        routes: index into `orders` of each head; may be traced.
        orders: the order of each route.
        grid: the tokens.
    """
    distinct = list(dict.fromkeys(orders))
    if len(distinct) == 1:
        return move(array, distinct[0], grid, axis=1)

    def move_to(order: TokenOrder) -> Callable[[Array], Array]:
        return lambda head: move(head, order, grid, axis=0)

    branches = [move_to(order) for order in distinct]
    branch_of = np.array([distinct.index(order) for order in orders], np.int32)
    # One head after the other, so that each head runs its own branch alone.
    return jax.lax.map(
        lambda one: jax.lax.switch(one[0], branches, one[1]),
        (jnp.asarray(branch_of)[routes], array),
    )
