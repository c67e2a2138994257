"""A mask as runs of rows whose keys are windows: what dense kernels can compute exactly.

A row of a mask keeps a prefix and a band. A straight band is a window of FlashAttention, which
moves by one key per row. A token-major band over keys without the first frames is not straight:
a row of another frame has a window of nearly constant width, and a row of a first frame (which
has no key of its own) has windows in the keys of each other frame. With `w = m F + r`, a query
`(t, f)` keeps a key `(t', f')` where `t' >= t - floor((w - (f - f')) / F)` and
`t' <= t + floor((w + (f - f')) / F)`.
"""

import functools
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from jaxtyping import Int

from cinetile.masks import Mask
from cinetile.masks.mask import RowSegment

MAX_EXTRA_KEYS = 4
"""Keys per row and side that may lie outside the window that all rows share."""


class NotWindows(ValueError):  # noqa: N818 (a reason, which callers report; no mistake)
    """Says why a mask is not made of windows."""


@dataclass(frozen=True)
class Window:
    """Query rows and keys of which row `i` keeps `i + K - Q - left <= j <= i + K - Q + right`.

    `Q` and `K` count the rows and keys. That is FlashAttention's window, aligned at the bottom
    right. Every row keeps at least one key.

    Attributes:
        row_start: first row.
        row_stop: one past the last row.
        key_start: first key.
        key_stop: one past the last key.
        left: keys before the diagonal; None where every row keeps every key.
        right: keys behind the diagonal; None where every row keeps every key.
        stride: keys of a token that stand side by side; 1 for plain keys. Rows and keys then
            count tokens, and the window is one of tokens.
        lane_start: first of the side-by-side keys that take part.
        lane_stop: one past the last of them.
    """

    row_start: int
    row_stop: int
    key_start: int
    key_stop: int
    left: int | None = None
    right: int | None = None
    stride: int = 1
    lane_start: int = 0
    lane_stop: int = 1

    @property
    def num_rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def num_keys(self) -> int:
        return self.key_stop - self.key_start


@dataclass(frozen=True, eq=False)
class SingleKeys:
    """Rows that keep one further key each.

    Attributes:
        rows: the rows, ascending.
        keys: the key of each of them.
    """

    rows: Int[np.ndarray, " rows"]
    keys: Int[np.ndarray, " rows"]


Piece: TypeAlias = Window | SingleKeys


@dataclass(frozen=True, eq=False)
class RowGroup:
    """A run of rows and the pieces that together give their keys, each pair once.

    Attributes:
        start: first row.
        stop: one past the last row.
        pieces: which keys the rows keep; a piece may leave some of the rows out.
    """

    start: int
    stop: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, eq=False)
class MaskWindows:
    """A mask made of windows.

    Attributes:
        mask: the mask.
        query_order: frame-major position of the query at each row.
        key_order: frame-major position of the key at each place. Text that a prompt may leave
            unused stands last.
        groups: all rows.
    """

    mask: Mask
    query_order: Int[np.ndarray, " tokens"]
    key_order: Int[np.ndarray, " tokens"]
    groups: tuple[RowGroup, ...]

    def without_last_keys(self, absent: int) -> tuple[RowGroup, ...]:
        """The groups where the last keys are padding, and so are the rows of these tokens.

        Args:
            absent: how many text tokens are padding.
        """
        if absent == 0:
            return self.groups
        end = self.mask.num_tokens - absent
        dead = np.isin(self.query_order, self.key_order[end:])
        groups = []
        for group in self.groups:
            alive = group.start + np.flatnonzero(~dead[group.start : group.stop])
            for run in np.split(alive, np.flatnonzero(np.diff(alive) != 1) + 1):
                if run.size:
                    start, stop = int(run[0]), int(run[-1]) + 1
                    pieces = (_cut(piece, start, stop, end) for piece in group.pieces)
                    groups.append(RowGroup(start, stop, tuple(filter(None, pieces))))
        return tuple(groups)


def _cut(piece: Piece, start: int, stop: int, key_stop: int) -> Piece | None:
    """A piece without rows outside `[start, stop)` and without keys from `key_stop`."""
    if isinstance(piece, SingleKeys) or piece.left is not None or piece.stride > 1:
        return piece  # video rows and keys, none of which is ever padding
    cut = replace(
        piece,
        row_start=max(piece.row_start, start),
        row_stop=min(piece.row_stop, stop),
        key_stop=min(piece.key_stop, key_stop),
    )
    return cut if cut.num_rows > 0 and cut.num_keys > 0 else None


