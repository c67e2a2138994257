"""Query, key and value from the pixels of a video file."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from cinetile import _checks
from cinetile.lab.inputs.arrays import Inputs, require_memory
from cinetile.lab.inputs.features import block_coefficients, num_coefficients, standardise
from cinetile.lab.inputs.heads import draw_head, project
from cinetile.lab.inputs.schedule import frame_schedule, temporal_weights
from cinetile.models.rotary import rotary_tables
from cinetile.models.video import count_frames, read_frames

_MOST_PIXELS = 32_768


def clip_inputs(
    path: str | os.PathLike[str],
    frames: int,
    height: int,
    width: int,
    heads: int,
    head_dim: int,
    *,
    vae: tuple[int, int, int] = (4, 8, 8),
    patch: tuple[int, int, int] = (1, 2, 2),
    seed: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> Inputs:
    """Makes attention inputs that follow the content of a video, without a model.

    The clip is resized to the pixels of the token grid, and every token gets features of the
    pixels that it covers: cosine coefficients of low order per colour, of the block's mean over
    time and of its change, each of unit variance. Random projections, fixed by the seed, turn
    them into every head's query, key and value, followed by QK norm and Wan's 3-D rotary
    embedding. Query and key share most of their projection, so that similar content attends to
    similar content. As in a trained model, heads differ: even ones are spatial (a constant in
    the frame's channels favours the same and near frames), odd ones are temporal (the same in
    the channels of row and column favours the same place in all frames), and each has its own
    temperature, the root mean square of its queries, between 1 and 1.5; that of keys is 1.

    Args:
        path: A file that FFmpeg can decode.
        frames: Token frames. The Wan grid 21 x 45 x 80 takes 81 video frames of 1280 x 720.
            A longer clip is sampled evenly, a shorter one is played back and forth.
        height: Rows of tokens of a frame.
        width: Columns of tokens of a frame.
        heads: Attention heads.
        head_dim: Channels of one head, even.
        vae: Video frames, rows and columns of pixels of a latent cell; the first latent frame
            covers one video frame, as in Wan.
        patch: Latent frames, rows and columns of a token.
        seed: Seed of the projections; a head is the same however many heads there are.
        progress: Called with frames done and frames in all after each decoded frame.

    Returns:
        Inputs of batch 1, tokens in frame-major order: `t = (frame * height + row) * width + col`.

    Raises:
        FileNotFoundError: There is no such file.
        ImportError: PyAV is not installed.
        TypeError: A size or the seed is not an integer.
        ValueError: A size is under 1, `head_dim` is odd, the seed is negative, or the file has
            no video that decodes.
    """
    frames = _checks.integer("frames", frames, minimum=1)
    height = _checks.integer("height", height, minimum=1)
    width = _checks.integer("width", width, minimum=1)
    heads = _checks.integer("heads", heads, minimum=1)
    head_dim = _checks.integer("head_dim", head_dim, minimum=1)
    if head_dim % 2:
        raise ValueError(f"head_dim takes an even integer, got {head_dim}")
    vae = _checks.strides("vae", vae)
    patch = _checks.strides("patch", patch)
    seed = _checks.integer("seed", seed, minimum=0)
    path = _checks.existing_file("path", path)
    require_memory(frames * height * width, heads, head_dim)
    block = (vae[1] * patch[1], vae[2] * patch[2])
    _checks.memory(
        f"features of {frames * height * width:,} tokens",
        4 * 2 * frames * height * width * num_coefficients(*block),
    )
    _require_pixels(height * block[0], width * block[1])

    weights = temporal_weights(frames, vae[0], patch[0])
    available, played = count_frames(path), weights.shape[-1]
    features = _clip_features(
        path,
        frame_schedule(available, played),
        weights,
        grid=(frames, height, width),
        block=block,
        progress=progress,
    )
    cosine, sine = rotary_tables(frames, height, width, head_dim)
    query, key, value = (
        np.empty((1, len(features), heads, head_dim), np.float32) for _ in range(3)
    )
    for index in range(heads):
        head = draw_head(features.shape[1], head_dim, seed, index)
        query[0, :, index], key[0, :, index], value[0, :, index] = project(
            features, head, cosine, sine
        )
    source = f"{played} frames"
    if available < played:
        source = f"{available} frames played back and forth as {played}"
    return Inputs(query, key, value, f"clip {path.name}, {source} -> {frames}x{height}x{width}")


def _require_pixels(rows: int, columns: int) -> None:
    """Raises ValueError if frames of this size are more than FFmpeg scales to."""
    if max(rows, columns) > _MOST_PIXELS:
        raise ValueError(
            f"frames of {columns:,} x {rows:,} pixels are larger than {_MOST_PIXELS:,} on a side; "
            "take a smaller grid"
        )


def _clip_features(
    path: Path,
    schedule: Int[np.ndarray, " played"],
    weights: Float[np.ndarray, "2 frames played"],
    grid: tuple[int, int, int],
    block: tuple[int, int],
    progress: Callable[[int, int], object] | None,
) -> Float[np.ndarray, "tokens features"]:
    """Reads the scheduled frames once and sums their coefficients into token frames."""
    frames, height, width = grid
    wanted = set(schedule.tolist())
    sums = np.zeros((frames, height * width, 2, num_coefficients(*block)), np.float32)
    decoded = read_frames(path, wanted, height * block[0], width * block[1])
    for done, (index, pixels) in enumerate(decoded, start=1):
        coefficients = block_coefficients(pixels, *block)[:, np.newaxis]
        # The transform is linear, so a frame is transformed once however often it is played.
        shares = weights[:, :, schedule == index].sum(axis=-1)
        for frame in np.flatnonzero(shares[0]):
            sums[frame] += shares[:, frame, np.newaxis] * coefficients
        if progress is not None:
            progress(done, len(wanted))
    return standardise(sums.reshape(frames * height * width, -1))
