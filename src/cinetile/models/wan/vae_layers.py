"""Layers of the causal video autoencoder, which processes a video in chunks of frames.

Arrays are `[batch, frames, height, width, channels]`. A causal layer takes a `Stream`: it reads the
last frames of the previous chunk from it and stores the last frames of this chunk in it. Chunks
therefore give the same result as the whole video.
"""

import itertools
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from cinetile.models.wan.layers import random_weight

_FLOAT32 = jnp.dtype("float32")
_NORM_FLOOR = 1e-12

Chunk = Float[Array, "_batch _frames _height _width _channels"]


class Stream:
    """The frames that causal layers carry from one chunk to the next, in call order.

    Args:
        kept: `left` of the previous chunk; None at the first chunk.

    Attributes:
        left: frames stored for the next chunk.
    """

    def __init__(self, kept: Sequence[Array] | None) -> None:
        self._kept = None if kept is None else list(kept)
        self.left: list[Array] = []

    @property
    def is_first(self) -> bool:
        """Whether this is the first chunk of a video."""
        return self._kept is None

    def before(self, x: Chunk, frames: int) -> Chunk:
        """The last frames of the previous chunk; zeros at the first chunk."""
        if self._kept is None:
            batch, _, *rest = x.shape
            return jnp.zeros((batch, frames, *rest), x.dtype)
        return self._kept[len(self.left)]

    def leave(self, frames: Chunk) -> None:
        """Stores frames for the same layer at the next chunk."""
        self.left.append(frames)

    def extend(self, x: Chunk, frames: int) -> Chunk:
        """Prepends the previous chunk's last `frames` frames, and stores this chunk's last ones."""
        if not frames:
            return x
        extended = jnp.concatenate([self.before(x, frames), x], axis=1)
        self.leave(extended[:, -frames:])
        return extended


class CausalConv3d(eqx.Module):
    """A causal convolution: no output depends on later frames; zeros precede the first frame."""

    weight: Float[Array, "out in time height width"]
    bias: Float[Array, " out"]
    stride: int = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: tuple[int, int, int],
        *,
        key: PRNGKeyArray,
        stride: int = 1,
    ) -> None:
        shape = (out_channels, in_channels, *kernel)
        fan_in = in_channels * kernel[0] * kernel[1] * kernel[2]
        self.weight = random_weight(key, shape, fan_in, _FLOAT32)
        self.bias = jnp.zeros((out_channels,), _FLOAT32)
        self.stride = stride

    def __call__(self, x: Chunk, stream: Stream) -> Chunk:
        return self.convolve(stream.extend(x, self.weight.shape[2] - 1))

    def convolve(self, x: Chunk) -> Chunk:
        """Convolves a chunk with its earlier frames in front; pads only height and width."""
        height, width = (size // 2 for size in self.weight.shape[3:])
        return self.bias + jax.lax.conv_general_dilated(
            x,
            self.weight,
            window_strides=(self.stride, 1, 1),
            padding=((0, 0), (height, height), (width, width)),
            dimension_numbers=("NDHWC", "OIDHW", "NDHWC"),
        )


class Conv2d(eqx.Module):
    """A convolution that is applied to each frame separately."""

    weight: Float[Array, "out in height width"]
    bias: Float[Array, " out"]

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, *, key: PRNGKeyArray
    ) -> None:
        shape = (out_channels, in_channels, kernel, kernel)
        self.weight = random_weight(key, shape, in_channels * kernel**2, _FLOAT32)
        self.bias = jnp.zeros((out_channels,), _FLOAT32)

    def __call__(
        self,
        x: Chunk,
        *,
        stride: int = 1,
        padding: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0)),
    ) -> Chunk:
        batch, frames, *rest = x.shape
        y = self.bias + jax.lax.conv_general_dilated(
            x.reshape(batch * frames, *rest),
            self.weight,
            window_strides=(stride, stride),
            padding=padding,
            dimension_numbers=("NHWC", "OIHW", "NHWC"),
        )
        return y.reshape(batch, frames, *y.shape[1:])


class ChannelNorm(eqx.Module):
    """Root-mean-square norm over the channels.

    Args:
        channels: channels.
        axes: trailing axes of length 1 that the stored parameter has.
    """

    gamma: Float[Array, "..."]

    def __init__(self, channels: int, axes: int) -> None:
        self.gamma = jnp.ones((channels, *(1,) * axes), _FLOAT32)

    def __call__(self, x: Chunk) -> Chunk:
        length = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
        scale = self.gamma.reshape(-1) * x.shape[-1] ** 0.5
        return x / jnp.maximum(length, _NORM_FLOOR) * scale


