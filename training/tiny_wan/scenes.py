"""Procedural captioned videos: one textured shape that crosses the picture, maybe behind a post.

Everything follows from a `numpy.random.Generator`, so a seed names a video.
"""

import functools
import itertools
from dataclasses import dataclass, replace

import numpy as np

FRAMES = 9
SIZE = 64

COLORS = {
    "red": (0.90, 0.12, 0.12),
    "green": (0.12, 0.75, 0.20),
    "blue": (0.15, 0.30, 0.95),
    "yellow": (0.95, 0.85, 0.10),
    "purple": (0.70, 0.20, 0.85),
    "cyan": (0.10, 0.85, 0.90),
}
SHAPES = ("circle", "square", "triangle")
TEXTURES = ("plain", "striped")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
BACKGROUNDS = ("dark", "light", "tiled")
POST = (28, 36)  # columns that the post covers

_SYNONYMS = {"circle": ("circle", "ball", "disc"), "square": ("square", "box")}
_UNTOLD_BACKGROUNDS = 0.15  # the share of captions without one, any may then be there
_VERBS = ("moves", "rolls", "slides", "drifts")
_ROWS, _COLUMNS = np.mgrid[0:SIZE, 0:SIZE].astype(np.float32)


@dataclass(frozen=True)
class Scene:
    """What a caption says of a video."""

    color: str
    shape: str
    texture: str
    direction: str
    background: str
    post: bool = False


@dataclass(frozen=True)
class Variety:
    """How much the videos of one scene differ: the easy and the hard data of the recipe.

    Attributes:
        radius: smallest and largest half size of the shape, pixels.
        speed: smallest and largest speed, pixels per frame.
        lane: how far the path may lie from the middle, pixels to either side.
        start: how far the path may be shifted along itself, pixels to either way.
        post: the share of scenes with a post in front.
    """

    radius: tuple[float, float] = (10.0, 13.0)
    speed: tuple[float, float] = (3.5, 4.5)
    lane: float = 10.0
    start: float = 4.0
    post: float = 0.2


EASY = Variety(radius=(11.5, 12.5), speed=(4.0, 4.0), lane=3.0, start=2.0, post=0.0)
HARD = Variety()


@functools.cache
def all_scenes() -> tuple[Scene, ...]:
    """Every scene without a post, in a fixed order: 432."""
    return tuple(
        Scene(*words)
        for words in itertools.product(COLORS, SHAPES, TEXTURES, DIRECTIONS, BACKGROUNDS)
    )


def held_out_scenes(count: int = 48) -> list[Scene]:
    """The scenes that training never shows, the same at every call; every direction as often."""
    order = np.random.default_rng(20261130).permutation(len(all_scenes()))
    shuffled = [all_scenes()[i] for i in order]
    share = count // len(DIRECTIONS)
    return [
        scene
        for direction in DIRECTIONS
        for scene in [s for s in shuffled if s.direction == direction][:share]
    ]


@functools.cache
def training_scenes() -> tuple[Scene, ...]:
    """Every scene that is not held out."""
    held_out = set(held_out_scenes())
    return tuple(scene for scene in all_scenes() if scene not in held_out)


def with_post(scene: Scene) -> Scene:
    """The same scene behind a post."""
    return replace(scene, post=True)


def caption(scene: Scene, rng: np.random.Generator | None = None) -> str:
    """The scene in words: the plain wording without `rng`, one of several wordings with it."""
    shape, verb, texture, to_the = scene.shape, "moves", f"{scene.texture} ", ""
    background = f" over a {scene.background} background"
    if rng is not None:
        shape = str(rng.choice(_SYNONYMS.get(shape, (shape,))))
        verb = str(rng.choice(_VERBS))
        if scene.texture == "plain" and rng.random() < 0.5:
            texture = ""
        if scene.direction in ("left", "right") and rng.random() < 0.5:
            to_the = "to the "
        if rng.random() < _UNTOLD_BACKGROUNDS:
            background = ""
    post = " behind a post" if scene.post else ""
    return f"a {texture}{scene.color} {shape} {verb} {to_the}{scene.direction}{post}{background}"


def render(
    scene: Scene, rng: np.random.Generator, variety: Variety, frames: int = FRAMES
) -> np.ndarray:
    """One video of the scene: float32 [frames, 64, 64, 3] in [0, 1].

    Fewer frames than 9 show the same motion at a larger step.
    """
    radius = rng.uniform(*variety.radius)
    speed = rng.uniform(*variety.speed)
    lane = rng.uniform(-variety.lane, variety.lane)
    shift = rng.uniform(-variety.start, variety.start)
    middle = (SIZE - 1) / 2
    time = np.linspace(0, FRAMES - 1, frames, dtype=np.float32) - (FRAMES - 1) / 2
    along = np.float32(speed) * time + np.float32(shift)
    dx, dy = DIRECTIONS[scene.direction]
    center_x = middle + (dx * along if dx else np.full_like(along, lane))
    center_y = middle + (dy * along if dy else np.full_like(along, lane))
    x = _COLUMNS - center_x[:, None, None]
    y = _ROWS - center_y[:, None, None]

    video = np.repeat(_background(scene.background)[None], frames, axis=0)
    cover = np.clip(0.5 - outline_distance(scene.shape, x, y, radius), 0, 1)[..., None]
    video += cover * (_paint(scene, x, y) - video)
    if scene.post:
        video[:, :, slice(*POST)] = _post()
    return video


def outline_distance(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Signed distance in pixels to the outline of a shape at the origin, negative inside."""
    if shape == "circle":
        return np.sqrt(x * x + y * y) - radius
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.88 * radius
    # An isosceles triangle that points up: its base, and its two sides.
    side = (2 * np.abs(x) - (y + 1.05 * radius)) / np.sqrt(5.0)
    return np.maximum(y - 0.85 * radius, side).astype(np.float32)


def _paint(scene: Scene, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    color = np.array(COLORS[scene.color], np.float32)
    if scene.texture == "plain":
        return np.broadcast_to(color, (*x.shape, 3))
    stripe = 0.5 + 0.5 * np.clip(3 * np.sin((x + y) * (2 * np.pi / 9)), -1, 1)
    return color * (1 - 0.65 * stripe[..., None])


def _background(name: str) -> np.ndarray:
    # The light falls from the upper left, so that a patch tells where in the picture it lies.
    light = 1 - (_ROWS + _COLUMNS) / (2 * SIZE)
    if name == "dark":
        gray = 0.04 + 0.16 * light
    elif name == "light":
        gray = 0.76 + 0.18 * light
    else:
        tile = np.sin(_COLUMNS * (2 * np.pi / 16)) * np.sin(_ROWS * (2 * np.pi / 16))
        gray = 0.42 + 0.12 * light + 0.10 * np.clip(4 * tile, -1, 1)
    return np.repeat(gray[..., None], 3, axis=-1).astype(np.float32)


def _post() -> np.ndarray:
    """The post, lit from the left: [64, width, 3]."""
    gray = np.linspace(0.62, 0.30, POST[1] - POST[0], dtype=np.float32)
    return np.broadcast_to(gray[None, :, None], (SIZE, len(gray), 3))
