"""Attention over the tiles of a plan with an online softmax, for one head, in plain JAX."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from cinetile.kernels import xla_cpu
from cinetile.kernels.padding import key_exists
from cinetile.kernels.visits import key_visits
from cinetile.kernels.xla_backward import tile_attention_gradients
from cinetile.masks.mask import keeps
from cinetile.plans import TilePlan

# Finite, so that no row ever computes inf - inf; far enough apart that the weight of a masked
# pair is exactly 0 even before a row has met its first kept one.
_MASKED_SCORE = -2e38
_FIRST_MAXIMUM = -1e37


class _Softmax(NamedTuple):
    """State of the online softmax of one query tile.

    Attributes:
        maximum: largest unscaled score so far.
        total: sum of the weights so far, relative to `maximum`.
        accumulator: weighted sum of the values so far.
    """

    maximum: Float[Array, " block_q"]
    total: Float[Array, " block_q"]
    accumulator: Float[Array, "block_q head_dim"]


def tile_attention(
    query: Float[Array, "tokens head_dim"],
    key: Float[Array, "tokens head_dim"],
    value: Float[Array, "tokens head_dim"],
    prompt_length: Int[Array, ""] | None,
    plan: TilePlan,
    scale: float,
) -> tuple[Float[Array, "tokens head_dim"], Float[Array, " tokens"]]:
    """Attention of one head with tokens in the orders of the plan's mask.

    Every query tile runs three loops: over pairs of neighbouring full tiles, which share one
    update of the softmax, over single full tiles, and over masked ones. Only the last holds mask
    arithmetic. Heads are not batched into one product: XLA's CPU backend spreads a product
    over cores only by the size of its matrices, so tiles should be large instead.

    Args:
        query: queries.
        key: keys.
        value: values.
        prompt_length: text tokens that are not padding; None without padding.
        plan: the tiles to visit.
        scale: factor on the logits, above 0.

    Returns:
        The output in the dtype of `query` and the natural log-sum-exp in float32.
    """
    return _differentiable(query, key, value, prompt_length, plan, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _differentiable(query, key, value, prompt_length, plan, scale) -> Any:
    attend = functools.partial(_tile_attention, plan=plan, scale=scale)
    on_cpu, elsewhere = (functools.partial(attend, on_cpu=on_cpu) for on_cpu in (True, False))
    return jax.lax.platform_dependent(
        query, key, value, prompt_length, cpu=on_cpu, default=elsewhere
    )


def _tile_attention(
    query: Float[Array, "tokens head_dim"],
    key: Float[Array, "tokens head_dim"],
    value: Float[Array, "tokens head_dim"],
    prompt_length: Int[Array, ""] | None,
    *,
    plan: TilePlan,
    scale: float,
    on_cpu: bool,
) -> tuple[Float[Array, "tokens head_dim"], Float[Array, " tokens"]]:
    """Attends with one head, query tile by query tile, with an online softmax.

    Long because the loop bodies share the tiles, edges and conversions that stand before them.
    """
    num_tokens, head_dim = query.shape
    dtype = query.dtype
    # A tile beyond the sequence would only be padding.
    block_q, block_kv = min(plan.block_q, num_tokens), min(plan.block_kv, num_tokens)
    to_log2 = scale * math.log2(math.e)
    exp2 = xla_cpu.exp2 if on_cpu else jnp.exp2

    def tiled(array: Array, block: int) -> Shaped[Array, "tiles block head_dim"]:
        padded = jnp.pad(array, ((0, -num_tokens % block), (0, 0)))
        return xla_cpu.pack(padded.reshape(-1, block, head_dim))

    def narrow(weights: Array) -> Array:
        if on_cpu and dtype == jnp.bfloat16:
            return xla_cpu.round_to_bfloat16_bits(weights)
        return weights.astype(dtype)

    query_tiles = tiled(query, block_q)
    key_tiles, value_tiles = tiled(key, block_kv), tiled(value, block_kv)
    edges = np.pad(np.stack(plan.row_edges(), axis=1), ((0, -num_tokens % block_q), (0, 0)))
    edge_tiles = jnp.asarray(edges.reshape(-1, block_q, 3))
    visits = key_visits(plan, pairs=True, mask_prompt=prompt_length is not None)
    tile_kv = jnp.asarray(visits.inner)

    def one_query_tile(arguments: tuple[Array, ...]) -> tuple[Array, Array]:
        query_tile, edges, pair_start, single_start, masked_start, stop = arguments
        query_tile = xla_cpu.unpack(query_tile)

        def keys_or_values(tiles: Array, tile: Array, count: int) -> Array:
            together = jax.lax.dynamic_slice_in_dim(tiles, tile, count)
            return xla_cpu.unpack(together.reshape(count * block_kv, head_dim))

        def step(position: Array, state: _Softmax, *, count: int, use_mask: bool) -> _Softmax:
            tile = tile_kv[position]
            scores = _dot(query_tile, keys_or_values(key_tiles, tile, count).T)
            if use_mask:
                prefix, low, high = (edges[:, column, None] for column in range(3))
                keys = tile * block_kv + jnp.arange(block_kv)
                kept = keeps(keys, prefix, low, high)
                if prompt_length is not None:
                    kept &= key_exists(plan, keys, prompt_length)
                scores = jnp.where(kept, scores, _MASKED_SCORE)
            maximum = jnp.maximum(state.maximum, scores.max(axis=1))
            # Scaling here is free, and unlike scaling a bfloat16 query it rounds nothing.
            weights = narrow(exp2((scores - maximum[:, None]) * to_log2))
            # Without the barrier XLA computes the exponential once for each of its two uses.
            weights = xla_cpu.unpack(jax.lax.optimization_barrier(weights))
            shrink = exp2((state.maximum - maximum) * to_log2)
            product = _dot(weights, keys_or_values(value_tiles, tile, count))
            return _Softmax(
                maximum,
                state.total * shrink + weights.sum(axis=1, dtype=jnp.float32),
                state.accumulator * shrink[:, None] + product,
            )

        state = _Softmax(
            jnp.full(block_q, _FIRST_MAXIMUM, jnp.float32),
            jnp.zeros(block_q, jnp.float32),
            jnp.zeros((block_q, head_dim), jnp.float32),
        )
        pair, single, masked = (
            functools.partial(step, count=count, use_mask=use_mask)
            for count, use_mask in ((2, False), (1, False), (1, True))
        )
        if plan.geometry.num_kv_tiles > 1:
            state = jax.lax.fori_loop(pair_start, single_start, pair, state)
        state = jax.lax.fori_loop(single_start, masked_start, single, state)
        state = jax.lax.fori_loop(masked_start, stop, masked, state)
        lse = state.maximum * scale + jnp.log(state.total)
        total = state.total
        if prompt_length is not None:  # else every row keeps a key
            total = jnp.where(total > 0.0, total, 1.0)
        return state.accumulator / total[:, None], lse

    bounds = (visits.pair_start, visits.single_start, visits.masked_start, visits.stop)
    output, lse = jax.lax.map(one_query_tile, (query_tiles, edge_tiles, *map(jnp.asarray, bounds)))
    # Cast after the loop, whose bfloat16 outputs XLA's CPU backend would widen at every step.
    output = output.reshape(-1, head_dim)[:num_tokens].astype(dtype)
    return output, lse.reshape(-1)[:num_tokens]


def _dot(left: Float[Array, "m k"], right: Float[Array, "k n"]) -> Float[Array, "m n"]:
    # Full float32 products on accelerators too; on CPUs there are no others.
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jnp.matmul(left, right, precision=precision, preferred_element_type=jnp.float32)


def _forward(query, key, value, prompt_length, plan, scale):
    output, lse = tile_attention(query, key, value, prompt_length, plan, scale)
    return (output, lse), (query, key, value, output, lse, prompt_length)


def _backward(plan, scale, saved, gradients):
    *arrays, prompt_length = saved
    arrays_gradients = tile_attention_gradients(
        *arrays, *gradients, prompt_length=prompt_length, plan=plan, scale=scale
    )
    return *arrays_gradients, None


_differentiable.defvjp(_forward, _backward)
