"""Wan 2.1's transformer in PyTorch, as pure functions of weights named as diffusers names them.

Everything runs in the dtype of the weights; training casts float32 masters to bfloat16.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Params = dict[str, Tensor]
Tables = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the transformer, by their names in diffusers' WanTransformer3DModel."""

    num_attention_heads: int = 4
    attention_head_dim: int = 64
    num_layers: int = 6
    ffn_dim: int = 1024
    text_dim: int = 64
    freq_dim: int = 256
    in_channels: int = 16
    rope_theta: float = 10000.0

    @property
    def dim(self) -> int:
        """The width of a token."""
        return self.num_attention_heads * self.attention_head_dim


def init(config: ModelConfig, generator: torch.Generator) -> Params:
    """Weights at the start: every residual branch and the output add nothing."""
    params: Params = {}
    dim = config.dim

    def linear(name: str, fan_in: int, fan_out: int, *, zero: bool = False) -> None:
        weight = torch.randn(fan_out, fan_in, generator=generator) * fan_in**-0.5
        params[f"{name}.weight"] = torch.zeros_like(weight) if zero else weight
        params[f"{name}.bias"] = torch.zeros(fan_out)

    embedder = "condition_embedder"
    linear("patch_embedding", config.in_channels * 4, dim)
    linear(f"{embedder}.time_embedder.linear_1", config.freq_dim, dim)
    linear(f"{embedder}.time_embedder.linear_2", dim, dim)
    linear(f"{embedder}.time_proj", dim, 6 * dim, zero=True)
    linear(f"{embedder}.text_embedder.linear_1", config.text_dim, dim)
    linear(f"{embedder}.text_embedder.linear_2", dim, dim)
    for index in range(config.num_layers):
        block = f"blocks.{index}"
        for attention in ("attn1", "attn2"):
            for name in ("to_q", "to_k", "to_v"):
                linear(f"{block}.{attention}.{name}", dim, dim)
            linear(f"{block}.{attention}.to_out.0", dim, dim, zero=True)
            params[f"{block}.{attention}.norm_q.weight"] = torch.ones(dim)
            params[f"{block}.{attention}.norm_k.weight"] = torch.ones(dim)
        params[f"{block}.norm2.weight"] = torch.ones(dim)
        params[f"{block}.norm2.bias"] = torch.zeros(dim)
        linear(f"{block}.ffn.net.0.proj", dim, config.ffn_dim)
        linear(f"{block}.ffn.net.2", config.ffn_dim, dim, zero=True)
        table = torch.zeros(1, 6, dim)
        table[:, [2, 5]] = 1  # the two gates
        params[f"{block}.scale_shift_table"] = table
    linear("proj_out", dim, config.in_channels * 4, zero=True)
    params["scale_shift_table"] = torch.zeros(1, 2, dim)
    return params


