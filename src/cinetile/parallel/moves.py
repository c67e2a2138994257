"""Moving tokens between devices: ranges from neighbours, a prefix to all, a new order.

Call all functions inside `jax.shard_map`; tokens are the second axis.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

Axes = tuple[str, ...]


class Ranges(NamedTuple):
    """A range of the sequence for each device; it may extend past the sequence's ends.

    Attributes:
        starts: first position.
        stops: one past the last position in use.
        length: positions that each device allocates, at least `stop - start`.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    length: int

    def reach(self, shard: int) -> tuple[int, int]:
        """Largest number of tokens that any device needs before and after its own shard."""
        end = len(self.starts) * shard
        before = max(device * shard - max(start, 0) for device, start in enumerate(self.starts))
        after = max(min(stop, end) - (i + 1) * shard for i, stop in enumerate(self.stops))
        return max(before, 0), max(after, 0)


def fetch(
    array: Shaped[Array, "rows shard ..."], ranges: Ranges, axes: Axes
) -> Shaped[Array, "rows length ..."]:
    """Fetches each device's range of the sequence from its neighbours.

    Each device sends what the farthest-reaching device needs. Positions past a device's own range
    hold unspecified finite values. The function is linear; `give_back` is its transpose.

    Args:
        array: this device's shard of the sequence; all shards have one size.
        ranges: the range of each device.
        axes: mesh axes over which tokens are sharded.
    """
    shard, devices = array.shape[1], len(ranges.starts)
    before, after = ranges.reach(shard)
    left = [_from_neighbour(array, -hop, size, devices, axes) for hop, size in hops(before, shard)]
    right = [_from_neighbour(array, hop, size, devices, axes) for hop, size in hops(after, shard)]
    around = jnp.concatenate([*left, array, *right[::-1]], axis=1)
    offsets = [start - i * shard + before for i, start in enumerate(ranges.starts)]
    front = max(0, -min(offsets))
    back = max(0, max(offsets) + ranges.length - around.shape[1])
    around = jnp.pad(around, [(0, 0), (front, back)] + [(0, 0)] * (array.ndim - 2))
    offset = front + jnp.asarray(offsets, jnp.int32)[jax.lax.axis_index(axes)]
    return jax.lax.dynamic_slice_in_dim(around, offset, ranges.length, axis=1)


def hops(reach: int, shard: int) -> list[tuple[int, int]]:
    """Distance of each neighbour within reach, farthest first, and how many tokens it sends."""
    count = -(-reach // shard)
    return [(hop, min(shard, reach - (hop - 1) * shard)) for hop in range(count, 0, -1)]


def _from_neighbour(
    array: Shaped[Array, "rows shard ..."], hop: int, size: int, devices: int, axes: Axes
) -> Shaped[Array, "rows size ..."]:
    """The nearest `size` tokens of the device at distance `hop`; zeros if there is no device."""
    part = array[:, -size:] if hop < 0 else array[:, :size]
    pairs = [(device + hop, device) for device in range(devices) if 0 <= device + hop < devices]
    return jax.lax.ppermute(part, axes, pairs) if pairs else jnp.zeros_like(part)


def give_back(
    array: Shaped[Array, "rows length ..."], ranges: Ranges, shard: int, axes: Axes
) -> Shaped[Array, "rows shard ..."]:
    """Inverse of `fetch` if each token is in the range of exactly one device.

    Args:
        array: this device's range.
        ranges: the ranges that `fetch` used.
        shard: tokens per device in the result.
        axes: mesh axes over which tokens are sharded.
    """
    counts = [stop - start for start, stop in zip(ranges.starts, ranges.stops, strict=True)]
    count = jnp.asarray(counts, jnp.int32)[jax.lax.axis_index(axes)]
    own = (jnp.arange(ranges.length) < count).reshape(1, -1, *(1,) * (array.ndim - 2))
    shape = jax.ShapeDtypeStruct((array.shape[0], shard, *array.shape[2:]), array.dtype)
    back = jax.linear_transpose(lambda whole: fetch(whole, ranges, axes), shape)
    return back(jnp.where(own, array, jnp.zeros((), array.dtype)))[0]


def prefix_for_all(
    array: Shaped[Array, "rows shard ..."], count: int, axes: Axes
) -> Shaped[Array, "rows count ..."]:
    """Broadcasts the first `count` tokens of the sequence to all devices."""
    shard = array.shape[1]
    position = np.arange(count) - jax.lax.axis_index(axes) * shard
    here = ((position >= 0) & (position < shard)).reshape(1, count, *(1,) * (array.ndim - 2))
    part = jnp.take(array, jnp.clip(position, 0, shard - 1), axis=1)
    return jax.lax.psum(jnp.where(here, part, jnp.zeros((), array.dtype)), axes)


def reorder(
    array: Shaped[Array, "rows shard ..."],
    targets: Int[np.ndarray, " tokens"],
    shard: int,
    devices: int,
    axes: Axes,
) -> Shaped[Array, "rows new_shard ..."]:
    """Permutes the tokens of the sequence by one all-to-all.

    Args:
        array: this device's shard; all shards have one size.
        targets: new position of the token at each position.
        shard: tokens per device in the result; the last shards may end in zeros.
        devices: number of devices.
        axes: mesh axes over which tokens are sharded.
    """
    send, receive = reorder_tables(targets, array.shape[1], shard, devices)
    device = jax.lax.axis_index(axes)
    sent = jnp.take(array, jnp.asarray(send)[device].reshape(-1), axis=1, mode="fill", fill_value=0)
    got = jax.lax.all_to_all(sent, axes, 1, 1, tiled=True)
    empty = jnp.zeros((array.shape[0], shard, *array.shape[2:]), array.dtype)
    return empty.at[:, jnp.asarray(receive)[device].reshape(-1)].set(got, mode="drop")


def reorder_tables(
    targets: Int[np.ndarray, " tokens"], source_shard: int, target_shard: int, devices: int
) -> tuple[
    Int[np.ndarray, "devices devices most"],
    Int[np.ndarray, "devices devices most"],
]:
    """Tables of the all-to-all in `reorder`.

    Returns:
        `send[i, j]`: positions in device i's shard of the tokens that it sends to device j;
        `receive[j, i]`: positions in device j's shard where it stores them. Unused entries hold
        the shard size, which is out of bounds.
    """
    source = np.arange(targets.size, dtype=np.int64)
    start, end = source // source_shard, targets // target_shard
    order = np.lexsort((targets, end, start))
    pair = (start * devices + end)[order]
    counts = np.bincount(pair, minlength=devices**2)
    place = np.arange(targets.size) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = devices, devices, int(counts.max())
    send = np.full(shape, source_shard, np.int32)
    receive = np.full(shape, target_shard, np.int32)
    start, end = start[order], end[order]
    send[start, end, place] = source[order] % source_shard
    receive[end, start, place] = targets[order] % target_shard
    return send, receive
