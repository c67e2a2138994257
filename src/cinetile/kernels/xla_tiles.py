"""Attention over the tiles of a plan with an online softmax, for one head, in plain JAX."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from cinetile.kernels.visits import key_visits
from cinetile.kernels.xla_backward import tile_attention_gradients
from cinetile.plans import TilePlan

# Finite, so that no row ever computes inf - inf; far enough apart that the weight of a masked
# pair is exactly 0 even before a row has met its first kept one.
_MASKED_SCORE = -2e38
_FIRST_MAXIMUM = -1e37


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def tile_attention(
    query: Float[Array, "tokens head_dim"],
    key: Float[Array, "tokens head_dim"],
    value: Float[Array, "tokens head_dim"],
    plan: TilePlan,
    scale: float,
    widen: bool,
) -> tuple[Float[Array, "tokens head_dim"], Float[Array, " tokens"]]:
    """Attention of one head, its tokens in the orders of the plan's mask.

    Every query tile runs two loops, over its full and over its masked tiles; the first holds no
    mask arithmetic. Heads are not batched into one product: XLA's CPU backend spreads a product
    over cores by the size of its matrices alone, so tiles should be large instead.

    Args:
        query: queries.
        key: keys.
        value: values.
        plan: the tiles to visit.
        scale: factor on the logits, positive.
        widen: whether tiles are widened to float32 before the products; for CPUs that only
            emulate bfloat16 products.

    Returns:
        The output in the dtype of `query` and the natural log-sum-exp in float32.
    """
    num_tokens, head_dim = query.shape
    to_log2 = scale * math.log2(math.e)
    tile_dtype = jnp.dtype(jnp.float32) if widen else query.dtype

    def tiled(array: Array, block: int) -> Array:
        padded = jnp.pad(array, ((0, -num_tokens % block), (0, 0)))
        return padded.reshape(-1, block, head_dim).astype(tile_dtype)

    query_tiles = tiled(query, plan.block_q)
    key_tiles, value_tiles = tiled(key, plan.block_kv), tiled(value, plan.block_kv)
    edges = np.pad(np.stack(plan.row_edges(), axis=1), ((0, -num_tokens % plan.block_q), (0, 0)))
    edge_tiles = jnp.asarray(edges.reshape(-1, plan.block_q, 3))
    visits = key_visits(plan)
    tile_kv = jnp.asarray(visits.inner)

    def one_query_tile(arguments: tuple[Array, ...]) -> tuple[Array, Array]:
        query_tile, edges, start, masked_start, stop = arguments

        def step(
            position: Array, carry: tuple[Array, Array, Array], *, use_mask: bool
        ) -> tuple[Array, Array, Array]:
            maximum, total, accumulator = carry
            tile = tile_kv[position]
            scores = _dot(query_tile, key_tiles[tile].T)
            if use_mask:
                prefix, low, high = (edges[:, column, None] for column in range(3))
                keys = tile * plan.block_kv + jnp.arange(plan.block_kv)
                kept = (keys < prefix) | ((low <= keys) & (keys < high))
                scores = jnp.where(kept, scores, _MASKED_SCORE)
            new_maximum = jnp.maximum(maximum, scores.max(axis=1))
            # Scaling here is free, and unlike scaling a bfloat16 query it rounds nothing.
            weights = jnp.exp2((scores - new_maximum[:, None]) * to_log2)
            # Without the barrier XLA computes the exponential once for each of its two uses.
            weights = jax.lax.optimization_barrier(weights)
            shrink = jnp.exp2((maximum - new_maximum) * to_log2)
            total = total * shrink + weights.sum(axis=1)
            product = _dot(weights.astype(tile_dtype), value_tiles[tile])
            return new_maximum, total, accumulator * shrink[:, None] + product

        carry = (
            jnp.full(plan.block_q, _FIRST_MAXIMUM),
            jnp.zeros(plan.block_q),
            jnp.zeros((plan.block_q, head_dim)),
        )
        full, masked = (functools.partial(step, use_mask=use_mask) for use_mask in (False, True))
        carry = jax.lax.fori_loop(start, masked_start, full, carry)
        maximum, total, accumulator = jax.lax.fori_loop(masked_start, stop, masked, carry)
        output = (accumulator / total[:, None]).astype(query.dtype)
        return output, maximum * scale + jnp.log(total)

    bounds = (jnp.asarray(bound) for bound in (visits.start, visits.masked_start, visits.stop))
    output, lse = jax.lax.map(one_query_tile, (query_tiles, edge_tiles, *bounds))
    return output.reshape(-1, head_dim)[:num_tokens], lse.reshape(-1)[:num_tokens]


def _dot(left: Array, right: Array) -> Array:
    # Full float32 products on accelerators too; on CPUs there are no others.
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jnp.matmul(left, right, precision=precision, preferred_element_type=jnp.float32)


def _forward(query, key, value, plan, scale, widen):
    output, lse = tile_attention(query, key, value, plan, scale, widen)
    return (output, lse), (query, key, value, output, lse)


def _backward(plan, scale, widen, saved, gradients):
    del widen  # the backward pass always computes in float32
    return tile_attention_gradients(*saved, *gradients, plan=plan, scale=scale)


tile_attention.defvjp(_forward, _backward)
