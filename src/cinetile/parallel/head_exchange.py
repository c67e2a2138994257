"""Ulysses: tokens are sharded outside of attention, heads inside, by all-to-all."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from cinetile.parallel.layout import ArrayLayout


def exchange_heads(
    work: Callable[..., tuple[Any, Any]],
    layout: ArrayLayout,
    num_tokens: int,
    query: Float[Array, "rows shard heads head_dim"],
    key: Float[Array, "rows shard heads head_dim"],
    value: Float[Array, "rows shard heads head_dim"],
    prompt_lengths: Int[Array, " rows"] | None,
    *common: Any,
) -> tuple[Any, Any]:
    """Exchanges token shards for head shards, runs `work`, and exchanges the output back.

    Call it inside `jax.shard_map` with a device's shards. The devices divide the pairs (batch
    row, head) among themselves; DeepSpeed-Ulysses (arXiv:2309.14509) divides the heads of each
    row. 12 heads of a guidance pair are 24 pairs, 3 per device on 8 devices, while 12 heads of
    each row would need padding to 16.

    Args:
        work: `work(query, key, value, prompt_lengths, *common)` with arrays
            `[share, num_tokens, 1, head_dim]` returns an output shaped as the query, or None,
            and a pytree of arrays with the leading axes `[share, 1]`.
        layout: mesh axes of batch rows, tokens and heads.
        num_tokens: tokens of the sequence; the last shards may hold padding past it.
        query: this device's token shard.
        key: this device's token shard.
        value: this device's token shard.
        prompt_lengths: of each of its batch rows, or None.
        *common: passed to `work`.

    Returns:
        This device's token shard of the output, and the pytree of `work` gathered to the leading
        axes `[rows, heads]`.
    """
    if not layout.tokens:
        return work(query, key, value, prompt_lengths, *common)
    rows, shard, heads, head_dim = query.shape
    devices, pairs = layout.size(layout.tokens), rows * heads
    share = -(-pairs // devices)

    def pad_pairs(array: Shaped[Array, "pairs ..."]) -> Shaped[Array, "padded ..."]:
        return jnp.pad(array, [(0, share * devices - pairs)] + [(0, 0)] * (array.ndim - 1))

    @jax.named_scope("cinetile_exchange")
    def to_pairs(array: Float[Array, "rows shard heads d"]) -> Float[Array, "share tokens 1 d"]:
        by_pair = pad_pairs(array.swapaxes(1, 2).reshape(pairs, shard, head_dim))
        whole = jax.lax.all_to_all(by_pair, layout.tokens, 0, 1, tiled=True)
        return whole[:, :num_tokens, None]

    @jax.named_scope("cinetile_exchange")
    def to_tokens(array: Float[Array, "share tokens 1 d"]) -> Float[Array, "rows shard heads d"]:
        padded = jnp.pad(array[:, :, 0], ((0, 0), (0, shard * devices - num_tokens), (0, 0)))
        by_pair = jax.lax.all_to_all(padded, layout.tokens, 1, 0, tiled=True)[:pairs]
        return by_pair.reshape(rows, heads, shard, head_dim).swapaxes(1, 2)

    def gather(array: Shaped[Array, "share 1 ..."]) -> Shaped[Array, "rows heads ..."]:
        everyone = jax.lax.all_gather(array[:, 0], layout.tokens, tiled=True)[:pairs]
        return everyone.reshape(rows, heads, *everyone.shape[1:])

    if prompt_lengths is not None:
        first = jax.lax.axis_index(layout.tokens) * share
        of_pair = pad_pairs(jnp.repeat(prompt_lengths, heads))
        prompt_lengths = jax.lax.dynamic_slice_in_dim(of_pair, first, share)
    arrays = map(to_pairs, (query, key, value))
    output, per_head = work(*arrays, prompt_lengths, *common)
    return jax.tree.map(to_tokens, output), jax.tree.map(gather, per_head)
