"""A fixed linear codec of pixel patches, which replaces the autoencoder of small models."""

import math
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
from cinetile.models.wan.config import parse_config, read_json
from cinetile.models.wan.latents import denormalize, normalize
from cinetile.models.wan.layers import Linear
from cinetile.models.wan.tiling import Tiling
from cinetile.models.wan.vae import Progress
from cinetile.models.wan.weights import Part, WeightFiles, load_model

AnyArray = Array | np.ndarray


@dataclass(frozen=True)
class LinearVideoCodecConfig:
    """Sizes of the codec.

    Attributes:
        z_dim: channels of the latents.
        patch_size: frames (1), rows and columns (equally many) of pixels that become one latent.
        in_channels: channels of a video that goes in.
        out_channels: channels of a video that comes out, the same number.
        latents_mean: mean of each latent channel over real videos; 0 by default.
        latents_std: its standard deviation; 1 by default.
    """

    z_dim: int = 16
    patch_size: tuple[int, int, int] = (1, 4, 4)
    in_channels: int = 3
    out_channels: int = 3
    latents_mean: tuple[float, ...] = ()
    latents_std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("z_dim", "in_channels", "out_channels"):
            _checks.integer(name, getattr(self, name), minimum=1)
        frames, rows, columns = _checks.strides("patch_size", self.patch_size)
        if frames != 1 or rows != columns:
            raise ValueError(f"patch_size must be (1, n, n), got {self.patch_size}")
        if self.in_channels != self.out_channels:
            raise ValueError(
                f"out_channels must be in_channels {self.in_channels}, got {self.out_channels}"
            )
        for name, default in (("latents_mean", 0.0), ("latents_std", 1.0)):
            values = getattr(self, name) or (default,) * self.z_dim
            if len(values) != self.z_dim:
                raise ValueError(f"{name} must have z_dim {self.z_dim} entries, got {len(values)}")
            object.__setattr__(self, name, values)

    @property
    def scale_factor_temporal(self) -> int:
        """Frames of a latent frame."""
        return 1

    @property
    def scale_factor_spatial(self) -> int:
        """Pixels of a latent, in height and in width."""
        return self.patch_size[1]


class LinearVideoCodec(eqx.Module):
    """Projects each patch of each frame onto a few directions, and back.

    A patch is flattened by row, column and color.

    Args:
        config: sizes.
        key: of the random weights.
    """

    class_name: ClassVar[str] = "LinearVideoCodec"

    mean: Float[Array, " values"]
    encoder: Linear
    decoder: Linear
    config: LinearVideoCodecConfig = eqx.field(static=True)

    def __init__(self, config: LinearVideoCodecConfig, *, key: PRNGKeyArray) -> None:
        values, float32 = math.prod(config.patch_size) * config.in_channels, jnp.dtype("float32")
        first, second = jax.random.split(key)
        self.config = config
        self.mean = jnp.zeros((values,), float32)
        self.encoder = Linear(values, config.z_dim, key=first, dtype=float32, use_bias=False)
        self.decoder = Linear(config.z_dim, values, key=second, dtype=float32, use_bias=False)

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
            renames={},
        )
        return Part(config, "float32", load)

    def normalize(
        self, latents: Float[AnyArray, "batch channels *sizes"]
    ) -> Float[Array, "batch channels *sizes"]:
        """Normalizes the latents that `encode` returns for the transformer."""
        return normalize(latents, self.config.latents_mean, self.config.latents_std)

    def denormalize(
        self, latents: Float[AnyArray, "batch channels *sizes"]
    ) -> Float[Array, "batch channels *sizes"]:
        """Inverse of `normalize`, for the latents that `decode` takes."""
        return denormalize(latents, self.config.latents_mean, self.config.latents_std)

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
        size = self.config.scale_factor_spatial
        batch, channels, frames, height, width = video.shape
        if height % size or width % size:
            raise ValueError(f"video's sizes must be multiples of {size}, got {height}x{width}")
        split = (batch, channels, frames, height // size, size, width // size, size)
        patches = np.asarray(video, np.float32).reshape(split).transpose(0, 2, 3, 5, 4, 6, 1)
        patches = patches.reshape(*patches.shape[:4], -1)
        latents = (patches - np.asarray(self.mean)) @ np.asarray(self.encoder.weight).T
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
        size, channels = self.config.scale_factor_spatial, self.config.out_channels
        places = np.moveaxis(np.asarray(latents, np.float32), 1, -1)
        patches = places @ np.asarray(self.decoder.weight).T + np.asarray(self.mean)
        batch, frames, rows, columns, _ = patches.shape
        pixels = patches.reshape(batch, frames, rows, columns, size, size, channels)
        video = pixels.transpose(0, 6, 1, 2, 4, 3, 5)
        video = video.reshape(batch, channels, frames, rows * size, columns * size)
        return np.clip(video, -1.0, 1.0)
