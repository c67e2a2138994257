"""Wan 2.1's causal video autoencoder."""

import os
from collections.abc import Callable, Sequence
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
from cinetile.models.wan.tiling import Tiling, run_tiled
from cinetile.models.wan.vae_layers import CausalConv3d, Decoder, Encoder, Stream
from cinetile.models.wan.weights import Part, WeightFiles, load_model

AnyArray = Array | np.ndarray
Progress = Callable[[int, int], object]

_RENAMES = {".resample.": ".resample.1."}
_FIXED: dict[str, object] = {
    "attn_scales": [],
    "is_residual": False,
    "patch_size": None,
}
# Wan 2.1's own.
_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)


@dataclass(frozen=True)
class AutoencoderKLWanConfig:
    """Sizes of the autoencoder; names and defaults are diffusers'.

    Attributes:
        base_dim: channels of the first level of the encoder.
        decoder_base_dim: channels of the last level of the decoder; None for `base_dim`.
        z_dim: channels of the latents.
        dim_mult: channels of each level, in multiples of the base.
        num_res_blocks: residual blocks of a level.
        temperal_downsample: whether each level but the last halves the frames too (diffusers'
            spelling).
        latents_mean: mean of each latent channel over real videos.
        latents_std: its standard deviation.
        in_channels: channels of a video that goes in.
        out_channels: channels of a video that comes out.
        scale_factor_temporal: frames of a latent frame after the first.
        scale_factor_spatial: pixels of a latent, in height and in width.
    """

    base_dim: int = 96
    decoder_base_dim: int | None = None
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[float, ...] = _MEAN
    latents_std: tuple[float, ...] = _STD
    in_channels: int = 3
    out_channels: int = 3
    scale_factor_temporal: int = 4
    scale_factor_spatial: int = 8

    def __post_init__(self) -> None:
        for name in ("base_dim", "z_dim", "num_res_blocks", "in_channels", "out_channels"):
            _checks.integer(name, getattr(self, name), minimum=1)
        levels = len(self.dim_mult)
        if levels < 1 or len(self.temperal_downsample) != levels - 1:
            raise ValueError(
                f"temperal_downsample must have one entry less than dim_mult, got "
                f"{self.temperal_downsample} and {self.dim_mult}"
            )
        for name in ("latents_mean", "latents_std"):
            if len(getattr(self, name)) != self.z_dim:
                raise ValueError(f"{name} must have z_dim {self.z_dim} entries")
        factors = {
            "scale_factor_temporal": 2 ** sum(self.temperal_downsample),
            "scale_factor_spatial": 2 ** (levels - 1),
        }
        for name, factor in factors.items():
            if getattr(self, name) != factor:
                raise ValueError(
                    f"{name} must be the {factor} that the levels give, got {getattr(self, name)}"
                )

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "AutoencoderKLWanConfig":
        """Reads the `config.json` of a VAE folder.

        Raises:
            FileNotFoundError: there is none.
            TypeError: a field has the wrong type.
            ValueError: a field is unknown, out of range, or asks for what is not implemented.
        """
        path = Path(folder) / "config.json"
        return parse_config(cls, read_json(path), path, fixed=_FIXED, ignored=("dropout",))


