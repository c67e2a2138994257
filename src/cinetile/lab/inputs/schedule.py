"""Time: which frames of a clip to take, and how a token weighs the frames that it covers."""

import numpy as np
from jaxtyping import Float, Int


def frame_schedule(available: int, wanted: int) -> Int[np.ndarray, " wanted"]:
    """Chooses the source frame of every played frame.

    A long clip gives evenly spread frames, the first and the last among them. A short one is
    played back and forth (0 1 2 1 0 1 ...), so that motion never jumps.

    Args:
        available: Frames of the clip.
        wanted: Frames to play.
    """
    played = np.arange(wanted)
    if available >= wanted:
        return played * (available - 1) // max(wanted - 1, 1)
    phase = played % max(2 * (available - 1), 1)
    return available - 1 - np.abs(available - 1 - phase)


def temporal_weights(
    frames: int, vae_stride: int, patch_stride: int
) -> Float[np.ndarray, "2 frames played"]:
    """Weighs played frames for the mean and for the change within every token frame.

    As in a causal video VAE, the first latent frame covers one played frame and each other one
    `vae_stride` of them; a token frame is `patch_stride` latent frames.

    Args:
        frames: Token frames.
        vae_stride: Played frames of a latent frame after the first.
        patch_stride: Latent frames of a token frame.

    Returns:
        Row 0 averages, row 1 is a ramp: what came late less what came early, 0 for one frame.
    """
    latents = frames * patch_stride
    ends = 1 + vae_stride * (np.arange(1, frames + 1) * patch_stride - 1)
    weights = np.zeros((2, frames, 1 + vae_stride * (latents - 1)), np.float32)
    for frame, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        ramp = np.arange(end - start) - (end - start - 1) / 2
        weights[0, frame, start:end] = 1 / (end - start)
        weights[1, frame, start:end] = ramp / (np.abs(ramp).sum() / 2 or 1)
    return weights
