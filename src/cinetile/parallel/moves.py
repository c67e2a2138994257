"""Moving tokens between devices: ranges from neighbours, a prefix to all, one order to another.

All functions are for the inside of `jax.shard_map`; tokens lie along the second axis.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

Axes = tuple[str, ...]


class Ranges(NamedTuple):
    """A range of the sequence for each device; may reach beyond the sequence's ends.

    Attributes:
        starts: first position.
        stops: one past the last position that counts.
        length: what every device makes room for, at least that many.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    length: int

    def reach(self, shard: int) -> tuple[int, int]:
        """How many tokens before and after its own shard a device needs, at the most."""
        end = len(self.starts) * shard
        before = max(device * shard - max(start, 0) for device, start in enumerate(self.starts))
        after = max(min(stop, end) - (i + 1) * shard for i, stop in enumerate(self.stops))
        return max(before, 0), max(after, 0)


def fetch(
    array: Shaped[Array, "rows shard ..."], ranges: Ranges, axes: Axes
) -> Shaped[Array, "rows length ..."]:
    """Gives every device its range of the sequence.

    Neighbours send no more than the farthest reach of any device needs; what a device gets
    beyond its range may be anything finite. Linear, so that its transpose is the way back.

    Args:
        array: this device's shard of the sequence; all shards have one size.
        ranges: what each device needs.
        axes: mesh axes along which the tokens lie.
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
    """The neighbours within reach, the farthest first, and how many tokens each sends."""
    count = -(-reach // shard)
    return [(hop, min(shard, reach - (hop - 1) * shard)) for hop in range(count, 0, -1)]


def _from_neighbour(
    array: Shaped[Array, "rows shard ..."], hop: int, size: int, devices: int, axes: Axes
) -> Shaped[Array, "rows size ..."]:
    """The nearer `size` tokens of the device `hop` places on; zeros where there is none."""
    part = array[:, -size:] if hop < 0 else array[:, :size]
    pairs = [(device + hop, device) for device in range(devices) if 0 <= device + hop < devices]
    return jax.lax.ppermute(part, axes, pairs) if pairs else jnp.zeros_like(part)


def give_back(
    array: Shaped[Array, "rows length ..."], ranges: Ranges, shard: int, axes: Axes
) -> Shaped[Array, "rows shard ..."]:
    """The inverse of `fetch`, where every token is in the range of one device alone.

    Args:
        array: what this device has.
        ranges: where it came from.
        shard: tokens that lie on each device afterwards.
        axes: mesh axes along which the tokens lie.
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
    """Gives every device the first `count` tokens of the sequence."""
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
    """Moves every token to another position of the sequence, by one exchange of all with all.

    Args:
        array: this device's shard; all have one size.
        targets: new position of the token at each position.
        shard: tokens that lie on each device afterwards; the last may hold fewer, then zeros.
        devices: how many there are.
        axes: mesh axes along which the tokens lie.
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
    """What each device sends each other one, and where each puts what it gets from each.

    Returns:
        Positions within the shards; places that stand for nothing hold the size of the shard.
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
