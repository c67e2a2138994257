"""Rotary position embedding over frame, row and column, by Wan's conventions."""

import numpy as np
from jaxtyping import Float

_THETA = 10_000.0


def axis_dims(head_dim: int) -> tuple[int, int, int]:
    """Splits an even `head_dim` into the channels of frame, row and column: 128 = 44 + 42 + 42."""
    spatial = 2 * (head_dim // 6)
    return head_dim - 2 * spatial, spatial, spatial


def axis_frequencies(axis_dim: int, theta: float = _THETA) -> Float[np.ndarray, " pairs"]:
    """Returns the angle per position of every channel pair of an axis, in radians."""
    return theta ** (-np.arange(0, axis_dim, 2) / axis_dim)


def rotary_tables(
    frames: int, height: int, width: int, head_dim: int, theta: float = _THETA
) -> tuple[Float[np.ndarray, "tokens pairs"], Float[np.ndarray, "tokens pairs"]]:
    """Returns the cosine and sine of every channel pair's angle, for frame-major tokens.

    Args:
        frames: Token frames.
        height: Rows of tokens of a frame.
        width: Columns of tokens of a frame.
        head_dim: Channels of a head, even.
        theta: Ratio of the fastest and the slowest rotation; Wan's by default.
    """
    positions = np.indices((frames, height, width)).reshape(3, -1)
    angles = np.concatenate(
        [
            np.outer(position, axis_frequencies(axis_dim, theta))
            for position, axis_dim in zip(positions, axis_dims(head_dim), strict=True)
        ],
        axis=1,
    )
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(
    vectors: Float[np.ndarray, "tokens head_dim"],
    cosine: Float[np.ndarray, "tokens pairs"],
    sine: Float[np.ndarray, "tokens pairs"],
) -> Float[np.ndarray, "tokens head_dim"]:
    """Turns every pair of neighbouring channels (0 and 1, 2 and 3, ...) by its angle."""
    even, odd = vectors[:, 0::2], vectors[:, 1::2]
    rotated = np.empty_like(vectors)
    rotated[:, 0::2] = even * cosine - odd * sine
    rotated[:, 1::2] = even * sine + odd * cosine
    return rotated
