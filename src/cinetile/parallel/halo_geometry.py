"""Which keys each device needs under a band mask, and the mask on these keys.

A device holds queries `[a, b)`. Under a band with `low(q) = q - w` and `high(q) = q + w + 1`, they
attend to the sink and to keys in `[a - w, b + w)`. That window is widened at its front to a whole
period of the edges (`period` is the number of frames in token-major order, else 1), so that the
pattern of skipped sink positions is the same on each device:

    start = floor((a - w) / period) * period
    window = round_up(max(b - a) + 2 w + period, period)

The period on top covers what the floor moved. The local sequence is the sink followed by the
window's keys, and a local query `i = q - a` has the global edge, shifted:

    local(edge)(i) = sink + keys before `lowest` + live(clip(i + offset + a - lowest, 0, reach))

`lowest` is the first window position that belongs to the band and not to the sink, and `reach`
ends the window at the sequence's end. `offset` and `live` are those of `masks.edges.Edge`.
"""

from dataclasses import dataclass

import numpy as np

from cinetile import _checks
from cinetile.grid import TokenGrid, TokenOrder
from cinetile.masks import Mask, RowSegment
from cinetile.masks.edges import Edge
from cinetile.parallel.moves import Ranges


@dataclass(frozen=True)
class HaloGeometry:
    """How a band mask is cut along its queries for sharded tokens.

    Positions are in the mask's query order. All token shards have one size, a multiple of the
    band edges' period. The query ranges may differ from the shards, so that each device computes
    equally many pairs. Each device attends from its queries to the sink and to a window of keys.

    Attributes:
        mask: one band, a sink of any size, no text.
        bounds: first query of each device, then the number of queries.
        shard: tokens per device.
        before: positions that the window holds at least before a device's first query.
        after: positions that the window holds after a device's last query.
    """

    mask: Mask
    bounds: tuple[int, ...]
    shard: int
    before: int
    after: int

    @property
    def devices(self) -> int:
        return len(self.bounds) - 1

    @property
    def _low(self) -> Edge:
        return self.mask.segments[0].low

    @property
    def period(self) -> int:
        """Positions after which the pattern of the band's edges repeats."""
        return self._low.period

    @property
    def skipped(self) -> int:
        """First positions of each period whose keys belong to the sink, not to the band."""
        return self._low.skipped

    @property
    def sink(self) -> int:
        """Number of sink keys, which each query keeps."""
        return self.mask.segments[0].prefix

    @property
    def queries(self) -> int:
        """Largest number of queries on a device; the others are padded to it."""
        return int(np.diff(self.bounds).max())

    @property
    def window(self) -> int:
        """Positions of each device's window, a multiple of `period`."""
        return _rounded_up(self.queries + self.before + self.after + self.period, self.period)

    @property
    def window_keys(self) -> int:
        """Band keys in each device's window."""
        return self.window // self.period * (self.period - self.skipped)

    @property
    def length(self) -> int:
        """Tokens of each device's local sequence: sink and window keys, at least its queries."""
        return max(self.queries, self.sink + self.window_keys)

    def window_start(self, device: int) -> int:
        """First position of a device's window; negative if it begins before the sequence."""
        return (self.bounds[device] - self.before) // self.period * self.period

    def query_ranges(self) -> Ranges:
        """The query range of each device."""
        return Ranges(self.bounds[:-1], self.bounds[1:], self.queries)

    def window_ranges(self) -> Ranges:
        """The window range of each device."""
        starts = tuple(self.window_start(device) for device in range(self.devices))
        stops = tuple(stop + self.after for stop in self.bounds[1:])
        return Ranges(starts, stops, self.window)

    def local_mask(self, device: int) -> Mask:
        """The mask of one device's queries over its keys: the sink, then the window.

        It has `length` rows and `length` keys, because kernels take only self-attention. A
        padding row keeps only the first key.
        """
        first, stop = self.bounds[device], self.bounds[device + 1]
        start = self.window_start(device)
        # In a spatial mask the band covers the sink keys too; they must count only once.
        lowest = min(max(start, self.sink - self._low.start, 0), start + self.window)
        reach = max(min(self.mask.num_tokens, start + self.window) - lowest, 0)
        before = (lowest - start) // self.period * (self.period - self.skipped)

        def local(edge: Edge) -> Edge:
            return Edge(
                self.sink + before,
                edge.offset + first - lowest,
                reach,
                self.period,
                self.skipped,
            )

        band = self.mask.segments[0]
        segments = [RowSegment(0, stop - first, self.sink, local(band.low), local(band.high))]
        if stop - first < self.length:
            nothing = Edge(1)
            segments.append(RowSegment(stop - first, self.length, 1, nothing, nothing))
        order = TokenOrder()
        grid = TokenGrid(self.length, 1, 1)
        return Mask(f"{self.mask.name} window", grid, order, order, tuple(segments))


def halo_geometry(mask: Mask, devices: int, *, balanced: bool = True) -> HaloGeometry:
    """Cuts a band mask for a number of devices.

    Args:
        mask: `spatial_mask`, `temporal_mask` or `svg_mask`, without text.
        devices: number of devices over which tokens are sharded, from 1.
        balanced: whether queries move to a neighbour so that all devices compute equally many
            pairs; otherwise each device takes the queries of its own shard.

    Raises:
        TypeError: `mask` is not a `Mask`.
        ValueError: the mask has text or no band, or is too small for so many devices.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a cinetile mask, got {type(mask).__name__}")
    devices = _checks.integer("devices", devices, minimum=1, maximum=mask.num_tokens)
    if mask.grid.text_tokens:
        raise ValueError(
            f"mask must have no text, because text queries keep all keys, got {mask.grid}; "
            "exchange heads instead"
        )
    band = mask.segments[0]
    if len(mask.segments) > 1 or not band.low.length:
        raise ValueError(f"mask must have a band, got the {mask.name} mask; exchange heads instead")
    period, tokens = band.low.period, mask.num_tokens
    shard = _rounded_up(-(-tokens // devices), period)
    bounds = _even_pairs(mask, devices) if balanced else _even_tokens(tokens, devices, shard)
    return HaloGeometry(
        mask=mask,
        bounds=bounds,
        shard=shard,
        before=min(max(-band.low.offset, 0), tokens),
        after=min(max(band.high.offset - 1, 0), tokens),
    )


def _even_tokens(tokens: int, devices: int, shard: int) -> tuple[int, ...]:
    bounds = tuple(min(device * shard, tokens) for device in range(devices + 1))
    if len(set(bounds)) <= devices:
        raise ValueError(
            f"devices must be at most {-(-tokens // shard)} for shards of {shard} tokens "
            f"of {tokens}, got {devices}"
        )
    return bounds


def _even_pairs(mask: Mask, devices: int) -> tuple[int, ...]:
    """Bounds between which the mask keeps equally many pairs, up to one row."""
    total = mask.kept_pairs
    bounds = [0]
    for device in range(1, devices):
        low, high = bounds[-1] + 1, mask.num_tokens - (devices - device)
        while low < high:
            middle = (low + high) // 2
            if _pairs_below(mask, middle) * devices < device * total:
                low = middle + 1
            else:
                high = middle
        bounds.append(low)
    return (*bounds, mask.num_tokens)


def _pairs_below(mask: Mask, query: int) -> int:
    zero, end = np.array([0]), np.array([mask.num_tokens])
    return int(mask.count_kept(zero, np.array([query]), zero, end)[0])


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
