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
    """Moves each head's tokens to the order of its route.

    Args:
        move: `place` or `restore`.
        array: tokens of each head.
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
    # A loop over heads, so that each head runs only its own branch.
    return jax.lax.map(
        lambda head: jax.lax.switch(head[0], branches, head[1]),
        (jnp.asarray(branch_of)[routes], array),
    )
