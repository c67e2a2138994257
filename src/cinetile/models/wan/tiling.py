"""Running an autoencoder on overlapping tiles of the picture, so that large ones fit in memory."""

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
        height: of a tile.
        width: of a tile.
        stride_height: from one tile to the next; the rest of the tile overlaps and is blended.
        stride_width: likewise.

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
        """The same tiles in units of so many pixels.

        Raises:
            ValueError: a stride is below one unit.
        """
        return Tiling(*(getattr(self, field.name) // factor for field in fields(self)))

    def tiles(self, height: int, width: int) -> Iterator[list[tuple[slice, slice]]]:
        """Rows of tiles, each tile as its slices of height and width; the last ones are smaller."""
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
        run: the result of a tile, given its slices of the source's height and width.
        source: tiles in units of what goes in.
        target: the same tiles in units of what comes out.
        source_size: height and width of what goes in.
        out: what is written.
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
