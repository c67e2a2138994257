"""A fixed linear codec of pixel patches, in the place of an autoencoder for small models."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from cinetile import _checks
from cinetile.wan.config import parse_config, read_json
from cinetile.wan.layers import random_weight
from cinetile.wan.tiling import Tiling
from cinetile.wan.vae import Progress
from cinetile.wan.weights import Part, WeightFiles, load_model

AnyArray = Array | np.ndarray

_RENAMES = {"encoder": "encode.weight", "decoder": "decode.weight"}


@dataclass(frozen=True)
class LinearVideoCodecConfig:
    """Sizes of the codec.

    Attributes:
        z_dim: channels of the latents.
        patch_size: height and width in pixels of the patch that becomes one latent.
        in_channels: channels of a video.
    """

    z_dim: int = 16
    patch_size: int = 4
    in_channels: int = 3

    def __post_init__(self) -> None:
        for name in ("z_dim", "patch_size", "in_channels"):
            _checks.integer(name, getattr(self, name), minimum=1)

    @property
    def scale_factor_temporal(self) -> int:
        """Frames of a latent frame."""
        return 1

    @property
    def scale_factor_spatial(self) -> int:
        """Pixels of a latent, in height and in width."""
        return self.patch_size

    @property
    def patch_values(self) -> int:
        """Values of a patch."""
        return self.patch_size**2 * self.in_channels


class LinearVideoCodec(eqx.Module):
    """Projects every patch of every frame on a few directions, and back.

    A patch is flattened by row, column and color.

    Args:
        config: sizes.
        key: of the random weights.
    """

    class_name: ClassVar[str] = "LinearVideoCodec"

    mean: Float[Array, " values"]
    encoder: Float[Array, "channels values"]
    decoder: Float[Array, "values channels"]
    config: LinearVideoCodecConfig = eqx.field(static=True)

    def __init__(self, config: LinearVideoCodecConfig, *, key: PRNGKeyArray) -> None:
        values, float32 = config.patch_values, jnp.dtype("float32")
        first, second = jax.random.split(key)
        self.config = config
        self.mean = jnp.zeros((values,), float32)
        self.encoder = random_weight(first, (config.z_dim, values), values, float32)
        self.decoder = random_weight(second, (values, config.z_dim), config.z_dim, float32)

    @classmethod
    def deferred(
        cls, folder: str | os.PathLike[str]
    ) -> "Part[LinearVideoCodecConfig, LinearVideoCodec]":
        """Reads the configuration and the files' headers; the weights when they are needed."""
        path = Path(folder) / "config.json"
        config = parse_config(LinearVideoCodecConfig, read_json(path), path)
        load = load_model(
            lambda: cls(config, key=jax.random.key(0)),
            WeightFiles(folder),
            stacked="",
            renames=_RENAMES,
        )
        return Part(config, "float32", load)

    def normalize(
        self, latents: Float[AnyArray, "batch channels *sizes"]
    ) -> Float[Array, "batch channels *sizes"]:
        """Nothing: the codec's latents have mean 0 and variance 1."""
        return jnp.asarray(latents, jnp.float32)

    def denormalize(
        self, latents: Float[AnyArray, "batch channels *sizes"]
    ) -> Float[Array, "batch channels *sizes"]:
        """Nothing, likewise."""
        return jnp.asarray(latents, jnp.float32)

    def encode(
        self,
        video: Float[AnyArray, "batch channels frames height width"],
        *,
        tiling: Tiling | None = None,
        progress: Progress | None = None,
    ) -> Float[np.ndarray, "batch latent_channels frames latent_height latent_width"]:
        """Encodes videos of pixels in [-1, 1]; needs no tiles.

        Raises:
            ValueError: a size is no multiple of the patch.
        """
        del tiling, progress
        size = self.config.patch_size
        batch, channels, frames, height, width = video.shape
        if height % size or width % size:
            raise ValueError(f"video's sizes must be multiples of {size}, got {height}x{width}")
        split = (batch, channels, frames, height // size, size, width // size, size)
        patches = np.asarray(video, np.float32).reshape(split).transpose(0, 2, 3, 5, 4, 6, 1)
        patches = patches.reshape(*patches.shape[:4], -1)
        latents = (patches - np.asarray(self.mean)) @ np.asarray(self.encoder).T
        return np.moveaxis(latents, -1, 1)

    def decode(
        self,
        latents: Float[AnyArray, "batch latent_channels frames latent_height latent_width"],
        *,
        tiling: Tiling | None = None,
        progress: Progress | None = None,
    ) -> Float[np.ndarray, "batch channels frames height width"]:
        """Decodes latents to pixels in [-1, 1]; needs no tiles."""
        del tiling, progress
        size, channels = self.config.patch_size, self.config.in_channels
        places = np.moveaxis(np.asarray(latents, np.float32), 1, -1)
        patches = places @ np.asarray(self.decoder).T + np.asarray(self.mean)
        batch, frames, rows, columns, _ = patches.shape
        pixels = patches.reshape(batch, frames, rows, columns, size, size, channels)
        video = pixels.transpose(0, 6, 1, 2, 4, 3, 5)
        video = video.reshape(batch, channels, frames, rows * size, columns * size)
        return np.clip(video, -1.0, 1.0)
