"""Moving arrays between frame-major order and the order that a mask prefers."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from cinetile.grid import TokenGrid, TokenOrder


def place(
    array: Shaped[Array, "..."], order: TokenOrder, grid: TokenGrid, *, axis: int
) -> Shaped[Array, "..."]:
    """Moves the tokens along `axis` from frame-major order to `order`.

    One slice-and-transpose pass, or nothing at all when no token moves.
    """
    if order.is_frame_major(grid):
        return array
    text_start = 0 if grid.text_first else grid.num_video_tokens
    video_start = grid.text_tokens if grid.text_first else 0
    leading_stop = video_start + order.leading_frames * grid.tokens_per_frame
    video_stop = video_start + grid.num_video_tokens
    valid_stop = text_start + grid.text_tokens - order.padded_text

    valid = _tokens(array, text_start, valid_stop, axis)
    leading = _tokens(array, video_start, leading_stop, axis)
    others = _tokens(array, leading_stop, video_stop, axis)
    padding = _tokens(array, valid_stop, text_start + grid.text_tokens, axis)
    if order.layout == "token_major":
        others = _swap(others, grid.frames - order.leading_frames, grid.tokens_per_frame, axis)
    if order.text_first:
        parts = (valid, leading, others, padding)
    else:
        parts = (leading, others, valid, padding)
    return _concatenate(parts, axis)


def restore(
    array: Shaped[Array, "..."], order: TokenOrder, grid: TokenGrid, *, axis: int
) -> Shaped[Array, "..."]:
    """Moves the tokens along `axis` from `order` back to frame-major order.

    The exact inverse of `place`.
    """
    if order.is_frame_major(grid):
        return array
    num_valid = grid.text_tokens - order.padded_text
    leading_start = num_valid if order.text_first else 0
    leading_stop = leading_start + order.leading_frames * grid.tokens_per_frame
    video_stop = leading_start + grid.num_video_tokens
    valid_start = 0 if order.text_first else video_stop

    valid = _tokens(array, valid_start, valid_start + num_valid, axis)
    leading = _tokens(array, leading_start, leading_stop, axis)
    others = _tokens(array, leading_stop, video_stop, axis)
    padding = _tokens(array, grid.num_tokens - order.padded_text, grid.num_tokens, axis)
    if order.layout == "token_major":
        others = _swap(others, grid.tokens_per_frame, grid.frames - order.leading_frames, axis)
    if grid.text_first:
        parts = (valid, padding, leading, others)
    else:
        parts = (leading, others, valid, padding)
    return _concatenate(parts, axis)


def _tokens(array: Shaped[Array, "..."], start: int, stop: int, axis: int) -> Shaped[Array, "..."]:
    index = [slice(None)] * array.ndim
    index[axis] = slice(start, stop)
    return array[tuple(index)]


def _swap(array: Shaped[Array, "..."], rows: int, columns: int, axis: int) -> Shaped[Array, "..."]:
    """Transposes the tokens along `axis`, seen as a `rows` x `columns` matrix."""
    axis %= array.ndim
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    matrix = array.reshape(*before, rows, columns, *after)
    return jnp.swapaxes(matrix, axis, axis + 1).reshape(array.shape)


def _concatenate(parts: tuple[Shaped[Array, "..."], ...], axis: int) -> Shaped[Array, "..."]:
    present = [part for part in parts if part.shape[axis]]
    return present[0] if len(present) == 1 else jnp.concatenate(present, axis=axis)
