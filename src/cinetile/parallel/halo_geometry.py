"""Which keys each device needs under a band mask, and the mask that it sees on them."""

from dataclasses import dataclass

import numpy as np

from cinetile import _checks
from cinetile.grid import TokenGrid, TokenOrder
from cinetile.masks import Mask, RowSegment
from cinetile.masks.edges import Edge
from cinetile.parallel.moves import Ranges


@dataclass(frozen=True)
class HaloGeometry:
    """How a band mask is cut along its queries, for a sequence spread over devices.

    Positions count in the mask's query order. Token shards are of one size, whole periods of the
    band's edges; query ranges may differ from them, so that work is even. Every device attends
    with its queries to the sink and to a window of keys around them.

    Attributes:
        mask: one band, a sink of any size, no text.
        bounds: first query of each device, and the end.
        shard: tokens that lie on each device.
        before: positions of the window before a device's first query, at the least.
        after: positions of the window after its last query.
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
        """Positions after which the band's edges repeat."""
        return self._low.period

    @property
    def skipped(self) -> int:
        """First positions of each period that are no keys of the band, but of the sink."""
        return self._low.skipped

    @property
    def sink(self) -> int:
        """Keys that every query keeps."""
        return self.mask.segments[0].prefix

    @property
    def queries(self) -> int:
        """Queries that every device makes room for."""
        return int(np.diff(self.bounds).max())

    @property
    def window(self) -> int:
        """Positions of every device's window; whole periods."""
        return _rounded_up(self.queries + self.before + self.after + self.period, self.period)

    @property
    def window_keys(self) -> int:
        """Keys of the band in every device's window."""
        return self.window // self.period * (self.period - self.skipped)

    @property
    def length(self) -> int:
        """Tokens of the sequence that every device attends in: sink and window, or its queries."""
        return max(self.queries, self.sink + self.window_keys)

    def window_start(self, device: int) -> int:
        """First position of a device's window; below 0 where it begins before the sequence."""
        return (self.bounds[device] - self.before) // self.period * self.period

    def query_ranges(self) -> Ranges:
        """The queries of each device."""
        return Ranges(self.bounds[:-1], self.bounds[1:], self.queries)

    def window_ranges(self) -> Ranges:
        """The window of each device."""
        starts = tuple(self.window_start(device) for device in range(self.devices))
        stops = tuple(stop + self.after for stop in self.bounds[1:])
        return Ranges(starts, stops, self.window)

    def local_mask(self, device: int) -> Mask:
        """The mask of one device's queries on its keys, sink first, then the window.

        Rows and keys are as many as `length`, for kernels know self-attention alone; a row
        without a query keeps the first key and nothing else.
        """
        first, stop = self.bounds[device], self.bounds[device + 1]
        start = self.window_start(device)
        # Keys of the sink are not kept again in the band: in a spatial mask they lie in it.
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
        devices: over which the tokens are spread, from 1.
        balanced: whether queries move to a neighbour so that all devices keep equally many
            pairs; else each device takes the queries that lie on it.

    Raises:
        TypeError: `mask` is no mask.
        ValueError: the mask has text or no band, or is too small for so many devices.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a cinetile mask, got {type(mask).__name__}")
    devices = _checks.integer("devices", devices, minimum=1, maximum=mask.num_tokens)
    if mask.grid.text_tokens:
        raise ValueError(
            f"mask must have no text, whose queries keep all keys, got {mask.grid}; "
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
    """Bounds between which the mask keeps equally many pairs, to within a row."""
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
