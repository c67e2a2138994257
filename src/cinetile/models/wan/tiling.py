"""Running an autoencoder on overlapping spatial tiles, so that large frames fit in memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float

from cinetile import _checks

Video = Float[np.ndarray, "_batch _frames _height _width _channels"]


@dataclass(frozen=True)
class Tiling:
    """Sizes of tiles, in pixels of the video; defaults are diffusers'.

    Attributes:
        height: height of a tile.
        width: width of a tile.
        stride_height: rows from one tile to the next; tiles overlap by the rest and are blended.
        stride_width: columns from one tile to the next.

    Raises:
        ValueError: a stride is larger than its tile, or a size is below 1.
    """

    height: int = 256
    width: int = 256
    stride_height: int = 192
    stride_width: int = 192

    def __post_init__(self) -> None:
        for field in fields(self):
            size = _checks.integer(field.name, getattr(self, field.name), minimum=1)
            object.__setattr__(self, field.name, size)
        for axis in ("height", "width"):
            _checks.integer(
                f"stride_{axis}",
                getattr(self, f"stride_{axis}"),
                minimum=1,
                maximum=getattr(self, axis),
            )

    def divided(self, factor: int) -> "Tiling":
        """The same tiles in units of `factor` pixels.

        Raises:
            ValueError: a stride is below one unit.
        """
        return Tiling(*(getattr(self, field.name) // factor for field in fields(self)))

    def tiles(self, height: int, width: int) -> Iterator[list[tuple[slice, slice]]]:
        """Yields rows of tiles, each as slices of height and width; the last may be smaller."""
        for top in range(0, height, self.stride_height):
            yield [
                (
                    slice(top, min(top + self.height, height)),
                    slice(left, min(left + self.width, width)),
                )
                for left in range(0, width, self.stride_width)
            ]


def run_tiled(
    run: Callable[[slice, slice], Video],
    source: Tiling,
    target: Tiling,
    source_size: tuple[int, int],
    out: Video,
) -> None:
    """Runs a function on every tile and blends the results linearly where tiles overlap.

    Args:
        run: returns the result of a tile, given the source's slices of height and width.
        source: tiles in units of the source.
        target: the same tiles in units of the result.
        source_size: height and width of the source.
        out: the result, written in place.
    """
    above: list[Video] = []
    top = 0
    for row in source.tiles(*source_size):
        blended: list[Video] = []
        left = 0
        for column, (rows, columns) in enumerate(row):
            tile = np.array(run(rows, columns))
            if above:
                _blend(above[column], tile, 2, target.height - target.stride_height)
            if blended:
                _blend(blended[-1], tile, 3, target.width - target.stride_width)
            blended.append(tile)
            kept = tile[:, :, : target.stride_height, : target.stride_width]
            place = out[:, :, top : top + kept.shape[2], left : left + kept.shape[3]]
            place[...] = kept[:, :, : place.shape[2], : place.shape[3]]
            left += target.stride_width
        above = blended
        top += target.stride_height


def _blend(before: Video, tile: Video, axis: int, overlap: int) -> None:
    """Fades from the end of one tile to the start of the next, in place."""
    overlap = min(before.shape[axis], tile.shape[axis], overlap)
    if overlap < 1:
        return
    start, end = np.moveaxis(tile, axis, -1)[..., :overlap], np.moveaxis(before, axis, -1)
    share = np.arange(overlap, dtype=np.float32) / np.float32(overlap)
    start[...] = end[..., -overlap:] * (1 - share) + start * share