class ResidualBlock(eqx.Module):
    """Two causal convolutions, each after a norm and a SiLU, plus a shortcut."""

    norm1: ChannelNorm
    conv1: CausalConv3d
    norm2: ChannelNorm
    conv2: CausalConv3d
    conv_shortcut: CausalConv3d | None

    def __init__(self, in_channels: int, out_channels: int, *, key: PRNGKeyArray) -> None:
        first, second, shortcut = jax.random.split(key, 3)
        self.norm1 = ChannelNorm(in_channels, 3)
        self.conv1 = CausalConv3d(in_channels, out_channels, (3, 3, 3), key=first)
        self.norm2 = ChannelNorm(out_channels, 3)
        self.conv2 = CausalConv3d(out_channels, out_channels, (3, 3, 3), key=second)
        self.conv_shortcut = None
        if in_channels != out_channels:
            self.conv_shortcut = CausalConv3d(in_channels, out_channels, (1, 1, 1), key=shortcut)

    def __call__(self, x: Chunk, stream: Stream) -> Chunk:
        shortcut = x if self.conv_shortcut is None else self.conv_shortcut(x, stream)
        x = self.conv1(jax.nn.silu(self.norm1(x)), stream)
        x = self.conv2(jax.nn.silu(self.norm2(x)), stream)
        return x + shortcut


class AttentionBlock(eqx.Module):
    """Single-head attention within each frame, plus a shortcut."""

    norm: ChannelNorm
    to_qkv: Conv2d
    proj: Conv2d

    def __init__(self, channels: int, *, key: PRNGKeyArray) -> None:
        first, last = jax.random.split(key)
        self.norm = ChannelNorm(channels, 2)
        self.to_qkv = Conv2d(channels, 3 * channels, 1, key=first)
        self.proj = Conv2d(channels, channels, 1, key=last)

    def __call__(self, x: Chunk) -> Chunk:
        batch, frames, height, width, channels = x.shape
        places = self.to_qkv(self.norm(x)).reshape(batch * frames, height * width, 1, -1)
        attended = jax.nn.dot_product_attention(*jnp.split(places, 3, axis=-1))
        return x + self.proj(attended.reshape(batch, frames, height, width, channels))


class MidBlock(eqx.Module):
    """A residual block, attention, and another residual block."""

    resnets: tuple[ResidualBlock, ResidualBlock]
    attentions: tuple[AttentionBlock]

    def __init__(self, channels: int, *, key: PRNGKeyArray) -> None:
        first, second, attention = jax.random.split(key, 3)
        self.resnets = (
            ResidualBlock(channels, channels, key=first),
            ResidualBlock(channels, channels, key=second),
        )
        self.attentions = (AttentionBlock(channels, key=attention),)

    def __call__(self, x: Chunk, stream: Stream) -> Chunk:
        before, after = self.resnets
        return after(self.attentions[0](before(x, stream)), stream)


class Downsample(eqx.Module):
    """Halves height and width, and the frames too if it has `time_conv`."""

    resample: Conv2d
    time_conv: CausalConv3d | None

    def __init__(self, channels: int, *, in_time: bool, key: PRNGKeyArray) -> None:
        space, time = jax.random.split(key)
        self.resample = Conv2d(channels, channels, 3, key=space)
        self.time_conv = None
        if in_time:
            self.time_conv = CausalConv3d(channels, channels, (3, 1, 1), key=time, stride=2)

    def __call__(self, x: Chunk, stream: Stream) -> Chunk:
        x = self.resample(x, stride=2, padding=((0, 1), (0, 1)))
        if self.time_conv is None:
            return x
        if stream.is_first:  # a video's first frame is a latent frame of its own
            stream.leave(x[:, -1:])
            return x
        before = stream.before(x, 1)
        stream.leave(x[:, -1:])
        return self.time_conv.convolve(jnp.concatenate([before, x], axis=1))


