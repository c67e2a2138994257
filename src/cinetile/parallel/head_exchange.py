"""Ulysses' exchange: tokens are spread over devices outside of attention, heads inside."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from cinetile.parallel.layout import ArrayLayout

Arrays = tuple[
    Float[Array, "batch tokens heads head_dim"],
    Float[Array, "batch tokens heads head_dim"],
    Float[Array, "batch tokens heads head_dim"],
]


def over_mesh(
    work: Callable[..., tuple[Any, Any]],
    layout: ArrayLayout,
    arrays: Arrays,
    valid_text: Int[Array, " batch"] | None,
    *common: Any,
) -> tuple[Any, Any]:
    """Runs `work` on every device with some heads and all of their tokens.

    The pairs of a batch row and a head are what the devices share out (DeepSpeed-Ulysses,
    arXiv:2309.14509, shares out the heads of each row): 12 heads of a guidance pair give each
    of 8 devices 3 pairs, where each row by itself would need padding. Tokens, heads and pairs that
    do not divide are padded with zeros, and what these give is cut off.

    Args:
        work: `work(query, key, value, valid_text, *common)` returns an output shaped as the
            query, or None, and a pytree of arrays with the leading axes `[batch, heads]`.
            It must treat every head of every row by itself.
        layout: how the arrays lie on the mesh.
        arrays: query, key and value, whole.
        valid_text: of each batch row, or None.
        *common: further arguments, the same on all devices.

    Returns:
        What `work` returned, whole.

    Raises:
        ValueError: the batch rows do not divide by their devices.
    """
    batch, tokens, heads, _ = arrays[0].shape
    layout.check_batch(batch)
    padding = (0, -tokens % layout.size(layout.tokens), -heads % layout.size(layout.heads), 0)
    padded = [
        layout.laid_out(jnp.pad(array, [(0, count) for count in padding]), layout.spec)
        for array in arrays
    ]
    rows = PartitionSpec(layout.batch or None)
    if valid_text is not None:
        valid_text = layout.laid_out(valid_text, rows)
    common = tuple(layout.laid_out(jnp.asarray(one), PartitionSpec()) for one in common)

    def local(query: Array, key: Array, value: Array, valid_text: Any, *common: Any) -> Any:
        arrays = (query, key, value)
        if not layout.tokens:
            return work(*arrays, valid_text, *common)
        return _exchanged(work, layout, tokens, arrays, valid_text, *common)

    output, per_head = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(layout.spec,) * 3 + (rows,) + (PartitionSpec(),) * len(common),
        out_specs=(layout.spec, layout.head_spec),
        # The loops of the kernels start from constants, which are not marked as varying.
        check_vma=False,
    )(*padded, valid_text, *common)

    def cut(array: Array, spec: PartitionSpec, sizes: dict[int, int]) -> Array:
        ragged = {axis: size for axis, size in sizes.items() if array.shape[axis] != size}
        if not ragged:
            return array
        whole = PartitionSpec(*(None if axis in ragged else one for axis, one in enumerate(spec)))
        array = layout.laid_out(array, whole)
        for axis, size in ragged.items():
            array = jax.lax.slice_in_dim(array, 0, size, axis=axis)
        return array

    output = jax.tree.map(lambda one: cut(one, layout.spec, {1: tokens, 2: heads}), output)
    return output, jax.tree.map(lambda one: cut(one, layout.head_spec, {1: heads}), per_head)


def _exchanged(
    work: Callable[..., tuple[Any, Any]],
    layout: ArrayLayout,
    num_tokens: int,
    arrays: Arrays,
    valid_text: Int[Array, " batch"] | None,
    *common: Any,
) -> tuple[Any, Any]:
    """Runs `work` on one device's share of the pairs; arguments are that device's shards."""
    rows, shard, heads, head_dim = arrays[0].shape
    devices, pairs = layout.size(layout.tokens), rows * heads
    share = -(-pairs // devices)

    def pad_pairs(array: Shaped[Array, "pairs ..."]) -> Shaped[Array, "padded ..."]:
        return jnp.pad(array, [(0, share * devices - pairs)] + [(0, 0)] * (array.ndim - 1))

    def to_pairs(array: Float[Array, "rows shard heads d"]) -> Float[Array, "share tokens 1 d"]:
        by_pair = pad_pairs(array.swapaxes(1, 2).reshape(pairs, shard, head_dim))
        whole = jax.lax.all_to_all(by_pair, layout.tokens, 0, 1, tiled=True)
        return whole[:, :num_tokens, None]

    def to_tokens(array: Float[Array, "share tokens 1 d"]) -> Float[Array, "rows shard heads d"]:
        padded = jnp.pad(array[:, :, 0], ((0, 0), (0, shard * devices - num_tokens), (0, 0)))
        by_pair = jax.lax.all_to_all(padded, layout.tokens, 1, 0, tiled=True)[:pairs]
        return by_pair.reshape(rows, heads, shard, head_dim).swapaxes(1, 2)

    def gather(array: Shaped[Array, "share 1 ..."]) -> Shaped[Array, "rows heads ..."]:
        everyone = jax.lax.all_gather(array[:, 0], layout.tokens, tiled=True)[:pairs]
        return everyone.reshape(rows, heads, *everyone.shape[1:])

    if valid_text is not None:
        first = jax.lax.axis_index(layout.tokens) * share
        of_pair = pad_pairs(jnp.repeat(valid_text, heads))
        valid_text = jax.lax.dynamic_slice_in_dim(of_pair, first, share)
    query, key, value = map(to_pairs, arrays)
    output, per_head = work(query, key, value, valid_text, *common)
    return jax.tree.map(to_tokens, output), jax.tree.map(gather, per_head)
