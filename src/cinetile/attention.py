"""`attention`: the public call that runs every implementation."""

import functools
from collections.abc import Sequence
from typing import Literal, overload

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cinetile.kernels.arguments import AnyArray, check_arrays, check_prompt_length, check_scale
from cinetile.kernels.base import AttentionRequest, Implementation, ImplementationChoice
from cinetile.kernels.padding import text_exists
from cinetile.kernels.registry import select_implementation
from cinetile.plans import TilePlan


@overload
def attention(
    query: Float[AnyArray, "batch tokens heads head_dim"],
    key: Float[AnyArray, "batch tokens heads head_dim"],
    value: Float[AnyArray, "batch tokens heads head_dim"],
    plan: TilePlan | Sequence[TilePlan],
    *,
    routes: Int[AnyArray, "batch heads"] | None = ...,
    scale: float | None = ...,
    implementation: ImplementationChoice = ...,
    prompt_length: int | Int[AnyArray, "*batch"] | None = ...,
    return_lse: Literal[False] = ...,
) -> Float[Array, "batch tokens heads head_dim"]: ...
@overload
def attention(
    query: Float[AnyArray, "batch tokens heads head_dim"],
    key: Float[AnyArray, "batch tokens heads head_dim"],
    value: Float[AnyArray, "batch tokens heads head_dim"],
    plan: TilePlan | Sequence[TilePlan],
    *,
    routes: Int[AnyArray, "batch heads"] | None = ...,
    scale: float | None = ...,
    implementation: ImplementationChoice = ...,
    prompt_length: int | Int[AnyArray, "*batch"] | None = ...,
    return_lse: Literal[True],
) -> tuple[Float[Array, "batch tokens heads head_dim"], Float[Array, "batch tokens heads"]]: ...
def attention(
    query: Float[AnyArray, "batch tokens heads head_dim"],
    key: Float[AnyArray, "batch tokens heads head_dim"],
    value: Float[AnyArray, "batch tokens heads head_dim"],
    plan: TilePlan | Sequence[TilePlan],
    *,
    routes: Int[AnyArray, "batch heads"] | None = None,
    scale: float | None = None,
    implementation: ImplementationChoice = None,
    prompt_length: int | Int[AnyArray, "*batch"] | None = None,
    return_lse: bool = False,
) -> (
    Float[Array, "batch tokens heads head_dim"]
    | tuple[Float[Array, "batch tokens heads head_dim"], Float[Array, "batch tokens heads"]]
):
    """Scaled dot-product self-attention over the tiles of a plan.

    Arrays have the layout of `jax.nn.dot_product_attention`. Inputs and outputs are in frame-major
    order; the implementation moves tokens to the orders of the mask.

    Args:
        query: queries, float32, bfloat16 or float16.
        key: keys, of the same shape and dtype.
        value: values, of the same shape and dtype.
        plan: the tiles to visit: one plan, or several on one token grid; `routes` picks a plan
            for each head.
        routes: index into the plans for each head of each batch row. May be traced; indices
            out of range are then clipped.
        scale: factor on the logits, from 1e-30 to 1e30; `1 / sqrt(head_dim)` by default.
        implementation: None for the best that can run here, a name, an `Implementation`, or a
            sequence of these of which the first that can run is taken. See `implementations`.
        prompt_length: number of text tokens that are not padding, one number or one for each batch
            row; all by default. No query attends to padding; output rows of padding are finite but
            unspecified. May be traced; it is then clipped to the grid's text tokens.
        return_lse: whether to return the log-sum-exp as well.

    Returns:
        The output in the dtype of `query`; with `return_lse` also the natural log-sum-exp of
        each query's scaled and kept logits, float32.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes do not fit each other or the plan's grid, or a value is out of range.
        NotImplementedError: no allowed implementation can run this call.
    """
    plans = _check_plans(plan)
    check_arrays(query, key, value, plans[0].grid)
    batch, _, heads, head_dim = query.shape
    routes = _check_routes(routes, batch, heads, len(plans))
    scale = check_scale(scale, head_dim)
    prompt_lengths = check_prompt_length(prompt_length, batch, [plan.mask for plan in plans])
    request = AttentionRequest(
        batch,
        heads,
        head_dim,
        str(query.dtype),
        plans,
        has_prompt_lengths=prompt_lengths is not None,
    )
    chosen = select_implementation(implementation, request)
    query, key, value = (jnp.asarray(array) for array in (query, key, value))
    output, lse = attend_checked(chosen, query, key, value, routes, prompt_lengths, plans, scale)
    return (output, lse) if return_lse else output


@functools.partial(jax.jit, static_argnums=(0, 6, 7))
def attend_checked(
    chosen: Implementation,
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch tokens heads head_dim"],
    value: Float[Array, "batch tokens heads head_dim"],
    routes: Int[Array, "batch heads"] | None,
    prompt_lengths: Int[Array, " batch"] | None,
    plans: tuple[TilePlan, ...],
    scale: float,
) -> tuple[Float[Array, "batch tokens heads head_dim"], Float[Array, "batch tokens heads"]]:
    """Attends with arguments that the public edge has checked; see `Implementation.attend`.

    Args:
        chosen: an implementation that takes this call.
        query: queries in frame-major order.
        key: keys in frame-major order.
        value: values in frame-major order.
        routes: index into `plans` per batch row and head; None with a single plan.
        prompt_lengths: prompt length per batch row; None without padding.
        plans: plans on one grid.
        scale: factor on the logits.

    Returns:
        The output and the log-sum-exp of each row.
    """
    if prompt_lengths is not None:
        # Padding has no weight, but that alone would not silence a NaN.
        exists = text_exists(plans[0].grid, prompt_lengths)
        value = jnp.where(exists[:, :, None, None], value, jnp.zeros((), value.dtype))
    return chosen.attend(
        query, key, value, routes, plans=plans, scale=scale, prompt_lengths=prompt_lengths
    )


def _check_plans(plan: TilePlan | Sequence[TilePlan]) -> tuple[TilePlan, ...]:
    plans = tuple(plan) if isinstance(plan, Sequence) else (plan,)
    if not plans:
        raise ValueError("plan must be a tile plan or a non-empty sequence of them, got none")
    for entry in plans:
        if not isinstance(entry, TilePlan):
            raise TypeError(f"plan must hold tile plans, got {type(entry).__name__}")
        if entry.grid != plans[0].grid:
            raise ValueError(f"plan must hold plans on one grid, got {plans[0].grid}, {entry.grid}")
    return plans


def _check_routes(
    routes: Int[AnyArray, "batch heads"] | None, batch: int, heads: int, num_plans: int
) -> Int[Array, "batch heads"] | None:
    if routes is None:
        if num_plans > 1:
            raise ValueError(f"routes must say which of the {num_plans} plans each head takes")
        return None
    if not hasattr(routes, "dtype"):
        routes = np.asarray(routes)
    if not jnp.issubdtype(routes.dtype, jnp.integer):
        raise TypeError(f"routes must be integers, got {routes.dtype}")
    if routes.shape != (batch, heads):
        raise ValueError(f"routes must have the shape {(batch, heads)}, got {routes.shape}")
    if not isinstance(routes, jax.core.Tracer):
        known = np.asarray(routes)  # its own methods would trace it inside jit
        lowest, highest = int(known.min()), int(known.max())
        if lowest < 0 or highest >= num_plans:
            raise ValueError(
                f"routes must lie in [0, {num_plans}) for {num_plans} plans, "
                f"got values from {lowest} to {highest}"
            )
    return jnp.clip(jnp.asarray(routes), 0, num_plans - 1).astype(jnp.int32)
