"""Gradients of attention over the tiles of a plan, for one head, in plain JAX."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cinetile.kernels.padding import key_exists
from cinetile.kernels.visits import Visits, key_visits, query_visits
from cinetile.masks.mask import keeps
from cinetile.plans import TilePlan


def tile_attention_gradients(
    query: Float[Array, "tokens head_dim"],
    key: Float[Array, "tokens head_dim"],
    value: Float[Array, "tokens head_dim"],
    output: Float[Array, "tokens head_dim"],
    lse: Float[Array, " tokens"],
    output_gradient: Float[Array, "tokens head_dim"],
    lse_gradient: Float[Array, " tokens"],
    *,
    prompt_length: Int[Array, ""] | None,
    plan: TilePlan,
    scale: float,
) -> tuple[
    Float[Array, "tokens head_dim"],
    Float[Array, "tokens head_dim"],
    Float[Array, "tokens head_dim"],
]:
    """Gradients of one head's query, key and value; tokens in the orders of the plan's mask.

    Attention weights are recomputed tile by tile from the log-sum-exp, as in FlashAttention
    (arXiv:2205.14135, appendix B.2): once along the query tiles for the query's gradient and
    once along the key tiles for those of key and value. Memory is O(tokens).

    Long because the bodies of both loops share the tiles and edges that stand before them.
    """
    num_tokens = query.shape[0]
    block_q, block_kv = min(plan.block_q, num_tokens), min(plan.block_kv, num_tokens)

    def tiled(array: Array, block: int) -> Array:
        padding = [(0, -num_tokens % block), *[(0, 0)] * (array.ndim - 1)]
        padded = jnp.pad(array.astype(jnp.float32), padding)
        return padded.reshape(-1, block, *array.shape[1:])

    # Subtracting the log-sum-exp's gradient here adds its share to that of every logit.
    drift = jnp.sum(output_gradient.astype(jnp.float32) * output, axis=1) - lse_gradient
    edges = np.pad(np.stack(plan.row_edges(), axis=1), ((0, -num_tokens % block_q), (0, 0)))
    query_tiles = (
        tiled(query, block_q),
        tiled(output_gradient, block_q),
        tiled(lse, block_q),
        tiled(drift, block_q),
        jnp.asarray(edges.reshape(-1, block_q, 3)),
    )
    key_tiles = (
        tiled(key, block_kv),
        tiled(value, block_kv),
        jnp.arange(plan.geometry.num_kv_tiles) * block_kv,
    )
    mask_prompt = prompt_length is not None
    dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

    def weights_and_logit_gradient(
        query_tile: tuple[Array, ...], key_tile: tuple[Array, ...], *, use_mask: bool
    ) -> tuple[Array, Array]:
        query, output_gradient, lse, drift, edges = query_tile
        key, value, first_key = key_tile
        weights = jnp.exp2((scale * dot(query, key.T) - lse[:, None]) * math.log2(math.e))
        if use_mask:
            prefix, low, high = (edges[:, column, None] for column in range(3))
            keys = first_key + jnp.arange(block_kv)
            kept = keeps(keys, prefix, low, high)
            if prompt_length is not None:
                kept &= key_exists(plan, keys, prompt_length)
            weights = jnp.where(kept, weights, 0.0)
        return weights, weights * (dot(output_gradient, value.T) - drift[:, None])

    def query_step(
        gradient: Array, query_tile: tuple[Array, ...], key_tile: tuple[Array, ...], use_mask: bool
    ) -> Array:
        _, logit_gradient = weights_and_logit_gradient(query_tile, key_tile, use_mask=use_mask)
        return gradient + dot(logit_gradient, key_tile[0])

    def key_step(
        gradients: tuple[Array, Array],
        key_tile: tuple[Array, ...],
        query_tile: tuple[Array, ...],
        use_mask: bool,
    ) -> tuple[Array, Array]:
        weights, logit_gradient = weights_and_logit_gradient(
            query_tile, key_tile, use_mask=use_mask
        )
        key_gradient, value_gradient = gradients
        return (
            key_gradient + dot(logit_gradient.T, query_tile[0]),
            value_gradient + dot(weights.T, query_tile[1]),
        )

    query_gradient = _accumulate(
        query_step,
        jnp.zeros_like(query_tiles[0][0]),
        query_tiles,
        key_tiles,
        key_visits(plan, pairs=False, mask_prompt=mask_prompt),
    )
    key_gradient, value_gradient = _accumulate(
        key_step,
        (jnp.zeros_like(key_tiles[0][0]),) * 2,
        key_tiles,
        query_tiles,
        query_visits(plan, mask_prompt=mask_prompt),
    )

    def flat(tiles: Array) -> Array:
        return tiles.reshape(-1, tiles.shape[-1])[:num_tokens].astype(query.dtype)

    return flat(scale * query_gradient), flat(scale * key_gradient), flat(value_gradient)


def _accumulate(step, zero, outer_tiles, inner_tiles, visits: Visits):
    """Runs `step(sums, outer tile, inner tile, use_mask)` over all visits of each outer tile."""
    inner = jnp.asarray(visits.inner)

    def one_outer_tile(arguments):
        outer_tile, start, masked_start, stop = arguments

        def visit(position, sums, use_mask):
            inner_tile = jax.tree.map(lambda array: array[inner[position]], inner_tiles)
            return step(sums, outer_tile, inner_tile, use_mask)

        sums = jax.lax.fori_loop(
            start, masked_start, functools.partial(visit, use_mask=False), zero
        )
        return jax.lax.fori_loop(masked_start, stop, functools.partial(visit, use_mask=True), sums)

    bounds = (
        jnp.asarray(bound) for bound in (visits.single_start, visits.masked_start, visits.stop)
    )
    return jax.lax.map(one_outer_tile, (outer_tiles, *bounds))
