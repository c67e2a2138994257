"""Online softmax over the tiles of a plan, for one head, in plain JAX."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from cinetile.plans import TileKind, TilePlan

_MASKED_LOGIT = float(np.finfo(np.float32).min)


def tile_attention(
    query: Float[Array, "tokens head_dim"],
    key: Float[Array, "tokens head_dim"],
    value: Float[Array, "tokens head_dim"],
    plan: TilePlan,
    *,
    scale: float,
) -> tuple[Float[Array, "tokens head_dim"], Float[Array, " tokens"]]:
    """Attention of one head, its tokens in the orders of the plan's mask."""
    num_tokens, head_dim = query.shape
    geometry = plan.geometry
    base_2_scale = scale * math.log2(math.e)

    def tiled(array: Array, block: int) -> Array:
        padding = -num_tokens % block
        return jnp.pad(array, ((0, padding), (0, 0))).reshape(-1, block, array.shape[1])

    query_tiles = tiled(query.astype(jnp.float32) * base_2_scale, plan.block_q)
    key_tiles = tiled(key.astype(jnp.float32), plan.block_kv)
    value_tiles = tiled(value.astype(jnp.float32), plan.block_kv)
    edges = np.pad(np.stack(plan.row_edges()), ((0, 0), (0, -num_tokens % plan.block_q)))
    edge_tiles = jnp.asarray(edges.reshape(3, geometry.num_q_tiles, plan.block_q)).swapaxes(0, 1)
    masked = plan.tile_kind != TileKind.FULL
    by_need = np.lexsort((plan.tile_kv, masked, plan.tile_q))
    tile_kv = jnp.asarray(plan.tile_kv[by_need])
    masked_counts = np.add.reduceat(masked.astype(np.int32), plan.row_starts[:-1])
    starts = jnp.asarray(plan.row_starts[:-1])
    full_stops = jnp.asarray(plan.row_starts[1:] - masked_counts)
    stops = jnp.asarray(plan.row_starts[1:])

    def one_query_tile(arguments):
        query_tile, edges, start, full_stop, stop = arguments
        prefix, low, high = edges[..., None]

        def step(position, carry, use_mask):
            maximum, total, accumulator = carry
            tile = tile_kv[position]
            logits = jnp.dot(query_tile, key_tiles[tile].T)
            if use_mask:
                keys = tile * plan.block_kv + jnp.arange(plan.block_kv)
                kept = (keys < prefix) | ((low <= keys) & (keys < high))
                logits = jnp.where(kept, logits, _MASKED_LOGIT)
            new_maximum = jnp.maximum(maximum, logits.max(axis=1))
            weights = jnp.exp2(logits - new_maximum[:, None])
            if use_mask:
                weights = jnp.where(kept, weights, 0.0)
            shrink = jnp.exp2(maximum - new_maximum)
            total = total * shrink + weights.sum(axis=1)
            accumulator = accumulator * shrink[:, None] + jnp.dot(weights, value_tiles[tile])
            return new_maximum, total, accumulator

        carry = (
            jnp.full(plan.block_q, _MASKED_LOGIT),
            jnp.zeros(plan.block_q),
            jnp.zeros((plan.block_q, head_dim)),
        )
        carry = jax.lax.fori_loop(start, full_stop, lambda i, c: step(i, c, False), carry)
        carry = jax.lax.fori_loop(full_stop, stop, lambda i, c: step(i, c, True), carry)
        maximum, total, accumulator = carry
        lse = (maximum + jnp.log2(total)) * math.log(2)
        return (accumulator / total[:, None]).astype(query.dtype), lse

    output, lse = jax.lax.map(one_query_tile, (query_tiles, edge_tiles, starts, full_stops, stops))
    return output.reshape(-1, head_dim)[:num_tokens], lse.reshape(-1)[:num_tokens]
