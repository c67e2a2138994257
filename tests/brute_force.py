"""Masks, orders and attention by their definitions, pair by pair: what the library must equal.

Nothing here uses the library beyond the sizes that a `TokenGrid` holds.
"""

import math
from typing import Literal

import numpy as np

from cinetile import TokenGrid

Matrix = np.ndarray
Pattern = Literal["spatial", "temporal"]


def tokens(grid: TokenGrid) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whether each token (frame-major) is text, and frame and place in the frame of the others."""
    size = grid.height * grid.width
    video = np.arange(grid.frames * size)
    no_text = np.zeros(video.size, bool)
    text, nowhere = np.ones(grid.text_tokens, bool), np.full(grid.text_tokens, -1)
    parts = ((no_text, text), (video // size, nowhere), (video % size, nowhere))
    is_text, frame, place = (
        np.concatenate(pair[::-1] if grid.text_first else pair) for pair in parts
    )
    return is_text, frame, place


def band_mask(grid: TokenGrid, pattern: Pattern, width: int, sink_frames: int) -> Matrix:
    """The library's spatial or temporal mask: near keys, the real first frames, all text."""
    is_text, frame, place = tokens(grid)
    position = frame * grid.height * grid.width + place
    if pattern == "temporal":
        position = place * grid.frames + frame
    near = np.abs(position[:, None] - position[None, :]) <= width
    sink = (frame < sink_frames) & ~is_text
    return near & ~is_text | sink | is_text | is_text[:, None]


def upstream_width(grid: TokenGrid, density: float, model: str) -> int:
    """The band's width in tokens as upstream rounds it; it calls this `two_frame`."""
    frame_size = grid.height * grid.width
    seq_len = grid.text_tokens + grid.frames * frame_size
    total = seq_len**2
    band_density = (density * total - 2 * seq_len * grid.text_tokens) / total
    width = seq_len * (1 - math.sqrt(1 - band_density))
    multiplier = width / frame_size
    whole = math.ceil if model == "wan" else math.floor
    return whole(multiplier * frame_size / 128) * 128


def upstream_mask(
    grid: TokenGrid,
    pattern: Pattern,
    model: str,
    two_frame: int,
    *,
    prompt_length: int | None = None,
    sink: bool = False,
) -> Matrix:
    """Sparse VideoGen's mask, written in placed positions and read in frame-major order."""
    frame_size = grid.height * grid.width
    num_video, text = grid.frames * frame_size, grid.text_tokens
    is_text, frame, place = tokens(grid)
    video_position = (
        place * grid.frames + frame if pattern == "temporal" else frame * frame_size + place
    )
    placed = np.arange(num_video + text)
    placed[~is_text] = video_position[~is_text] + (text if grid.text_first else 0)
    q, k = placed[:, None], placed[None, :]
    distance = np.abs(q - k)
    if model == "wan":
        return (distance <= two_frame) | (k < frame_size)
    if model == "cogvideox":
        return (k < text + sink * frame_size) | (q < text) | (distance < two_frame)
    real_length = num_video + (text if prompt_length is None else prompt_length)
    real = (q < real_length) & (k < real_length)
    fake = (q >= real_length) & (k >= real_length)
    return real & ((distance < two_frame) | (k >= num_video) | (q >= num_video)) | fake


def attention(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, kept: Matrix, scale: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Masked attention of `[tokens, head_dim]` arrays and its log-sum-exp, plainly in float64."""
    query, key, value = (np.asarray(array, np.float64) for array in (query, key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    logits = np.where(kept, factor * (query @ key.T), -np.inf)
    maximum = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - maximum)
    total = weights.sum(axis=-1, keepdims=True)
    return weights @ value / total, (maximum + np.log(total))[..., 0]
