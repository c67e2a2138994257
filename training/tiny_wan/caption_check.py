"""Reads colour, shape, texture, background and direction off a video, without any model.

The object is what is saturated; its outline is matched against every shape, size and place.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from training.tiny_wan.scenes import COLORS, POST, SHAPES, SIZE, Scene, outline_distance

ATTRIBUTES = ("color", "shape", "texture", "background", "direction")
UNKNOWN = "unknown"
_RADII = np.arange(8.0, 15.0)
_PADDED = 2 * SIZE


@dataclass(frozen=True)
class Reading:
    """What the check saw; `unknown` where it saw nothing clear.

    Attributes:
        match: intersection over union of the object and its best outline, mean over frames.
    """

    color: str
    shape: str
    texture: str
    background: str
    direction: str
    match: float


def read(video: np.ndarray) -> Reading:
    """Reads one video, [frames, 64, 64, 3] in [0, 1].

    Raises:
        ValueError: the video has another shape.
    """
    if video.ndim != 4 or video.shape[1:] != (SIZE, SIZE, 3):
        raise ValueError(f"video must be [frames, {SIZE}, {SIZE}, 3], got {video.shape}")
    video = np.clip(video, 0, 1)
    objects = video.max(-1) - video.min(-1) > 0.2
    background = _background(video, objects)
    if objects.sum(axis=(1, 2)).min() < 60:
        return Reading(UNKNOWN, UNKNOWN, UNKNOWN, background, UNKNOWN, 0.0)
    shape, centers, match = _outline(objects, _seen(video))
    return Reading(
        color=_color(video[objects]),
        shape=shape if match > 0.5 else UNKNOWN,
        texture=_texture(video, objects),
        background=background,
        direction=_direction(centers),
        match=match,
    )


def score(videos: Sequence[np.ndarray] | np.ndarray, scenes: Sequence[Scene]) -> dict[str, float]:
    """The share of videos whose reading agrees with the scene, for each attribute and for `all`.

    Raises:
        ValueError: there are not as many videos as scenes.
    """
    if len(videos) != len(scenes):
        raise ValueError(f"videos must be as many as scenes ({len(scenes)}), got {len(videos)}")
    readings = [read(video) for video in videos]
    right = np.array(
        [
            [getattr(reading, name) == getattr(scene, name) for name in ATTRIBUTES]
            for reading, scene in zip(readings, scenes, strict=True)
        ]
    )
    shares = {name: float(share) for name, share in zip(ATTRIBUTES, right.mean(0), strict=True)}
    return shares | {"all": float(right.all(1).mean())}


def _background(video: np.ndarray, objects: np.ndarray) -> str:
    gray = float(np.median(video[~objects].mean(-1))) if not objects.all() else 0.5
    if gray < 0.27:
        return "dark"
    return "light" if gray > 0.68 else "tiled"


def _color(pixels: np.ndarray) -> str:
    # The brighter pixels, scaled to one brightness, look past stripes and soft edges.
    brightness = pixels.max(-1)
    bright = pixels[brightness >= np.quantile(brightness, 0.6)].mean(0)
    hue = bright / bright.max()
    return min(COLORS, key=lambda name: float(np.abs(_hue(name) - hue).sum()))


def _hue(name: str) -> np.ndarray:
    color = np.array(COLORS[name])
    return color / color.max()


def _texture(video: np.ndarray, objects: np.ndarray) -> str:
    inside = objects.copy()
    for axis in (1, 2):
        for step in (-2, 2):
            inside &= np.roll(objects, step, axis)
    spreads = [
        float(frame.max(-1)[mask].std())
        for frame, mask in zip(video, inside, strict=True)
        if mask.sum() >= 10
    ]
    if not spreads:
        return UNKNOWN
    return "striped" if np.median(spreads) > 0.12 else "plain"


def _direction(centers: np.ndarray) -> str:
    """The direction of a path, [frames, 2] as (x, y)."""
    time = np.arange(len(centers)) - (len(centers) - 1) / 2
    travel = (time @ centers) / (time @ time) * (len(centers) - 1)
    x, y = float(travel[0]), float(travel[1])
    if max(abs(x), abs(y)) < 12 or min(abs(x), abs(y)) > 0.5 * max(abs(x), abs(y)):
        return UNKNOWN
    if abs(x) > abs(y):
        return "right" if x > 0 else "left"
    return "down" if y > 0 else "up"


def _outline(objects: np.ndarray, visible: np.ndarray) -> tuple[str, np.ndarray, float]:
    """The best shape, its center in every frame, and its intersection over union.

    Args:
        objects: [frames, 64, 64].
        visible: where an object would show, [64, 64].
    """
    area = objects.sum(axis=(1, 2))[:, None, None]
    object_waves = np.fft.rfft2(objects.astype(np.float32), (_PADDED, _PADDED))
    visible_waves = np.fft.rfft2(visible.astype(np.float32), (_PADDED, _PADDED))
    best = (SHAPES[0], np.zeros((len(objects), 2)), -1.0)
    for shape in SHAPES:
        for radius in _RADII:
            waves = _template_waves(shape, float(radius))
            common = np.fft.irfft2(object_waves * waves)[:, :SIZE, :SIZE]
            shown = np.fft.irfft2(visible_waves * waves)[:SIZE, :SIZE]
            ratio = (common / np.maximum(shown + area - common, 1)).reshape(len(objects), -1)
            match = float(ratio.max(1).mean())
            if match > best[2]:
                row, column = np.unravel_index(ratio.argmax(1), (SIZE, SIZE))
                best = (shape, np.stack([column, row], -1).astype(np.float64), match)
    return best


def _seen(video: np.ndarray) -> np.ndarray:
    """Where no post stands, [64, 64]: a post is known by how its shade falls from left to right."""
    seen = np.ones((SIZE, SIZE), bool)
    shade = np.median(video[:, :, slice(*POST)].mean(-1), axis=(0, 1))
    if shade[:2].mean() - shade[-2:].mean() > 0.16:
        seen[:, slice(*POST)] = False
    return seen


@functools.cache
def _template_waves(shape: str, radius: float) -> np.ndarray:
    """The conjugate spectrum of a filled shape about pixel (0, 0), for correlation."""
    offsets = np.fft.fftfreq(_PADDED, 1 / _PADDED).astype(np.float32)
    inside = outline_distance(shape, offsets[None, :], offsets[:, None], radius) < 0
    return np.conj(np.fft.rfft2(inside.astype(np.float32)))