@functools.lru_cache(maxsize=64)
def mask_windows(mask: Mask) -> MaskWindows:
    """Cuts a mask into windows.

    Raises:
        NotWindows: it is not made of windows; says why.
    """
    keys = _KeyPlaces.of(mask)
    leading = {segment.low.skipped for segment in mask.segments if segment.low.skipped}
    if len(leading) > 1:
        raise NotWindows("its bands skip different numbers of first frames")
    query_order = replace(mask.query_order, leading_frames=next(iter(leading), 0))
    groups: list[RowGroup] = []
    for segment in mask.segments:
        if segment.low.skipped:
            groups += _token_major_groups(mask, segment, keys)
        else:
            groups.append(_straight_group(segment, keys))
    if leading and mask.query_order.leading_frames:
        raise NotWindows("its queries stand with the first frames in front")
    return MaskWindows(mask, query_order.indices(mask.grid), keys.order, tuple(groups))


@dataclass(frozen=True, eq=False)
class _KeyPlaces:
    """Where the keys stand: those behind the prefix, the rest of the prefix, the text.

    Attributes:
        order: frame-major position of the key at each place.
        place: place of each key of the mask's own order.
    """

    order: Int[np.ndarray, " tokens"]
    place: Int[np.ndarray, " tokens"]

    @classmethod
    def of(cls, mask: Mask) -> "_KeyPlaces":
        size = mask.num_tokens
        moved = np.arange(size)
        text_start, text_stop = mask.key_order.text_range(mask.grid)
        if text_stop > text_start == 0 and not mask.key_order.padded_text:
            shared = [
                segment.prefix for segment in mask.segments if text_stop <= segment.prefix < size
            ]
            prefix = min(shared, default=text_stop)
            moved = np.concatenate([moved[prefix:], moved[text_stop:prefix], moved[:text_stop]])
        return cls(mask.key_order.indices(mask.grid)[moved], np.argsort(moved))

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Runs of places that hold the keys `[start, stop)` of the mask's own order."""
        if stop <= start:
            return []
        places = np.sort(self.place[start:stop])
        cuts = np.flatnonzero(np.diff(places) != 1) + 1
        return [(int(run[0]), int(run[-1]) + 1) for run in np.split(places, cuts)]

    def run(self, start: int, stop: int) -> tuple[int, int]:
        """The only run of these keys, which must keep their order."""
        places = self.place[start:stop]
        if np.any(np.diff(places) != 1):
            raise NotWindows("the keys of its band do not stand side by side")
        return int(places[0]), int(places[-1]) + 1


def _straight_group(segment: RowSegment, keys: _KeyPlaces) -> RowGroup:
    """Rows whose band moves by one key per row, or not at all."""
    rows = segment.stop - segment.start
    low, high = segment.low, segment.high
    dense_stop, window = segment.prefix, None
    if low.length == 0 and high.length == 0:
        band = max(low.start, segment.prefix), high.start
    else:
        band = max(low.start, segment.prefix), low.start + low.length
        # Row i keeps the keys from i + lowest to i + highest, counted from the band's first.
        shift = segment.start - (band[0] - low.start)
        lowest, highest = shift + low.offset, shift + high.offset - 1
        size = band[1] - band[0]
        if size > 0 and not (lowest <= 1 - rows and highest >= size - 1):
            first, stop = keys.run(*band)
            window = _window((segment.start, segment.stop), (first, stop), lowest, highest)
            band = (0, 0)
    dense = keys.runs(0, dense_stop)
    if band[1] > band[0]:
        dense = keys.runs(0, band[1]) if band[0] == dense_stop else dense + keys.runs(*band)
    pieces = [Window(segment.start, segment.stop, *run) for run in dense]
    return RowGroup(segment.start, segment.stop, (*pieces, *([window] if window else [])))


def _window(
    rows: tuple[int, int], keys: tuple[int, int], lowest: int, highest: int
) -> Window | None:
    """The window in which row `i` keeps the keys `i + lowest` to `i + highest` that exist.

    Rows without a key and keys without a row are left out, so that both sides of the window
    count at least 0 keys; None if nothing is left.
    """
    first_row = max(0, -highest)
    stop_row = min(rows[1] - rows[0], keys[1] - keys[0] - lowest)
    if stop_row <= first_row or highest < lowest:
        return None
    lowest, highest = lowest + first_row, highest + first_row
    num_rows = stop_row - first_row
    first_key = max(0, lowest)
    stop_key = min(keys[1] - keys[0], num_rows + highest)
    shift = stop_key - first_key - num_rows
    return Window(
        rows[0] + first_row,
        rows[0] + stop_row,
        keys[0] + first_key,
        keys[0] + stop_key,
        shift - (lowest - first_key),
        highest - first_key - shift,
    )


