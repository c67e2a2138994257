"""Decoding: from clean latents to the frames of a video."""

import numpy as np
from jaxtyping import Array, Float

from cinetile.models.wan.folder import VideoCodec
from cinetile.models.wan.size import VideoSize
from cinetile.models.wan.tiling import Tiling
from cinetile.models.wan.timing import StageClock

# Frames with more pixels are decoded in tiles unless a caller asks otherwise: decoding them at once
# takes several gigabytes.
_TILED_FROM = 640 * 640


def choose_tiling(given: bool | Tiling | None, size: VideoSize) -> Tiling | None:
    """The tiles in which frames are decoded; None for whole frames."""
    if isinstance(given, Tiling):
        return given
    tiled = size.height * size.width > _TILED_FROM if given is None else given
    return Tiling() if tiled else None


def decode_frames(
    vae: VideoCodec, latents: Float[Array, "b c f h w"], tiling: Tiling | None, clock: StageClock
) -> Float[np.ndarray, "batch frames height width channels"]:
    """Decodes normalized latents to pixels in [0, 1] with channels last."""
    with clock.measured("decoding"):
        pixels = vae.decode(
            vae.denormalize(latents),
            tiling=tiling,
            progress=lambda done, total: clock.show("decoding", done, total),
        )
        return np.moveaxis(np.clip(pixels / 2 + 0.5, 0.0, 1.0), 1, -1)