def rope_tables(config: ModelConfig, frames: Tensor, rows: int, columns: int) -> Tables:
    """Cosines and sines [frames * rows * columns, 1, head_dim / 2], tokens frame-major.

    Args:
        config: the sizes.
        frames: the place in time of every latent frame, [frames].
        rows: tokens along the height.
        columns: tokens along the width.
    """
    side = 2 * (config.attention_head_dim // 6)
    sizes = (config.attention_head_dim - 2 * side, side, side)
    places = torch.cartesian_prod(
        frames.double(), torch.arange(rows).double(), torch.arange(columns).double()
    )
    angles = torch.cat(
        [
            places[:, axis, None] * config.rope_theta ** -(torch.arange(0, size, 2).double() / size)
            for axis, size in enumerate(sizes)
        ],
        dim=-1,
    )[:, None]
    return angles.cos(), angles.sin()


def velocity(
    params: Params,
    config: ModelConfig,
    latents: Tensor,
    time: Tensor,
    text: Tensor,
    tables: Tables,
    block: Callable[..., Tensor] | None = None,
) -> Tensor:
    """The flow's velocity, noise minus video, float32 with the shape of `latents`.

    Args:
        params: the weights.
        config: the sizes.
        latents: [batch, frames, height, width, channels].
        time: [batch], 1 for pure noise and 0 for the video.
        text: embeddings [batch, text tokens, text_dim].
        tables: from `rope_tables`.
        block: what runs one block; `transformer_block` or a compiled one.
    """
    run_block = transformer_block if block is None else block
    batch, frames, height, width, channels = latents.shape
    dtype = params["proj_out.weight"].dtype
    patches = latents.reshape(batch, frames, height // 2, 2, width // 2, 2, channels)
    patches = patches.permute(0, 1, 2, 4, 6, 3, 5).reshape(batch, -1, channels * 4)
    hidden = _linear(params, "patch_embedding", patches.to(dtype))

    embedder = "condition_embedder"
    moment = _time_features(time * 1000, config.freq_dim).to(dtype)
    moment = functional.silu(_linear(params, f"{embedder}.time_embedder.linear_1", moment))
    moment = _linear(params, f"{embedder}.time_embedder.linear_2", moment)
    modulation = _linear(params, f"{embedder}.time_proj", functional.silu(moment))
    modulation = modulation.view(batch, 6, config.dim)
    words = _linear(params, f"{embedder}.text_embedder.linear_1", text.to(dtype))
    words = functional.gelu(words, approximate="tanh")
    words = _linear(params, f"{embedder}.text_embedder.linear_2", words)

    cosines, sines = (table.to(dtype) for table in tables)
    for index in range(config.num_layers):
        prefix = f"blocks.{index}."
        weights = {
            name.removeprefix(prefix): value
            for name, value in params.items()
            if name.startswith(prefix)
        }
        hidden = run_block(
            weights, hidden, modulation, words, cosines, sines, config.num_attention_heads
        )

    shift, scale = (params["scale_shift_table"] + moment[:, None]).chunk(2, dim=1)
    hidden = _normed(hidden) * (1 + scale) + shift
    out = _linear(params, "proj_out", hidden).float()
    out = out.view(batch, frames, height // 2, width // 2, 2, 2, channels)
    return out.permute(0, 1, 2, 4, 3, 5, 6).reshape(latents.shape)


def transformer_block(
    weights: Params,
    hidden: Tensor,
    modulation: Tensor,
    words: Tensor,
    cosines: Tensor,
    sines: Tensor,
    heads: int,
) -> Tensor:
    """One block: self-attention, cross-attention, feed-forward; [batch, tokens, dim]."""
    parts = (weights["scale_shift_table"] + modulation).chunk(6, dim=1)
    shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = parts

    q, k, v = self_attention_inputs(weights, hidden, shift, scale, cosines, sines, heads)
    hidden = hidden + _attend(weights, "attn1", q, k, v) * gate

    normed = functional.layer_norm(
        hidden, hidden.shape[-1:], weights["norm2.weight"], weights["norm2.bias"], eps=1e-6
    )
    hidden = hidden + _attend(weights, "attn2", *_project(weights, "attn2", normed, words, heads))

    normed = _normed(hidden) * (1 + ffn_scale) + ffn_shift
    inner = functional.gelu(_linear(weights, "ffn.net.0.proj", normed), approximate="tanh")
    return hidden + _linear(weights, "ffn.net.2", inner) * ffn_gate


def self_attention_inputs(
    weights: Params,
    hidden: Tensor,
    shift: Tensor,
    scale: Tensor,
    cosines: Tensor,
    sines: Tensor,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Turned queries and keys, and values: [batch, tokens, heads, head_dim] each."""
    normed = _normed(hidden) * (1 + scale) + shift
    q, k, v = _project(weights, "attn1", normed, normed, heads)
    return _rotate(q, cosines, sines), _rotate(k, cosines, sines), v


def _linear(params: Params, name: str, x: Tensor) -> Tensor:
    return functional.linear(x, params[f"{name}.weight"], params[f"{name}.bias"])


def _normed(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=1e-6)


def _project(
    weights: Params, name: str, x: Tensor, context: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [batch, tokens, heads, head_dim], normed over all heads at once."""
    q, k, v = (
        _linear(weights, f"{name}.to_{kind}", source)
        for kind, source in (("q", x), ("k", context), ("v", context))
    )
    dim = q.shape[-1:]
    q = functional.rms_norm(q, dim, weights[f"{name}.norm_q.weight"], eps=1e-6)
    k = functional.rms_norm(k, dim, weights[f"{name}.norm_k.weight"], eps=1e-6)
    return q.unflatten(-1, (heads, -1)), k.unflatten(-1, (heads, -1)), v.unflatten(-1, (heads, -1))


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns the pairs (0, 1), (2, 3) and so on of every head."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = (even * cosines - odd * sines, even * sines + odd * cosines)
    return torch.stack(turned, dim=-1).flatten(-2)


def _attend(weights: Params, name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
    out = (q @ k.transpose(-1, -2)).softmax(-1) @ v
    return _linear(weights, f"{name}.to_out.0", out.transpose(1, 2).flatten(-2))


def _time_features(timestep: Tensor, size: int) -> Tensor:
    """Cosines, then sines, of the timestep (0 to 1000) at geometric frequencies."""
    half = size // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(half) / half)
    angles = timestep.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
