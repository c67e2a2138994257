"""What heads can be routed to: one object per pattern, all of them in the tuple `PATTERNS`."""

from cinetile.patterns.pattern import DENSE, Pattern
from cinetile.patterns.registry import (
    PATTERN_NAMES,
    PATTERNS,
    as_pattern,
    canonical_pattern,
    name_of,
    width_multiple,
)

__all__ = [
    "DENSE",
    "PATTERNS",
    "PATTERN_NAMES",
    "Pattern",
    "as_pattern",
    "canonical_pattern",
    "name_of",
    "width_multiple",
]
