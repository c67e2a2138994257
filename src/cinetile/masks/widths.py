"""Density of a band and its width, both ways."""

import math
from fractions import Fraction

from cinetile import _checks

WIDTH_MULTIPLE = 128


def width_from_density(
    num_tokens: int, density: float, *, text_tokens: int = 0, multiple: int = WIDTH_MULTIPLE
) -> int:
    """Band width at which `|q - k| <= width` keeps about `density` of all pairs.

    `width = N * (1 - sqrt(1 - density'))`, rounded up to a multiple of `multiple`, where
    `density' = density - 2 * text_tokens / N` leaves out the dense rows and columns of the text
    (Sparse VideoGen, arXiv:2502.01776). Sink keys come on top of `density`.

    Args:
        num_tokens: all tokens of the sequence, text included.
        density: wanted fraction of kept pairs, in (0, 1].
        text_tokens: tokens whose rows and columns are dense.
        multiple: the width is rounded up to a multiple of this; 1 for no rounding.

    Returns:
        The width in tokens; at most `num_tokens`.

    Raises:
        ValueError: a number is out of range, or the text by itself takes more than `density`.
    """
    num_tokens = _checks.integer("num_tokens", num_tokens, minimum=1)
    text_tokens = _checks.integer("text_tokens", text_tokens, minimum=0, maximum=num_tokens)
    multiple = _checks.integer("multiple", multiple, minimum=1)
    density = _checks.fraction("density", density)
    if density == 1.0:
        return num_tokens
    width = exact_width(num_tokens, density, text_tokens)
    # A width that is a whole multiple but for rounding errors must not move to the next one.
    return min(num_tokens, math.ceil(width / multiple - 1e-9) * multiple)


def density_from_width(num_tokens: int, width: int, *, text_tokens: int = 0) -> float:
    """Nominal density of a band: the inverse of `width_from_density` before its rounding.

    `1 - (1 - width / N)^2 + 2 * text_tokens / N`, at most 1. The exact fraction that a mask
    keeps, sink included, is `mask.density`.
    """
    num_tokens = _checks.integer("num_tokens", num_tokens, minimum=1)
    text_tokens = _checks.integer("text_tokens", text_tokens, minimum=0, maximum=num_tokens)
    width = _checks.integer("width", width, minimum=0)
    outside = max(Fraction(0), 1 - Fraction(width, num_tokens))
    return min(1.0, float(1 - outside**2 + Fraction(2 * text_tokens, num_tokens)))


def exact_width(num_tokens: int, density: float, text_tokens: int) -> float:
    """The unrounded width of a band of the given density beside dense text rows and columns."""
    # The order of operations is upstream's: a width that is a whole multiple must not move.
    pairs = num_tokens**2
    band_density = (density * pairs - 2 * num_tokens * text_tokens) / pairs
    if band_density <= 0.0:
        raise ValueError(
            f"density must exceed {2 * text_tokens / num_tokens:.4g}, which the dense rows and "
            f"columns of {text_tokens} text tokens take by themselves, got {density}"
        )
    return num_tokens * (1 - math.sqrt(1 - band_density))
