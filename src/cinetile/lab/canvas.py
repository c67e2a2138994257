"""Figures laid out in inches, which pictures are drawn on; needs matplotlib (extra `plot`)."""

import os
from typing import TYPE_CHECKING

from cinetile import _extras
from cinetile.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DOTS_PER_INCH = 150


def require_matplotlib() -> None:
    """Raises where pictures cannot be drawn.

    Raises:
        ImportError: matplotlib is not installed.
    """
    _extras.require("matplotlib", extra="plot", feature="drawing a picture")


class Canvas:
    """A figure that is laid out in inches from its upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        # Not pyplot: that would change the caller's backend and keep the figure alive.
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height), dpi=_DOTS_PER_INCH)

    def axes(self, left: float, top: float, width: float, height: float) -> "Axes":
        bottom = self.height - top - height
        return self.figure.add_axes(
            (
                left / self.width,
                bottom / self.height,
                width / self.width,
                height / self.height,
            )
        )

    def point(self, left: float, top: float) -> tuple[float, float]:
        """A place as fractions of the figure."""
        return left / self.width, 1 - top / self.height

    def save(self, path: str | os.PathLike[str]) -> None:
        replace_file(path, lambda file: self.figure.savefig(file, format="png", facecolor="white"))