class AutoencoderKLWan(eqx.Module):
    """Encodes and decodes videos in float32, one latent frame at a time.

    Built with random weights; `load` reads trained ones.

    Args:
        config: sizes.
        key: of the random weights.
    """

    class_name: ClassVar[str] = "AutoencoderKLWan"

    encoder: Encoder
    quant_conv: CausalConv3d
    post_quant_conv: CausalConv3d
    decoder: Decoder
    config: AutoencoderKLWanConfig = eqx.field(static=True)

    def __init__(self, config: AutoencoderKLWanConfig, *, key: PRNGKeyArray) -> None:
        encoder, quant, post_quant, decoder = jax.random.split(key, 4)
        self.config = config
        z_dim, base = config.z_dim, config.base_dim
        decoder_base = base if config.decoder_base_dim is None else config.decoder_base_dim
        self.encoder = Encoder(
            config.in_channels,
            2 * z_dim,
            tuple(base * times for times in (1, *config.dim_mult)),
            config.num_res_blocks,
            config.temperal_downsample,
            key=encoder,
        )
        self.quant_conv = CausalConv3d(2 * z_dim, 2 * z_dim, (1, 1, 1), key=quant)
        self.post_quant_conv = CausalConv3d(z_dim, z_dim, (1, 1, 1), key=post_quant)
        self.decoder = Decoder(
            z_dim,
            config.out_channels,
            tuple(decoder_base * times for times in (config.dim_mult[-1], *config.dim_mult[::-1])),
            config.num_res_blocks,
            config.temperal_downsample[::-1],
            key=decoder,
        )

    @classmethod
    def deferred(
        cls, folder: str | os.PathLike[str]
    ) -> "Part[AutoencoderKLWanConfig, AutoencoderKLWan]":
        """Reads the configuration and the files' headers; the weights when they are needed."""
        config = AutoencoderKLWanConfig.read(folder)
        load = load_model(
            lambda: cls(config, key=jax.random.key(0)),
            WeightFiles(folder),
            stacked="",
            renames=_RENAMES,
        )
        return Part(config, "float32", load)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "AutoencoderKLWan":
        """Loads `config.json` and the safetensors of a folder that diffusers wrote, in float32.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: the configuration is not implemented, a file is damaged, or a tensor is
                missing, unknown or misshapen.
        """
        return cls.deferred(folder).get()

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
    ) -> Float[np.ndarray, "batch latent_channels latent_frames latent_height latent_width"]:
        """Encodes videos.

        Args:
            video: pixels in [-1, 1]; 4k + 1 frames, height and width in multiples of 8.
            tiling: tiles to encode one after the other; None for the whole picture at once.
            progress: called as `progress(chunks_done, chunks_total)`.

        Returns:
            The mean of the latents, not normalized.

        Raises:
            ValueError: a size does not fit.
        """
        batch, channels, frames, height, width = video.shape
        time, space = self.config.scale_factor_temporal, self.config.scale_factor_spatial
        if channels != self.config.in_channels:
            raise ValueError(f"video must have {self.config.in_channels} channels, got {channels}")
        if frames % time != 1 % time:
            raise ValueError(f"video must have {time}k + 1 frames, got {frames}")
        if height % space or width % space:
            raise ValueError(f"video's sizes must be multiples of {space}, got {height}x{width}")
        chunks = [slice(0, 1), *(slice(i, i + time) for i in range(1, frames, time))]
        shape = (batch, len(chunks), height // space, width // space, self.config.z_dim)
        return self._run(encode_chunk, video, chunks, tiling, (1, space), shape, progress)

    def decode(
        self,
        latents: Float[AnyArray, "batch latent_channels latent_frames latent_height latent_width"],
        *,
        tiling: Tiling | None = None,
        progress: Progress | None = None,
    ) -> Float[np.ndarray, "batch channels frames height width"]:
        """Decodes latents.

        Args:
            latents: not normalized, as `encode` returns them.
            tiling: tiles to decode one after the other; None for the whole picture at once.
            progress: called as `progress(chunks_done, chunks_total)`.

        Returns:
            Pixels in [-1, 1]; `4 * (latent_frames - 1) + 1` frames, sizes times 8.

        Raises:
            ValueError: the channels do not fit.
        """
        batch, channels, frames, height, width = latents.shape
        time, space = self.config.scale_factor_temporal, self.config.scale_factor_spatial
        if channels != self.config.z_dim:
            raise ValueError(f"latents must have {self.config.z_dim} channels, got {channels}")
        chunks = [slice(i, i + 1) for i in range(frames)]
        shape = (batch, 1 + (frames - 1) * time, height * space, width * space)
        shape = (*shape, self.config.out_channels)
        pixels = self._run(decode_chunk, latents, chunks, tiling, (space, 1), shape, progress)
        return np.clip(pixels, -1.0, 1.0, out=pixels)

    def _run(
        self,
        run_chunk: Callable[..., tuple[Array, list[Array]]],
        source: AnyArray,
        chunks: Sequence[slice],
        tiling: Tiling | None,
        units: tuple[int, int],
        out_shape: tuple[int, ...],
        progress: Progress | None,
    ) -> np.ndarray:
        """Runs the chunks of each tile; `units` are the pixels per element of source and result."""
        height, width = source.shape[3:]
        source_tiling = Tiling(height, width, height, width)
        target_tiling = Tiling(*out_shape[2:4], *out_shape[2:4])
        if tiling is not None:
            ratio = [tiling.divided(unit) for unit in units]
            if height > ratio[0].height or width > ratio[0].width:
                source_tiling, target_tiling = ratio
        tiles = sum(len(row) for row in source_tiling.tiles(height, width))
        done, total = 0, tiles * len(chunks)

        def run_tile(rows: slice, columns: slice) -> np.ndarray:
            nonlocal done
            pieces, kept = [], None
            for chunk in chunks:
                part = np.moveaxis(np.asarray(source[:, :, chunk, rows, columns]), 1, -1)
                piece, kept = run_chunk((self, jnp.asarray(part, jnp.float32)), kept)
                pieces.append(np.asarray(piece))
                done += 1
                if progress is not None:
                    progress(done, total)
            return np.concatenate(pieces, axis=1)

        out = np.empty(out_shape, np.float32)
        run_tiled(run_tile, source_tiling, target_tiling, (height, width), out)
        return np.moveaxis(out, -1, 1)


@eqx.filter_jit(donate="all-except-first")
def encode_chunk(
    inputs: tuple[AutoencoderKLWan, Array], kept: list[Array] | None
) -> tuple[Array, list[Array]]:
    """Encodes one chunk of frames: the first frame, or the next four after those in `kept`."""
    vae, x = inputs
    stream = Stream(kept)
    moments = vae.quant_conv(vae.encoder(x, stream), stream)
    return moments[..., : vae.config.z_dim], stream.left


@eqx.filter_jit(donate="all-except-first")
def decode_chunk(
    inputs: tuple[AutoencoderKLWan, Array], kept: list[Array] | None
) -> tuple[Array, list[Array]]:
    """Decodes one latent frame: the first, or the next after those in `kept`."""
    vae, x = inputs
    stream = Stream(kept)
    return vae.decoder(vae.post_quant_conv(x, stream), stream), stream.left
