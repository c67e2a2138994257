"""Attention under one band mask with sharded tokens: keys come from neighbouring devices only."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from cinetile.attention import attention
from cinetile.kernels import default_blocks
from cinetile.kernels.arguments import AnyArray, check_arrays, check_scale
from cinetile.kernels.base import ImplementationChoice
from cinetile.kernels.registry import frozen_choice
from cinetile.masks import Mask
from cinetile.parallel.halo_geometry import HaloGeometry, halo_geometry
from cinetile.parallel.layout import ArrayLayout, array_layout
from cinetile.parallel.moves import fetch, give_back, prefix_for_all, reorder
from cinetile.parallel.spread import over_mesh
from cinetile.plans import TilePlan, plan_tiles


def halo_attention(
    query: Float[AnyArray, "batch tokens heads head_dim"],
    key: Float[AnyArray, "batch tokens heads head_dim"],
    value: Float[AnyArray, "batch tokens heads head_dim"],
    mask: Mask,
    *,
    mesh: Mesh,
    sharding: PartitionSpec | None = None,
    scale: float | None = None,
    implementation: ImplementationChoice = None,
    block_q: int | None = None,
    block_kv: int | None = None,
    balanced: bool = True,
) -> Float[Array, "batch tokens heads head_dim"]:
    """Attends with all heads under one band mask; keys move between neighbours only.

    Each device receives the sink, and the keys and values within the band's width of its
    queries. If the mask's order is token-major, tokens are first reordered by an all-to-all, and
    the output is reordered back. The mask is exact (mode "split"): an aligned plan of the whole
    sequence has tiles that cross the devices' boundaries.

    Args:
        query: queries in frame-major order, as for `attention`.
        key: keys in frame-major order.
        value: values in frame-major order.
        mask: a band without text: `spatial_mask`, `temporal_mask`, `svg_mask` for Wan.
        mesh: the devices.
        sharding: as for `SparseAttention`; tokens must be sharded.
        scale: as for `attention`.
        implementation: as for `attention`.
        block_q: queries per tile; None for the implementation's default.
        block_kv: keys per tile; None for the implementation's default.
        balanced: whether queries move to a neighbour so that all devices compute equally many
            pairs.

    Returns:
        The output in frame-major order and the dtype of `query`.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes do not fit each other or the mask, the mask has text or no band, or
            the sharding does not shard tokens.
        NotImplementedError: none of the named implementations can run this call.
    """
    layout = array_layout(mesh, sharding)
    if not layout.tokens:
        raise ValueError(f"sharding must shard tokens for a halo exchange, got {layout.spec}")
    geometry = halo_geometry(mask, layout.size(layout.tokens), balanced=balanced)
    check_arrays(query, key, value, mask.grid)
    scale = check_scale(scale, query.shape[-1])
    plans = halo_plans(geometry, str(query.dtype), implementation, block_q, block_kv)
    arrays: tuple[Any, ...] = tuple(jnp.asarray(array) for array in (query, key, value))
    return _over_mesh(layout, geometry, plans, scale, frozen_choice(implementation), arrays)


def halo_plans(
    geometry: HaloGeometry,
    dtype: str,
    implementation: ImplementationChoice = None,
    block_q: int | None = None,
    block_kv: int | None = None,
) -> tuple[TilePlan, ...]:
    """Plans each device's local mask; see `HaloGeometry.local_mask`."""
    blocks = default_blocks(geometry.length, dtype, implementation)
    block_q = blocks[0] if block_q is None else block_q
    block_kv = blocks[1] if block_kv is None else block_kv
    return tuple(
        plan_tiles(geometry.local_mask(device), block_q, block_kv, "split")
        for device in range(geometry.devices)
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _over_mesh(
    layout: ArrayLayout,
    geometry: HaloGeometry,
    plans: tuple[TilePlan, ...],
    scale: float,
    implementation: Any,
    arrays: Any,
) -> Float[Array, "batch tokens heads head_dim"]:
    def local(query: Array, key: Array, value: Array, prompt_lengths: None) -> Any:
        del prompt_lengths
        return _attend(layout, geometry, plans, scale, implementation, query, key, value), ()

    return over_mesh(local, layout, arrays)[0]


def _attend(
    layout: ArrayLayout,
    geometry: HaloGeometry,
    plans: tuple[TilePlan, ...],
    scale: float,
    implementation: Any,
    query: Float[Array, "rows shard heads head_dim"],
    key: Float[Array, "rows shard heads head_dim"],
    value: Float[Array, "rows shard heads head_dim"],
) -> Float[Array, "rows shard heads head_dim"]:
    """Exchange, attention and the way back on one device, inside `jax.shard_map`."""
    rows, _, heads, head_dim = query.shape
    mask, axes, grid = geometry.mask, layout.tokens, geometry.mask.grid
    ranges = geometry.query_ranges()
    keys = jnp.concatenate([key, value])  # one array, so that keys and values share each collective
    moves = not mask.query_order.is_frame_major(grid)
    # Real sink frames are a prefix of the frame-major order; upstream's sink of the placed order.
    sink_leads = mask.key_order.leading_frames > 0
    sink = prefix_for_all(keys, geometry.sink, axes) if sink_leads else None
    places = mask.query_order.indices(grid)
    if moves:
        targets = np.empty_like(places)
        targets[places] = np.arange(places.size, dtype=places.dtype)
        together = jnp.concatenate([query, keys])
        together = reorder(together, targets, geometry.shard, geometry.devices, axes)
        query, keys = jnp.split(together, [rows])
    if sink is None:
        sink = prefix_for_all(keys, geometry.sink, axes)

    window = fetch(keys, geometry.window_ranges(), axes)
    by_period = window.reshape(2 * rows, -1, geometry.period, heads, head_dim)
    window = by_period[:, :, geometry.skipped :].reshape(2 * rows, -1, heads, head_dim)
    key, value = jnp.split(_padded(jnp.concatenate([sink, window], axis=1), geometry), 2)
    query = _padded(fetch(query, ranges, axes), geometry)

    device = jax.lax.axis_index(axes)
    output = attention(
        query,
        key,
        value,
        plans,
        routes=jnp.full((rows, heads), device, jnp.int32),
        scale=scale,
        implementation=implementation,
    )
    output = give_back(output[:, : geometry.queries], ranges, geometry.shard, axes)
    if moves:
        shard = -(-mask.num_tokens // geometry.devices)
        output = reorder(output, places, shard, geometry.devices, axes)
    return output


def _padded(
    array: Float[Array, "rows tokens heads head_dim"], geometry: HaloGeometry
) -> Float[Array, "rows length heads head_dim"]:
    return jnp.pad(array, ((0, 0), (0, geometry.length - array.shape[1]), (0, 0), (0, 0)))