class Upsample(eqx.Module):
    """Doubles height and width and halves the channels; doubles frames if it has `time_conv`."""

    resample: Conv2d
    time_conv: CausalConv3d | None

    def __init__(self, channels: int, *, in_time: bool, key: PRNGKeyArray) -> None:
        space, time = jax.random.split(key)
        self.resample = Conv2d(channels, channels // 2, 3, key=space)
        self.time_conv = None
        if in_time:
            self.time_conv = CausalConv3d(channels, 2 * channels, (3, 1, 1), key=time)

    def __call__(self, x: Chunk, stream: Stream) -> Chunk:
        if self.time_conv is not None:
            x = self._double_frames(self.time_conv, x, stream)
        x = jnp.repeat(jnp.repeat(x, 2, axis=2), 2, axis=3)
        return self.resample(x, padding=((1, 1), (1, 1)))

    def _double_frames(self, time_conv: CausalConv3d, x: Chunk, stream: Stream) -> Chunk:
        if stream.is_first:  # the first latent frame is one frame, and later ones do not see it
            stream.leave(stream.before(x, 2))
            return x
        batch, frames, height, width, channels = x.shape
        doubled = time_conv(x, stream).reshape(batch, frames, height, width, 2, channels)
        return jnp.moveaxis(doubled, 4, 2).reshape(batch, 2 * frames, height, width, channels)


class UpBlock(eqx.Module):
    """Residual blocks, followed by upsampling except in the last block."""

    resnets: tuple[ResidualBlock, ...]
    upsamplers: tuple[Upsample, ...]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_resnets: int,
        *,
        upsample: bool,
        in_time: bool,
        key: PRNGKeyArray,
    ) -> None:
        *resnets, last = jax.random.split(key, num_resnets + 1)
        widths = (in_channels, *(out_channels,) * num_resnets)
        self.resnets = tuple(
            ResidualBlock(width, out_channels, key=layer_key)
            for width, layer_key in zip(widths, resnets, strict=False)
        )
        self.upsamplers = ()
        if upsample:
            self.upsamplers = (Upsample(out_channels, in_time=in_time, key=last),)

    def __call__(self, x: Chunk, stream: Stream) -> Chunk:
        for resnet in self.resnets:
            x = resnet(x, stream)
        for upsampler in self.upsamplers:
            x = upsampler(x, stream)
        return x


class Encoder(eqx.Module):
    """Maps pixels to the mean and log-variance of latents."""

    conv_in: CausalConv3d
    down_blocks: tuple[ResidualBlock | Downsample, ...]
    mid_block: MidBlock
    norm_out: ChannelNorm
    conv_out: CausalConv3d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        widths: tuple[int, ...],
        num_res_blocks: int,
        downsample_time: tuple[bool, ...],
        *,
        key: PRNGKeyArray,
    ) -> None:
        first, middle, last, *keys = jax.random.split(key, 3 + len(widths) * (num_res_blocks + 1))
        draw = iter(keys)
        self.conv_in = CausalConv3d(in_channels, widths[0], (3, 3, 3), key=first)
        blocks: list[ResidualBlock | Downsample] = []
        for level, (width, following) in enumerate(itertools.pairwise(widths)):
            for block in range(num_res_blocks):
                blocks.append(
                    ResidualBlock(following if block else width, following, key=next(draw))
                )
            if level < len(downsample_time):
                blocks.append(Downsample(following, in_time=downsample_time[level], key=next(draw)))
        self.down_blocks = tuple(blocks)
        self.mid_block = MidBlock(widths[-1], key=middle)
        self.norm_out = ChannelNorm(widths[-1], 3)
        self.conv_out = CausalConv3d(widths[-1], out_channels, (3, 3, 3), key=last)

    def __call__(self, x: Chunk, stream: Stream) -> Chunk:
        x = self.conv_in(x, stream)
        for block in self.down_blocks:
            x = block(x, stream)
        x = self.mid_block(x, stream)
        return self.conv_out(jax.nn.silu(self.norm_out(x)), stream)


class Decoder(eqx.Module):
    """Maps latents to pixels."""

    conv_in: CausalConv3d
    mid_block: MidBlock
    up_blocks: tuple[UpBlock, ...]
    norm_out: ChannelNorm
    conv_out: CausalConv3d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        widths: tuple[int, ...],
        num_res_blocks: int,
        upsample_time: tuple[bool, ...],
        *,
        key: PRNGKeyArray,
    ) -> None:
        first, middle, last, *keys = jax.random.split(key, 3 + len(widths) - 1)
        self.conv_in = CausalConv3d(in_channels, widths[0], (3, 3, 3), key=first)
        self.mid_block = MidBlock(widths[0], key=middle)
        blocks = []
        for level, layer_key in enumerate(keys):
            upsample = level < len(upsample_time)
            # An upsampling has halved the channels that the level before gave.
            blocks.append(
                UpBlock(
                    widths[level] // 2 if level else widths[0],
                    widths[level + 1],
                    num_res_blocks + 1,
                    upsample=upsample,
                    in_time=upsample and upsample_time[level],
                    key=layer_key,
                )
            )
        self.up_blocks = tuple(blocks)
        self.norm_out = ChannelNorm(widths[-1], 3)
        self.conv_out = CausalConv3d(widths[-1], out_channels, (3, 3, 3), key=last)

    def __call__(self, x: Chunk, stream: Stream) -> Chunk:
        x = self.mid_block(self.conv_in(x, stream), stream)
        for block in self.up_blocks:
            x = block(x, stream)
        return self.conv_out(jax.nn.silu(self.norm_out(x)), stream)
