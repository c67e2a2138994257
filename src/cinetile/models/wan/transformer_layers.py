"""The layers of the diffusion transformer; parameters are named as in diffusers."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from cinetile.models.wan.layers import LayerNorm, Linear, RMSNorm, layer_norm, random_weight
from cinetile.models.wan.transformer_config import WanTransformerConfig
from cinetile.parallel.layout import ArrayLayout

_TIME_PERIOD = 10_000.0


class MultiHeadAttention(eqx.Module):
    """The projections of an attention layer, with query and key norms over all heads at once."""

    to_q: Linear
    to_k: Linear
    to_v: Linear
    to_out: Linear
    norm_q: RMSNorm
    norm_k: RMSNorm
    heads: int = eqx.field(static=True)

    def __init__(
        self, config: WanTransformerConfig, *, key: PRNGKeyArray, dtype: jnp.dtype
    ) -> None:
        self.heads = config.num_attention_heads
        self.to_q, self.to_k, self.to_v, self.to_out = (
            Linear(config.dim, config.dim, key=part, dtype=dtype)
            for part in jax.random.split(key, 4)
        )
        self.norm_q = RMSNorm(config.dim, config.eps, dtype=dtype)
        self.norm_k = RMSNorm(config.dim, config.eps, dtype=dtype)

    def project(
        self, x: Float[Array, "batch tokens dim"], context: Float[Array, "batch keys dim"]
    ) -> tuple[
        Float[Array, "batch tokens heads head_dim"],
        Float[Array, "batch keys heads head_dim"],
        Float[Array, "batch keys heads head_dim"],
    ]:
        """Projects `x` to the query, and `context` to the key and the value."""
        split = (self.heads, -1)
        query = self.norm_q(self.to_q(x))
        key, value = self.norm_k(self.to_k(context)), self.to_v(context)
        return (
            query.reshape(*query.shape[:2], *split),
            key.reshape(*key.shape[:2], *split),
            value.reshape(*value.shape[:2], *split),
        )

    def merge(
        self, heads: Float[Array, "batch tokens heads head_dim"]
    ) -> Float[Array, "batch tokens dim"]:
        """Joins the heads and applies the output projection."""
        return self.to_out(heads.reshape(*heads.shape[:2], -1))


class FeedForward(eqx.Module):
    """Two linear layers with a GELU (tanh approximation) between them."""

    up: Linear
    down: Linear

    def __init__(
        self, config: WanTransformerConfig, *, key: PRNGKeyArray, dtype: jnp.dtype
    ) -> None:
        up, down = jax.random.split(key)
        self.up = Linear(config.dim, config.ffn_dim, key=up, dtype=dtype)
        self.down = Linear(config.ffn_dim, config.dim, key=down, dtype=dtype)

    def __call__(self, x: Float[Array, "batch tokens dim"]) -> Float[Array, "batch tokens dim"]:
        return self.down(jax.nn.gelu(self.up(x), approximate=True))


class Block(eqx.Module):
    """Self-attention, cross-attention to the text and feed-forward, modulated by the time step."""

    attn1: MultiHeadAttention
    attn2: MultiHeadAttention
    norm2: LayerNorm
    ffn: FeedForward
    scale_shift_table: Float[Array, "1 6 dim"]
    eps: float = eqx.field(static=True)

    def __init__(
        self, config: WanTransformerConfig, *, key: PRNGKeyArray, dtype: jnp.dtype
    ) -> None:
        attn1, attn2, ffn, table = jax.random.split(key, 4)
        self.attn1 = MultiHeadAttention(config, key=attn1, dtype=dtype)
        self.attn2 = MultiHeadAttention(config, key=attn2, dtype=dtype)
        self.norm2 = LayerNorm(config.dim, config.eps)
        self.ffn = FeedForward(config, key=ffn, dtype=dtype)
        self.scale_shift_table = random_weight(
            table, (1, 6, config.dim), config.dim, jnp.dtype("float32")
        )
        self.eps = config.eps

    def __call__(
        self,
        x: Float[Array, "batch tokens dim"],
        text: Float[Array, "batch text dim"],
        modulation: Float[Array, "batch 6 dim"],
        rotary: tuple[Float[Array, "tokens pairs"], Float[Array, "tokens pairs"]],
        attend: Callable[..., Any],
        layout: ArrayLayout | None = None,
    ) -> tuple[Float[Array, "batch tokens dim"], Any]:
        """Returns the tokens in their dtype, and what `attend` recorded."""
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = jnp.split(
            self.scale_shift_table + modulation.astype(jnp.float32), 6, axis=1
        )
        dtype = x.dtype

        normal = (layer_norm(x, self.eps) * (1 + scale) + shift).astype(dtype)
        query, key, value = self.attn1.project(normal, normal)
        heads, record = attend(rotate(query, *rotary), rotate(key, *rotary), value)
        update = self.attn1.merge(heads)
        x = (x.astype(jnp.float32) + update * gate).astype(dtype)

        query, key, value = self.attn2.project(self.norm2(x).astype(dtype), text)
        x = x + self.attn2.merge(cross_attention(query, key, value, layout))

        normal = (layer_norm(x, self.eps) * (1 + ffn_scale) + ffn_shift).astype(dtype)
        update = self.ffn(normal).astype(jnp.float32)
        return (x.astype(jnp.float32) + update * ffn_gate).astype(dtype), record


class TimestepEmbedder(eqx.Module):
    """Two linear layers with a SiLU between them, in float32."""

    linear_1: Linear
    linear_2: Linear

    def __init__(self, config: WanTransformerConfig, *, key: PRNGKeyArray) -> None:
        first, second = jax.random.split(key)
        float32 = jnp.dtype("float32")
        self.linear_1 = Linear(config.freq_dim, config.dim, key=first, dtype=float32)
        self.linear_2 = Linear(config.dim, config.dim, key=second, dtype=float32)

    def __call__(self, waves: Float[Array, "batch freq"]) -> Float[Array, "batch dim"]:
        return self.linear_2(jax.nn.silu(self.linear_1(waves)))


class TextEmbedder(eqx.Module):
    """Two linear layers with a GELU (tanh approximation) between them."""

    linear_1: Linear
    linear_2: Linear

    def __init__(
        self, config: WanTransformerConfig, *, key: PRNGKeyArray, dtype: jnp.dtype
    ) -> None:
        first, second = jax.random.split(key)
        self.linear_1 = Linear(config.text_dim, config.dim, key=first, dtype=dtype)
        self.linear_2 = Linear(config.dim, config.dim, key=second, dtype=dtype)

    def __call__(self, text: Float[Array, "batch text in"]) -> Float[Array, "batch text dim"]:
        return self.linear_2(jax.nn.gelu(self.linear_1(text), approximate=True))


class ConditionEmbedder(eqx.Module):
    """Embeds the time step and the text for the blocks."""

    time_embedder: TimestepEmbedder
    time_proj: Linear
    text_embedder: TextEmbedder
    freq_dim: int = eqx.field(static=True)

    def __init__(
        self, config: WanTransformerConfig, *, key: PRNGKeyArray, dtype: jnp.dtype
    ) -> None:
        time, projection, text = jax.random.split(key, 3)
        self.time_embedder = TimestepEmbedder(config, key=time)
        self.time_proj = Linear(config.dim, 6 * config.dim, key=projection, dtype=dtype)
        self.text_embedder = TextEmbedder(config, key=text, dtype=dtype)
        self.freq_dim = config.freq_dim

    def __call__(
        self, timestep: Float[Array, " batch"], text: Float[Array, "batch text in"]
    ) -> tuple[
        Float[Array, "batch dim"], Float[Array, "batch 6 dim"], Float[Array, "batch text dim"]
    ]:
        """Returns the time embedding, the modulation of the blocks and the text tokens."""
        half = self.freq_dim // 2
        rates = jnp.exp(-math.log(_TIME_PERIOD) * jnp.arange(half, dtype=jnp.float32) / half)
        angles = timestep.astype(jnp.float32)[:, None] * rates
        waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
        time = self.time_embedder(waves).astype(text.dtype)
        modulation = self.time_proj(jax.nn.silu(time))
        return time, modulation.reshape(time.shape[0], 6, -1), self.text_embedder(text)


class PatchEmbedding(eqx.Module):
    """A convolution with stride equal to its kernel size: one token per patch of latents."""

    weight: Float[Array, "dim channels frames height width"]
    bias: Float[Array, " dim"]

    def __init__(
        self, config: WanTransformerConfig, *, key: PRNGKeyArray, dtype: jnp.dtype
    ) -> None:
        shape = (config.dim, config.in_channels, *config.patch_size)
        self.weight = random_weight(key, shape, math.prod(shape[1:]), dtype)
        self.bias = jnp.zeros((config.dim,), dtype)

    def __call__(
        self, latents: Float[Array, "batch channels f h w"]
    ) -> Float[Array, "batch tokens dim"]:
        batch, channels, *sizes = latents.shape
        dim, _, *patch = self.weight.shape
        grid = [size // step for size, step in zip(sizes, patch, strict=True)]
        split = [size for pair in zip(grid, patch, strict=True) for size in pair]
        patches = latents.reshape(batch, channels, *split).transpose(0, 2, 4, 6, 1, 3, 5, 7)
        patches = patches.reshape(batch, math.prod(grid), -1).astype(self.weight.dtype)
        return patches @ self.weight.reshape(dim, -1).T + self.bias


def rotate(
    x: Float[Array, "batch tokens heads head_dim"],
    cosine: Float[Array, "tokens pairs"],
    sine: Float[Array, "tokens pairs"],
) -> Float[Array, "batch tokens heads head_dim"]:
    """Rotates each pair of neighbouring channels by the angle of its token, in float32."""
    even, odd = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    cosine, sine = cosine[:, None], sine[:, None]
    pairs = jnp.stack([even * cosine - odd * sine, even * sine + odd * cosine], axis=-1)
    return pairs.reshape(x.shape).astype(x.dtype)


def cross_attention(
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch text heads head_dim"],
    value: Float[Array, "batch text heads head_dim"],
    layout: ArrayLayout | None = None,
) -> Float[Array, "batch tokens heads head_dim"]:
    """Attends to the text, head by head: the logits of all heads at once would take gigabytes."""
    if layout is not None:
        # Each device loops over its own heads: one loop over sharded heads would gather them.
        queries = layout.fitting(query.shape[:3])
        texts = PartitionSpec(queries[0], None, queries[2])
        return jax.shard_map(
            cross_attention,
            mesh=layout.mesh,
            in_specs=(queries, texts, texts),
            out_specs=queries,
            check_vma=False,
        )(query, key, value)

    def attend_head(arrays: tuple[Array, Array, Array]) -> Array:
        single = (array[:, :, np.newaxis] for array in arrays)
        return jax.nn.dot_product_attention(*single)[:, :, 0]

    by_head = tuple(jnp.moveaxis(array, 2, 0) for array in (query, key, value))
    return jnp.moveaxis(jax.lax.map(attend_head, by_head), 0, 2)