def _token_major_groups(mask: Mask, segment: RowSegment, keys: _KeyPlaces) -> list[RowGroup]:
    """Rows of a token-major band over keys that leave out the first frames."""
    frames, skipped = segment.low.period, segment.low.skipped
    tokens, rest = divmod(segment.low.length, frames)
    before, after = -(segment.low.offset + segment.start), segment.high.offset + segment.start - 1
    if (
        rest
        or segment.stop - segment.start != segment.low.length
        or segment.prefix != segment.low.start
        or min(before, after) < 0
        or mask.query_order.layout != "token_major"
    ):
        raise NotWindows("its band is not one of whole tokens around each query")
    live = frames - skipped
    places = keys.run(segment.prefix, segment.prefix + tokens * live)
    prefix = keys.runs(0, segment.prefix)
    first_other = segment.start + skipped * tokens

    leading: list[Piece] = [Window(segment.start, first_other, *run) for run in prefix]
    for frame in range(skipped):
        leading += _leading_windows(
            segment.start + frame * tokens,
            places[0],
            frame,
            (tokens, frames, skipped),
            before,
            after,
        )
    others: list[Piece] = [Window(first_other, segment.stop, *run) for run in prefix]
    others += _other_frames(first_other, places, (tokens, frames, skipped), before, after)
    return [
        RowGroup(segment.start, first_other, tuple(leading)),
        RowGroup(first_other, segment.stop, tuple(others)),
    ]


def _leading_windows(
    first_row: int, first_key: int, frame: int, sizes: tuple[int, int, int], before: int, after: int
) -> list[Piece]:
    """Windows of a leading frame's rows in the keys of every other frame."""
    tokens, frames, skipped = sizes
    distance = frame - np.arange(skipped, frames)
    lefts, rights = (before - distance) // frames, (after + distance) // frames
    cuts = np.flatnonzero((np.diff(lefts) != 0) | (np.diff(rights) != 0)) + 1
    pieces: list[Piece] = []
    for lanes in np.split(np.arange(frames - skipped), cuts):
        left, right = int(lefts[lanes[0]]), int(rights[lanes[0]])
        window = _window((first_row, first_row + tokens), (0, tokens), -left, right)
        if window is not None:
            live = frames - skipped
            pieces.append(
                replace(
                    window,
                    key_start=first_key + window.key_start * live,
                    key_stop=first_key + window.key_stop * live,
                    stride=live,
                    lane_start=int(lanes[0]),
                    lane_stop=int(lanes[-1]) + 1,
                )
            )
    return pieces


def _other_frames(
    first_row: int, places: tuple[int, int], sizes: tuple[int, int, int], before: int, after: int
) -> list[Piece]:
    """The window that rows of the other frames share, and the keys that some rows keep besides."""
    tokens, frames, skipped = sizes
    live = frames - skipped

    def rank(position: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        """Keys before a token-major position, counted from that of position 0."""
        periods, rest = np.divmod(position, frames)
        return periods * live + np.maximum(rest - skipped, 0)

    frame = np.arange(skipped, frames)
    left = rank(frame) - rank(frame - before)
    right = rank(frame + after + 1) - rank(frame + 1)
    if max(int(np.ptp(left)), int(np.ptp(right))) > MAX_EXTRA_KEYS:
        raise NotWindows(
            f"rows of different frames differ by more than {MAX_EXTRA_KEYS} keys at an end of "
            "their bands"
        )
    size = tokens * live
    window = _window((first_row, first_row + size), places, -int(left.min()), int(right.min()))
    pieces: list[Piece] = [] if window is None else [window]
    row = np.arange(size)
    for sign, reach in ((-1, left), (1, right)):
        for extra in range(1, int(np.ptp(reach)) + 1):
            key = row + sign * (int(reach.min()) + extra)
            chosen = (reach[row % live] >= reach.min() + extra) & (key >= 0) & (key < size)
            if chosen.any():
                pieces.append(SingleKeys(first_row + row[chosen], places[0] + key[chosen]))
    return pieces
