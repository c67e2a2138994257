"""The patterns that files and the command line know by name."""

from cinetile import _checks
from cinetile.grid import TokenGrid
from cinetile.masks.widths import WIDTH_MULTIPLE
from cinetile.patterns.pattern import Pattern
from cinetile.patterns.upstream import SVG_SPATIAL, SVG_TEMPORAL
from cinetile.patterns.video import SPATIAL, TEMPORAL

PATTERNS: tuple[Pattern, ...] = (SPATIAL, TEMPORAL, SVG_SPATIAL, SVG_TEMPORAL)
PATTERN_NAMES: tuple[str, ...] = tuple(pattern.name for pattern in PATTERNS)

# Band widths are multiples of 128, but no coarser than so many of them fill the tokens.
_WIDTHS = 32


def as_pattern(argument: str, value: object) -> Pattern:
    """Returns the pattern that a name or an object stands for.

    Args:
        argument: name of the argument, for errors.
        value: a name of `PATTERNS`, or a `Pattern`.

    Raises:
        TypeError: it is neither a string nor a pattern.
        ValueError: the name is unknown, or another pattern of `PATTERNS` has the object's name.
    """
    if not isinstance(value, Pattern):
        return PATTERNS[PATTERN_NAMES.index(_checks.choice(argument, value, PATTERN_NAMES))]
    if value.name in PATTERN_NAMES and value not in PATTERNS:
        raise ValueError(
            f"{argument} must not hold a pattern named {value.name!r} other than the library's own"
        )
    return value


def canonical_pattern(argument: str, value: object) -> str | Pattern:
    """Returns the name of a pattern of `PATTERNS`, and any other pattern as it is.

    Equal settings are equal then, whether they name a pattern or hold it.

    Raises:
        TypeError: as in `as_pattern`.
        ValueError: as in `as_pattern`.
    """
    pattern = as_pattern(argument, value)
    return pattern.name if pattern in PATTERNS else pattern


def name_of(pattern: str | Pattern) -> str:
    """Returns the name of a pattern that may be given by its name."""
    return pattern if isinstance(pattern, str) else pattern.name


def width_multiple(grid: TokenGrid) -> int:
    """Returns what band widths are rounded up to on a grid where the caller does not say.

    128, or on grids under 4,096 tokens the largest power of two of which at least 32 fit.
    """
    share = max(1, grid.num_tokens // _WIDTHS)
    return min(WIDTH_MULTIPLE, 1 << (share.bit_length() - 1))
