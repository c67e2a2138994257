"""Running a function on each device of a mesh, with that device's shards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from cinetile.parallel.layout import ArrayLayout

Arrays = tuple[
    Float[Array, "batch tokens heads head_dim"],
    Float[Array, "batch tokens heads head_dim"],
    Float[Array, "batch tokens heads head_dim"],
]


def over_mesh(
    local: Callable[..., tuple[Any, Any]],
    layout: ArrayLayout,
    arrays: Arrays,
    prompt_lengths: Int[Array, " batch"] | None = None,
    *common: Any,
) -> tuple[Any, Any]:
    """Runs `local` on each device with its shards of query, key and value.

    Tokens and heads that the devices do not divide are padded with zeros. The padding is cut off
    the output.

    Args:
        local: `local(query, key, value, prompt_lengths, *common)` returns an output shaped as the
            query, or None, and a pytree of arrays with the leading axes `[batch, heads]`.
            Heads of the batch must not depend on each other.
        layout: mesh axes of batch rows, tokens and heads.
        arrays: query, key and value, global arrays.
        prompt_lengths: of each batch row, or None.
        *common: further arguments, replicated on all devices.

    Returns:
        The global arrays of what `local` returned.

    Raises:
        ValueError: the devices of the batch axes do not divide the batch size.
    """
    batch, tokens, heads, _ = arrays[0].shape
    layout.check_batch(batch)
    padding = (0, -tokens % layout.size(layout.tokens), -heads % layout.size(layout.heads), 0)
    padded = [
        layout.laid_out(jnp.pad(array, [(0, count) for count in padding]), layout.spec)
        for array in arrays
    ]
    rows = PartitionSpec(layout.batch or None)
    if prompt_lengths is not None:
        prompt_lengths = layout.laid_out(prompt_lengths, rows)
    common = tuple(layout.laid_out(jnp.asarray(array), PartitionSpec()) for array in common)

    output, per_head = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(layout.spec,) * 3 + (rows,) + (PartitionSpec(),) * len(common),
        out_specs=(layout.spec, layout.head_spec),
        # The loops of the kernels start from constants, which are not marked as varying.
        check_vma=False,
    )(*padded, prompt_lengths, *common)

    def cut(array: Array, spec: PartitionSpec, sizes: dict[int, int]) -> Array:
        ragged = {axis: size for axis, size in sizes.items() if array.shape[axis] != size}
        if not ragged:
            return array
        whole = PartitionSpec(*(None if axis in ragged else name for axis, name in enumerate(spec)))
        array = layout.laid_out(array, whole)
        for axis, size in ragged.items():
            array = jax.lax.slice_in_dim(array, 0, size, axis=axis)
        return array

    def cut_and_replicate(array: Array) -> Array:
        # Replicated, so that each process can read it.
        array, spec = cut(array, layout.head_spec, {1: heads}), PartitionSpec()
        if layout.is_explicit:
            return layout.laid_out(array, spec)
        return layout.constrained(array, spec)

    output = jax.tree.map(lambda array: cut(array, layout.spec, {1: tokens, 2: heads}), output)
    return output, jax.tree.map(cut_and_replicate, per_head)
