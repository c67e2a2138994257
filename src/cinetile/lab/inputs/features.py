"""Pixels to features: low-order cosine coefficients of the block that a token covers."""

import numpy as np
from jaxtyping import Bool, Float, UInt8

_ORDERS = 3
# One grey level of 8 bits: what varies less is noise of the codec, not content.
_RIDGE = (2 / 255) ** 2


def num_coefficients(block_height: int, block_width: int) -> int:
    """Returns how many coefficients `block_coefficients` gives for a block."""
    return 3 * int(_low_orders(block_height, block_width).sum())


def block_coefficients(
    pixels: UInt8[np.ndarray, "rows columns 3"], block_height: int, block_width: int
) -> Float[np.ndarray, "places coefficients"]:
    """Takes the 2-D discrete cosine transform of every block, up to total order 2.

    Args:
        pixels: One RGB frame; rows and columns are multiples of the block's.
        block_height: Rows of pixels of a block.
        block_width: Columns of pixels of a block.

    Returns:
        Coefficients of the blocks in row-major order, for colours in [-1, 1], scaled so that
        the zeroth is the block's mean colour: up to six for each of the three channels.
    """
    height, width = pixels.shape[0] // block_height, pixels.shape[1] // block_width
    vertical, horizontal = _cosines(block_height), _cosines(block_width)
    colours = pixels.astype(np.float32) / 127.5 - 1
    # One matrix product per row of blocks, then a small one per block.
    rows = vertical @ colours.reshape(height, block_height, width * block_width * 3)
    blocks = horizontal @ rows.reshape(height, len(vertical), width, block_width, 3)
    low = _low_orders(block_height, block_width)
    return blocks.transpose(0, 2, 1, 3, 4)[:, :, low].reshape(height * width, -1)


def standardise(
    features: Float[np.ndarray, "tokens features"],
) -> Float[np.ndarray, "tokens features"]:
    """Scales every feature to zero mean and unit variance over the tokens.

    A ridge of one grey level keeps features that hardly vary small.
    """
    mean = features.mean(axis=0, dtype=np.float64)
    variance = features.var(axis=0, dtype=np.float64)
    return ((features - mean) / np.sqrt(variance + _RIDGE)).astype(np.float32)


def _low_orders(block_height: int, block_width: int) -> Bool[np.ndarray, "vertical horizontal"]:
    orders = np.indices((min(_ORDERS, block_height), min(_ORDERS, block_width)))
    return orders.sum(axis=0) < _ORDERS


def _cosines(size: int) -> Float[np.ndarray, "orders size"]:
    orders = np.arange(min(_ORDERS, size))
    waves = np.cos(np.pi / size * np.outer(orders, np.arange(size) + 0.5))
    return (waves * np.where(orders, np.sqrt(2), 1)[:, np.newaxis] / size).astype(np.float32)
