"""Band edges in closed form: values, sums and inverses without enumerating positions.

An edge maps a query position to a key position, `edge(q) = start + live(clip(q + offset, 0, L))`.
`live(x)` counts the positions below `x` that hold a band key. With `s` skipped positions at the
front of each period of `p`, write `x = a p + r` with `0 <= r < p`; then

    live(x) = a (p - s) + max(r - s, 0)

A straight edge (`s = 0`) is `live(x) = x`. The sum that counting pairs needs, with `d = p - s` and
`u = max(r - s, 0)`, adds `a` whole periods, each `m = 0 .. a - 1` with `p` times `m d` and
`0 + 1 + ... + (d - 1)`, and then `r` positions of the last period:

    sum over 0 <= y < x of live(y) = p d a (a - 1) / 2 + a d (d - 1) / 2 + a d r + u (u - 1) / 2

The inverse, the smallest `x` with `live(x) >= n` for `n >= 1`, is one past the n-th band position:

    x = floor((n - 1) / d) p + (n - 1) mod d + s + 1
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int

from cinetile import _checks

# Token positions stay below this, so that sums over all pairs stay within int64.
MAX_POSITION = 1 << 31


@dataclass(frozen=True)
class Edge:
    """A non-decreasing staircase over query positions.

    `edge(q) = start + live(clip(q + offset, 0, length))`, where `live(x)` counts the positions
    below `x` that are not skipped, and the first `skipped` of every `period` positions are.
    A straight band edge has nothing skipped. A token-major band over keys of which the first
    frames stand elsewhere (as the sink) skips `skipped` frames of each period of all frames.

    Attributes:
        start: key position of the first key that the edge can point at.
        offset: shift of the edge along the diagonal; minus or plus the band's width.
        length: positions that the edge can run through; 0 makes it constant.
        period: positions after which the pattern of skipped positions repeats.
        skipped: first positions of each period that hold no key; below `period`.
    """

    start: int
    offset: int = 0
    length: int = 0
    period: int = 1
    skipped: int = 0

    def __post_init__(self) -> None:
        for name, minimum in (("start", 0), ("length", 0), ("period", 1), ("skipped", 0)):
            _checks.integer(name, getattr(self, name), minimum=minimum, maximum=MAX_POSITION)
        _checks.integer("offset", self.offset, minimum=-MAX_POSITION, maximum=MAX_POSITION)
        _checks.integer("skipped", self.skipped, minimum=0, maximum=self.period - 1)

    @property
    def top(self) -> int:
        """The highest position that the edge can reach."""
        return self.start + int(self._live(np.array([self.length]))[0])

    def is_never_above(self, other: "Edge") -> bool:
        """Whether this is the same staircase as `other` or a constant, and nowhere above it."""
        if self.length == 0 and other.length == 0:
            return self.start <= other.start
        return replace(self, offset=other.offset) == other and self.offset <= other.offset

    def __call__(self, query: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        """Key position of the edge at each query position."""
        return self.start + self._live(np.clip(query + self.offset, 0, self.length))

    def sum_below(self, query: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        """Sum of the edge over all query positions in `[0, query)`."""
        return (
            query * self.start
            + self._live_sum(query + self.offset)
            - self._live_sum(np.asarray(self.offset))
        )

    def first_reaching(self, key: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        """Smallest query position, of any sign, whose edge is at least `key`.

        Where the edge is everywhere or nowhere that high, the answer lies so far below or
        above every position that clipping it to a range of rows gives the right bound.
        """
        wanted = key - self.start
        live_length = self._live(np.array([self.length]))
        last = np.maximum(wanted, 1) - 1
        live_per_period = self.period - self.skipped
        position = last // live_per_period * self.period + last % live_per_period + self.skipped
        reached = position + 1 - self.offset
        return np.where(wanted <= 0, -_FAR, np.where(wanted > live_length, _FAR, reached))

    def clipped_sum(
        self,
        first: Int[np.ndarray, "..."],
        stop: Int[np.ndarray, "..."],
        low: Int[np.ndarray, "..."],
        high: Int[np.ndarray, "..."],
    ) -> Int[np.ndarray, "..."]:
        """Sum of `clip(edge(q), low, high)` over `first <= q < stop`, for `low <= high`."""
        rises = np.clip(self.first_reaching(low), first, stop)
        tops = np.clip(self.first_reaching(high), first, stop)
        between = self.sum_below(tops) - self.sum_below(rises)
        return (rises - first) * low + between + (stop - tops) * high

    def _live(self, position: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        if self.skipped == 0:
            return position
        periods, rest = np.divmod(position, self.period)
        return periods * (self.period - self.skipped) + np.maximum(rest - self.skipped, 0)

    def _live_sum(self, position: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        """Sum of `live(clip(x, 0, length))` over all `x < position`."""
        inside = np.clip(position, 0, self.length)
        live = self.period - self.skipped
        periods, rest = np.divmod(inside, self.period)
        above = np.maximum(rest - self.skipped, 0)
        whole = live * self.period * (periods * (periods - 1) // 2)
        whole = whole + periods * (live * (live - 1) // 2)
        partial = periods * live * rest + above * (above - 1) // 2
        beyond = np.maximum(position - self.length, 0) * self._live(np.array([self.length]))
        return whole + partial + beyond


# Far beyond any token count, yet products with one stay within int64.
_FAR = 1 << 40
