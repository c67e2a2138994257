"""The mask that everything else is built on: a sink prefix and one band of keys for each query."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from cinetile import _checks
from cinetile.grid import TokenGrid, TokenOrder
from cinetile.masks.edges import Edge

# A brute-force mask is for looking at and for tests; past this it is a mistake.
MAX_DENSE_TOKENS = 8192


@dataclass(frozen=True)
class RowSegment:
    """Query rows `[start, stop)` that share one sink prefix and one pair of band edges.

    A row keeps key `k` if `k < prefix` or `low(q) <= k < high(q)`.

    Attributes:
        start: first query position.
        stop: one past the last query position.
        prefix: keys at the front that every row of the segment keeps.
        low: first key of the band; never above `high`.
        high: one past the last key of the band.
    """

    start: int
    stop: int
    prefix: int
    low: Edge
    high: Edge

    def __post_init__(self) -> None:
        _checks.integer("start", self.start, minimum=0)
        _checks.integer("stop", self.stop, minimum=self.start + 1)
        _checks.integer("prefix", self.prefix, minimum=0)
        if not self.low.is_never_above(self.high):
            raise ValueError(f"low must nowhere be above high, got {self.low} and {self.high}")


@dataclass(frozen=True)
class Mask:
    """Which keys each query attends to, in closed form; never an N x N array.

    Queries and keys are counted in the mask's own orders, which are chosen so that every row is
    a prefix and one band. Build masks with `spatial_mask`, `temporal_mask`, `svg_mask` or
    `dense_mask`.

    Attributes:
        name: what the mask is, for tables and pictures.
        grid: the tokens that it covers.
        query_order: order in which query positions count.
        key_order: order in which key positions count.
        segments: rows in ascending order that together cover all queries.
        width: largest distance between a query and a key of its band, at most the number of
            tokens; None without a band.
    """

    name: str
    grid: TokenGrid
    query_order: TokenOrder
    key_order: TokenOrder
    segments: tuple[RowSegment, ...]
    width: int | None = None

    def __post_init__(self) -> None:
        for order in (self.query_order, self.key_order):
            order.check_fits(self.grid)
        covered = 0
        for segment in self.segments:
            if segment.start != covered:
                raise ValueError(f"segments must follow on each other, got {segment} at {covered}")
            covered = segment.stop
            if max(segment.prefix, segment.high.top) > self.num_tokens:
                raise ValueError(
                    f"segments must keep at most {self.num_tokens} keys, got {segment}"
                )
        if covered != self.num_tokens:
            raise ValueError(f"segments must cover {self.num_tokens} rows, got {covered}")

    @property
    def num_tokens(self) -> int:
        return self.grid.num_tokens

    @property
    def kept_pairs(self) -> int:
        """Query-key pairs that the mask keeps, exactly."""
        start, stop = np.array([0]), np.array([self.num_tokens])
        return int(self.count_kept(start, stop, start, stop)[0])

    @property
    def density(self) -> float:
        """Kept pairs as a fraction of all pairs."""
        return self.kept_pairs / self.num_tokens**2

    def row_edges(
        self, rows: Int[np.ndarray, " rows"] | None = None
    ) -> tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " rows"], Int[np.ndarray, " rows"]]:
        """Prefix, first and one-past-last band key of each query position (int32).

        Args:
            rows: query positions in the mask's query order; all of them by default.
        """
        rows = np.arange(self.num_tokens) if rows is None else np.asarray(rows)
        edges = np.zeros((3, rows.size), np.int32)
        for segment in self.segments:
            inside = (segment.start <= rows) & (rows < segment.stop)
            edges[0, inside] = segment.prefix
            edges[1, inside] = segment.low(rows[inside])
            edges[2, inside] = segment.high(rows[inside])
        return edges[0], edges[1], edges[2]

    def band_centre(self, rows: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
        """Key position in the middle of each query's band, had the sequence no ends (int32)."""
        centre = np.zeros(rows.size, np.int32)
        for segment in self.segments:
            inside = (segment.start <= rows) & (rows < segment.stop)
            offset = (segment.low.offset + segment.high.offset) // 2
            centre[inside] = replace(segment.low, offset=offset)(rows[inside])
        return centre

    def count_kept(
        self,
        query_start: Int[np.ndarray, "..."],
        query_stop: Int[np.ndarray, "..."],
        key_start: Int[np.ndarray, "..."],
        key_stop: Int[np.ndarray, "..."],
    ) -> Int[np.ndarray, "..."]:
        """Kept pairs of each rectangle of query and key positions, without enumerating any."""
        total = np.zeros(np.broadcast(query_start, key_start).shape, np.int64)
        for segment in self.segments:
            first = np.clip(query_start, segment.start, segment.stop)
            stop = np.clip(query_stop, segment.start, segment.stop)
            # The band counts only from where the prefix ends, so that no pair counts twice.
            band_start = np.clip(segment.prefix, key_start, key_stop)
            total += (stop - first) * (band_start - key_start)
            total += segment.high.clipped_sum(first, stop, band_start, key_stop)
            total -= segment.low.clipped_sum(first, stop, band_start, key_stop)
        return total

    def to_dense(self) -> Bool[np.ndarray, "tokens tokens"]:
        """The mask as a boolean matrix, queries and keys in frame-major order.

        Raises:
            ValueError: the grid has more than 8,192 tokens.
        """
        require_small_grid("to_dense", self.num_tokens)
        prefix, low, high = (edge[:, None] for edge in self.row_edges())
        keys = np.arange(self.num_tokens)[None, :]
        return to_frame_major(keeps(keys, prefix, low, high), self)

    def __str__(self) -> str:
        return f"{self.name} mask on {self.grid}, {self.density:.2%} of the pairs kept"


def keeps(key: Any, prefix: Any, low: Any, high: Any) -> Any:
    """Whether a row with these edges keeps `key`; for NumPy and JAX arrays that broadcast."""
    return (key < prefix) | ((low <= key) & (key < high))


def to_frame_major(
    placed: Bool[np.ndarray, "tokens tokens"], mask: Mask
) -> Bool[np.ndarray, "tokens tokens"]:
    """Moves a boolean matrix from the orders of `mask` to frame-major order on both sides."""
    frame_major = np.empty_like(placed)
    queries, keys = (order.indices(mask.grid) for order in (mask.query_order, mask.key_order))
    frame_major[np.ix_(queries, keys)] = placed
    return frame_major


def require_small_grid(what: str, num_tokens: int) -> None:
    """Raises ValueError where an N x N matrix was asked for on a large grid."""
    if num_tokens > MAX_DENSE_TOKENS:
        raise ValueError(
            f"{what} builds an N x N matrix and takes at most {MAX_DENSE_TOKENS:,} tokens, "
            f"got {num_tokens:,}; use kept_pairs, row_edges or plan_tiles on large grids"
        )
