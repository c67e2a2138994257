"""Masks as windows: every pair of the mask once, and no other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Example, examples

import cinetile as ct

pytest.importorskip("torch", reason="PyTorch (extra `rivals`) is missing")

from cinetile.kernels.torch.windows import (
    MaskWindows,
    NotWindows,
    RowGroup,
    SingleKeys,
    Window,
    mask_windows,
)


def counts(windows: MaskWindows, groups: tuple[RowGroup, ...]) -> np.ndarray:
    """How often each pair is computed, frame-major."""
    placed = np.zeros((windows.mask.num_tokens,) * 2, int)
    for group in groups:
        for piece in group.pieces:
            if isinstance(piece, SingleKeys):
                placed[piece.rows, piece.keys] += 1
            else:
                add_window(placed, piece)
    found = np.zeros_like(placed)
    found[np.ix_(windows.query_order, windows.key_order)] = placed
    return found


def add_window(placed: np.ndarray, window: Window) -> None:
    tokens = window.num_keys // window.stride
    rows, columns = np.arange(window.num_rows)[:, None], np.arange(tokens)[None, :]
    kept = np.ones((window.num_rows, tokens), bool)
    if window.left is not None and window.right is not None:
        assert window.left >= 0 <= window.right
        shift = tokens - window.num_rows
        kept = (rows + shift - window.left <= columns) & (columns <= rows + shift + window.right)
    assert kept.any(axis=1).all(), "FlashAttention's log-sum-exp of an empty row is not defined"
    for lane in range(window.lane_start, window.lane_stop):
        keys = window.key_start + np.arange(tokens) * window.stride + lane
        placed[window.row_start : window.row_stop, keys] += kept


@given(examples)
def test_windows_hold_every_pair_once(example: Example) -> None:
    windows = mask_windows(example.mask)
    np.testing.assert_array_equal(counts(windows, windows.groups), example.kept.astype(int))
    covered = [row for group in windows.groups for row in range(group.start, group.stop)]
    assert covered == list(range(example.mask.num_tokens))


@given(examples, st.data())
def test_padding_is_neither_row_nor_key(example: Example, data: st.DataObject) -> None:
    grid = example.mask.grid
    if example.mask.key_order.padded_text:
        return
    windows = mask_windows(example.mask)
    absent = data.draw(st.integers(0, grid.text_tokens))
    text_stop = grid.text_tokens if grid.text_first else grid.num_tokens
    exists = np.ones(grid.num_tokens, bool)
    exists[text_stop - absent : text_stop] = False
    found = counts(windows, windows.without_last_keys(absent))
    np.testing.assert_array_equal(found, example.kept & exists & exists[:, None])


@pytest.mark.parametrize("width", range(40))
@pytest.mark.parametrize("sink_frames", [0, 1, 2, 3])
def test_temporal_masks_of_any_width_are_windows(width: int, sink_frames: int) -> None:
    mask = ct.temporal_mask(ct.TokenGrid(5, 2, 6), width=width, sink_frames=sink_frames)
    windows = mask_windows(mask)
    np.testing.assert_array_equal(counts(windows, windows.groups), mask.to_dense().astype(int))


def test_whole_multiples_of_the_frames_need_no_single_keys() -> None:
    for width, expected in ((63, 0), (64, 2)):
        windows = mask_windows(ct.temporal_mask(ct.TokenGrid(21, 9, 10), width=width))
        pieces = [piece for group in windows.groups for piece in group.pieces]
        assert sum(isinstance(piece, SingleKeys) for piece in pieces) == expected


def test_rows_of_one_frame_may_differ_too_much() -> None:
    mask = ct.temporal_mask(ct.TokenGrid(12, 2, 6), width=6, sink_frames=6)
    with pytest.raises(NotWindows, match="more than 4 keys"):
        mask_windows(mask)


def test_pairs_of_a_large_spatial_mask() -> None:
    """The window of all queries and the prefix hold the published share of the pairs."""
    grid = ct.TokenGrid.from_video(num_frames=81, height=720, width=1280)
    mask = ct.spatial_mask(grid, density=0.35)
    (group,) = mask_windows(mask).groups
    prefix, window = group.pieces
    assert isinstance(prefix, Window)
    assert isinstance(window, Window)
    assert mask.width is not None
    assert window.left == window.right == mask.width
    row = np.arange(window.num_rows, dtype=np.int64)
    shift = window.num_keys - window.num_rows
    low = np.maximum(row + shift - mask.width, 0)
    high = np.minimum(row + shift + mask.width + 1, window.num_keys)
    pairs = int((high - low).sum()) + prefix.num_rows * prefix.num_keys
    assert pairs == mask.kept_pairs
