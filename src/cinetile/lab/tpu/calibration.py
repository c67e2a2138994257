"""Calibration: the static estimate beside published times.

The six rows come from the case study on a v6e (75,600 tokens, 10 heads of 128, bfloat16): the
four modes, and two more values of `block_q`. The estimates are of kernels built like the case
study's. The model's form was chosen with these times known, so its leave-one-out errors (3.6 % at
most) are optimistic, and the error bands below are wider.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CalibrationRow:
    """One published time.

    Attributes:
        name: mode and block sizes.
        published_ms: published time.
        static_ms: static estimate of the same kernel; None if it was not recorded.
    """

    name: str
    published_ms: float
    static_ms: float | None

    def to_dict(self) -> dict[str, Any]:
        error = None if self.static_ms is None else self.static_ms / self.published_ms - 1
        return {
            "name": self.name,
            "published_ms": self.published_ms,
            "static_ms": self.static_ms,
            "error": error,
        }


CALIBRATION = (
    CalibrationRow("dense, 3328 x 1536", 78.70, 78.8),
    CalibrationRow("naive, 3328 x 1536", 96.37, 96.5),
    CalibrationRow("split, 3328 x 1536", 54.12, 54.4),
    CalibrationRow("aligned, 3328 x 1536", 32.76, 33.4),
    CalibrationRow("split, 1024 x 1536", 66.88, None),
    CalibrationRow("split, 4864 x 1536", 58.62, None),
)

# For plans that mask almost no tile, and for plans that mask many tiles.
BAND_UNMASKED = 0.10
BAND_MASKED = 0.25
