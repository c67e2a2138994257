"""The latent codec: 4x4 pixel patches of each frame, projected on 16 whitened principal components.

Linear, so that it is fitted in a second and decodes with one product.
"""

from dataclasses import dataclass

import numpy as np

from training.tiny_wan.scenes import HARD, all_scenes, render, with_post

PATCH = 4
CHANNELS = 16


@dataclass(frozen=True)
class LinearVideoCodec:
    """Maps videos in [0, 1] to latents of mean 0 and variance 1 in each channel, and back.

    Attributes:
        mean: the mean patch, [48]; a patch is (row, column, color) flattened, in [-1, 1].
        encoder: [16, 48].
        decoder: [48, 16].
    """

    mean: np.ndarray
    encoder: np.ndarray
    decoder: np.ndarray

    def encode(self, videos: np.ndarray) -> np.ndarray:
        """Latents [..., frames, height / 4, width / 4, 16] of videos [..., height, width, 3]."""
        return (_patches(videos * 2 - 1) - self.mean) @ self.encoder.T

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Videos in [0, 1] of latents; the inverse of `encode` up to what 16 channels lose."""
        patches = latents @ self.decoder.T + self.mean
        *lead, rows, columns, _ = patches.shape
        pixels = patches.reshape(*lead, rows, columns, PATCH, PATCH, 3)
        pixels = np.swapaxes(pixels, -4, -3)
        video = pixels.reshape(*lead, rows * PATCH, columns * PATCH, 3)
        return np.clip(video / 2 + 0.5, 0, 1)


def fit(videos: int = 512, seed: int = 123) -> LinearVideoCodec:
    """Fits the codec on rendered videos of the hard data, a quarter of them with a post."""
    rng = np.random.default_rng(seed)
    scenes = all_scenes()
    chosen = rng.integers(len(scenes), size=videos)
    patches = [
        _patches(render(scene, rng, HARD, frames=2) * 2 - 1).reshape(-1, PATCH * PATCH * 3)
        for scene in (with_post(scenes[i]) if rng.random() < 0.25 else scenes[i] for i in chosen)
    ]
    patches = np.concatenate(patches).astype(np.float64)
    mean = patches.mean(0)
    variances, directions = np.linalg.eigh(np.cov((patches - mean).T))
    order = np.argsort(variances)[::-1][:CHANNELS]
    # Of the two signs of a component, the one that makes its largest entry positive.
    largest = np.abs(directions).argmax(0)
    directions = directions * np.sign(directions[largest, np.arange(len(directions))])
    scale = np.sqrt(variances[order])
    return LinearVideoCodec(
        mean=mean.astype(np.float32),
        encoder=(directions[:, order] / scale).T.astype(np.float32),
        decoder=(directions[:, order] * scale).astype(np.float32),
    )


def _patches(videos: np.ndarray) -> np.ndarray:
    *lead, height, width, colors = videos.shape
    patches = videos.reshape(*lead, height // PATCH, PATCH, width // PATCH, PATCH, colors)
    patches = np.swapaxes(patches, -4, -3)
    return patches.reshape(*lead, height // PATCH, width // PATCH, PATCH * PATCH * colors)
