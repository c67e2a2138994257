"""Bytes sent and load imbalance of each way to distribute attention, computed from shapes."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from cinetile import _checks
from cinetile.masks import Mask
from cinetile.parallel.halo_geometry import HaloGeometry, halo_geometry
from cinetile.parallel.moves import Ranges, hops, reorder_tables

_ROUTE_BYTES = 4


@dataclass(frozen=True)
class ExchangeScheme:
    """One way to distribute an attention call over devices.

    Attributes:
        name: "ring": keys and values pass through all devices, as dense attention needs;
            "heads": tokens are exchanged for heads; "halo": neighbours' keys and the sink, with
            queries moved so that each device computes equally many pairs; "halo, queries stay":
            the same without moving queries.
        all_to_all: largest number of bytes that a device sends by all-to-all.
        permute: bytes that a device sends to neighbours.
        all_reduce: bytes that a device sends to broadcast the sink.
        all_gather: bytes that a device sends to gather the routes.
        pairs: query-key pairs that each device computes.
    """

    name: str
    all_to_all: int
    permute: int
    all_reduce: int
    all_gather: int
    pairs: tuple[int, ...]

    @property
    def sent_bytes(self) -> int:
        """Total bytes that a device sends."""
        return self.all_to_all + self.permute + self.all_reduce + self.all_gather

    @property
    def imbalance(self) -> float:
        """Pairs of the busiest device relative to the mean, minus 1; 0 is perfect balance."""
        return max(self.pairs) * len(self.pairs) / sum(self.pairs) - 1


def exchange_report(
    mask: Mask,
    *,
    devices: int,
    heads: int,
    head_dim: int,
    batch: int = 1,
    dtype: str = "bfloat16",
    patterns: int = 2,
) -> tuple[ExchangeScheme, ...]:
    """Compares the ways to distribute one call over the devices of one mesh axis.

    Args:
        mask: the mask of all heads.
        devices: number of devices over which tokens are sharded, from 2.
        heads: heads of each such group of devices.
        head_dim: features per head.
        batch: batch rows of each such group of devices.
        dtype: dtype of the arrays.
        patterns: number of patterns that heads are routed to (head exchange only).

    Returns:
        The ring, the head exchange and, if the mask allows it, both kinds of halo.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of range.
    """
    devices = _checks.integer("devices", devices, minimum=2)
    for name, count in (("heads", heads), ("head_dim", head_dim), ("batch", batch)):
        _checks.integer(name, count, minimum=1)
    size = jnp.dtype(_checks.choice("dtype", dtype, ("bfloat16", "float32", "float16"))).itemsize
    row = heads * head_dim * batch * size
    tokens = mask.num_tokens
    shard, others = -(-tokens // devices), devices - 1
    kept = mask.kept_pairs * heads * batch
    even = tuple(int(part) for part in np.diff(np.arange(devices + 1) * kept // devices))
    ring = ExchangeScheme("ring", 0, 2 * shard * row * others, 0, 0, even)

    pairs = batch * heads
    share = -(-pairs // devices)
    held = np.diff(np.minimum(np.arange(devices + 1) * share, pairs))
    by_heads = ExchangeScheme(
        "heads",
        all_to_all=4 * share * shard * head_dim * size * others,
        permute=0,
        all_reduce=0,
        all_gather=share * (1 + patterns) * _ROUTE_BYTES * others,
        pairs=tuple(int(count) * mask.kept_pairs for count in held),
    )
    schemes = [ring, by_heads]
    for name, balanced in (("halo", True), ("halo, queries stay", False)):
        try:
            geometry = halo_geometry(mask, devices, balanced=balanced)
        except ValueError:  # text, no band, or too few tokens
            continue
        schemes.append(_halo(name, geometry, row, heads * batch))
    return tuple(schemes)


def _halo(name: str, geometry: HaloGeometry, row: int, times: int) -> ExchangeScheme:
    devices, shard, mask = geometry.devices, geometry.shard, geometry.mask
    bounds = np.array(geometry.bounds)
    window = _fetched(geometry.window_ranges(), shard)
    queries = _fetched(geometry.query_ranges(), shard)
    moved = 0
    places = mask.query_order.indices(mask.grid)
    if not mask.query_order.is_frame_major(mask.grid):
        old = -(-mask.num_tokens // devices)
        inverse = np.argsort(places)
        there = reorder_tables(inverse, old, shard, devices)[0].shape[-1]
        back = reorder_tables(places, shard, old, devices)[0].shape[-1]
        moved = 3 * there + back
    ends = np.zeros_like(bounds[1:]), np.full_like(bounds[1:], mask.num_tokens)
    pairs = mask.count_kept(bounds[:-1], bounds[1:], *ends)
    return ExchangeScheme(
        name,
        all_to_all=moved * row * (devices - 1),
        # The window's keys and values; the queries, and their outputs on the way back.
        permute=2 * (window + queries) * row,
        all_reduce=2 * (2 * geometry.sink * row) * (devices - 1) // devices,
        all_gather=0,
        pairs=tuple(int(count) * times for count in pairs),
    )


def _fetched(ranges: Ranges, shard: int) -> int:
    """Tokens that a device sends when every device fetches a range."""
    sides = (hops(side, shard) for side in ranges.reach(shard))
    return sum(size for side in sides for _, size in side)
