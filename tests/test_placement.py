"""Placement and its inverse against a gather."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from hypothesis import given, settings

import cinetile as ct
from cinetile.placement import place, restore

ORDERS = [
    pytest.param(ct.TokenOrder(), id="frame-major"),
    pytest.param(ct.TokenOrder("token_major"), id="token-major"),
    pytest.param(ct.TokenOrder("token_major", leading_frames=1), id="first frame leads"),
    pytest.param(ct.TokenOrder("token_major", leading_frames=3), id="all frames lead"),
    pytest.param(ct.TokenOrder("token_major", text_first=True), id="text first"),
    pytest.param(ct.TokenOrder(text_first=True, padded_text=2), id="padding last"),
    pytest.param(ct.TokenOrder("token_major", padded_text=4), id="all text is padding"),
]
GRIDS = [
    pytest.param(ct.TokenGrid(3, 2, 2, text_tokens=4), id="text last"),
    pytest.param(ct.TokenGrid(3, 2, 2, text_tokens=4, text_first=True), id="text first"),
]


@settings(max_examples=40)  # each new shape is compiled
@given(strategies.grids_with_orders())
def test_place_gathers_and_restore_inverts(case: tuple[ct.TokenGrid, ct.TokenOrder]) -> None:
    grid, order = case

    @jax.jit
    def both(array: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        placed = place(array, order, grid, axis=0)
        there_again = place(restore(array, order, grid, axis=0), order, grid, axis=0)
        return placed, restore(placed, order, grid, axis=0), there_again

    array = jnp.arange(grid.num_tokens)
    placed, restored, placed_again = both(array)
    np.testing.assert_array_equal(placed, order.indices(grid))
    np.testing.assert_array_equal(restored, array)
    np.testing.assert_array_equal(placed_again, array)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("order", ORDERS)
def test_any_axis(order: ct.TokenOrder, grid: ct.TokenGrid, axis: int) -> None:
    shape = [2, 3, 5]
    shape[axis] = grid.num_tokens
    array = np.arange(np.prod(shape)).reshape(shape)
    placed = place(jnp.asarray(array), order, grid, axis=axis)
    np.testing.assert_array_equal(placed, np.take(array, order.indices(grid), axis=axis))
    np.testing.assert_array_equal(restore(placed, order, grid, axis=axis), array)


@pytest.mark.parametrize("move", [place, restore])
def test_nothing_is_copied_when_no_token_moves(move) -> None:
    grid = ct.TokenGrid(3, 2, 2)
    array = jnp.arange(grid.num_tokens)
    assert move(array, ct.TokenOrder(), grid, axis=0) is array


@pytest.mark.parametrize("move", [place, restore])
@pytest.mark.parametrize("order", ORDERS)
def test_no_gather(move, order: ct.TokenOrder) -> None:
    """Index arithmetic costs more than the attention that it serves."""
    grid = ct.TokenGrid(3, 2, 2, text_tokens=4)
    moved = functools.partial(move, order=order, grid=grid, axis=0)
    assert "gather" not in str(jax.make_jaxpr(moved)(jnp.zeros((grid.num_tokens, 2))))
