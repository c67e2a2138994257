"""The diffusion transformer of Wan 2.1 and 2.2 (text to video)."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from cinetile import _checks
from cinetile.grid import TokenGrid
from cinetile.models.rotary import rotary_tables
from cinetile.models.wan.attention import DenseAttention, SelfAttention
from cinetile.models.wan.config import parse_config, read_json
from cinetile.models.wan.layers import (
    LayerNorm,
    Linear,
    RMSNorm,
    layer_norm,
    random_weight,
    scan_layers,
)
from cinetile.models.wan.weights import Part, WeightFiles, load_model
from cinetile.parallel.layout import ArrayLayout

_TIME_PERIOD = 10_000.0

# Where the files' names of parameters differ from the attributes here.
_RENAMES = {
    ".to_out.": ".to_out.0.",
    ".ffn.up.": ".ffn.net.0.proj.",
    ".ffn.down.": ".ffn.net.2.",
}

_FIXED: dict[str, object] = {
    "qk_norm": "rms_norm_across_heads",
    "cross_attn_norm": True,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "pos_embed_seq_len": None,
    "window_size": [-1, -1],
    "add_img_emb": False,
}


@dataclass(frozen=True)
class WanTransformerConfig:
    """Sizes of the transformer; names and defaults are diffusers'.

    Attributes:
        patch_size: latent frames, rows and columns of a token.
        num_attention_heads: heads of self- and cross-attention.
        attention_head_dim: channels of a head, even.
        in_channels: channels of the latents.
        out_channels: channels of the prediction.
        text_dim: channels of the text embeddings.
        freq_dim: channels of the time step's sines and cosines, even.
        ffn_dim: hidden channels of the feed-forward layers.
        num_layers: transformer blocks.
        eps: of all norms.
        rope_max_seq_len: most positions on an axis of the token grid.
        rope_theta: ratio of the fastest and slowest rotation of a position. diffusers knows only
            the default.
    """

    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_attention_heads: int = 40
    attention_head_dim: int = 128
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    ffn_dim: int = 13824
    num_layers: int = 40
    eps: float = 1e-6
    rope_max_seq_len: int = 1024
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "patch_size", _checks.strides("patch_size", self.patch_size))
        for name in (
            "num_attention_heads",
            "attention_head_dim",
            "in_channels",
            "out_channels",
            "text_dim",
            "freq_dim",
            "ffn_dim",
            "num_layers",
            "rope_max_seq_len",
        ):
            object.__setattr__(self, name, _checks.integer(name, getattr(self, name), minimum=1))
        for name in ("attention_head_dim", "freq_dim"):
            if getattr(self, name) % 2:
                raise ValueError(f"{name} must be even, got {getattr(self, name)}")
        for name in ("eps", "rope_theta"):
            object.__setattr__(self, name, _checks.positive(name, getattr(self, name)))

    @property
    def dim(self) -> int:
        """Channels of a token."""
        return self.num_attention_heads * self.attention_head_dim

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "WanTransformerConfig":
        """Reads the `config.json` of a transformer folder.

        Raises:
            FileNotFoundError: there is none.
            TypeError: a field has the wrong type.
            ValueError: a field is unknown, out of range, or asks for what is not implemented.
        """
        path = Path(folder) / "config.json"
        return parse_config(cls, read_json(path), path, fixed=_FIXED)


class MultiHeadAttention(eqx.Module):
    """Projections of an attention layer, with query and key norms over all heads at once."""

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
            Linear(config.dim, config.dim, key=one, dtype=dtype) for one in jax.random.split(key, 4)
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
        """Query of `x`, key and value of `context`."""
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
        """The output projection of all heads."""
        return self.to_out(heads.reshape(*heads.shape[:2], -1))


class FeedForward(eqx.Module):
    """Two linear layers with a GELU (by tanh) between them."""

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
    """Self-attention, cross-attention to the text, feed-forward; modulated by the time step."""

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
    """Two linear layers with a GELU (by tanh) between them."""

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
    """Time step and text as the blocks take them."""

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
        """Returns the time embedding, the modulation of the blocks and the text's tokens."""
        half = self.freq_dim // 2
        rates = jnp.exp(-math.log(_TIME_PERIOD) * jnp.arange(half, dtype=jnp.float32) / half)
        angles = timestep.astype(jnp.float32)[:, None] * rates
        waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
        time = self.time_embedder(waves).astype(text.dtype)
        modulation = self.time_proj(jax.nn.silu(time))
        return time, modulation.reshape(time.shape[0], 6, -1), self.text_embedder(text)


class PatchEmbedding(eqx.Module):
    """A convolution whose stride is its kernel: each patch of latents becomes one token."""

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


class WanTransformer3DModel(eqx.Module):
    """Predicts the flow of latents at a time step, given a text's embedding.

    The parameters are named as in diffusers, except that those of all blocks are stacked along a
    leading layer axis, over which the forward pass scans: compile time does not grow with depth.
    Built with random weights; `load` reads trained ones.

    Args:
        config: sizes.
        key: of the random weights.
        dtype: "float32" or "bfloat16"; norms, modulation and the time embedding stay in float32.
    """

    class_name: ClassVar[str] = "WanTransformer3DModel"

    patch_embedding: PatchEmbedding
    condition_embedder: ConditionEmbedder
    blocks: Block
    proj_out: Linear
    scale_shift_table: Float[Array, "1 2 dim"]
    config: WanTransformerConfig = eqx.field(static=True)

    def __init__(
        self, config: WanTransformerConfig, *, key: PRNGKeyArray, dtype: str = "float32"
    ) -> None:
        kind = jnp.dtype(_checks.choice("dtype", dtype, ("float32", "bfloat16")))
        patch, condition, blocks, out, table = jax.random.split(key, 5)
        self.config = config
        self.patch_embedding = PatchEmbedding(config, key=patch, dtype=kind)
        self.condition_embedder = ConditionEmbedder(config, key=condition, dtype=kind)
        self.blocks = eqx.filter_vmap(lambda one: Block(config, key=one, dtype=kind))(
            jax.random.split(blocks, config.num_layers)
        )
        self.proj_out = Linear(
            config.dim, config.out_channels * math.prod(config.patch_size), key=out, dtype=kind
        )
        self.scale_shift_table = random_weight(
            table, (1, 2, config.dim), config.dim, jnp.dtype("float32")
        )

    @classmethod
    def deferred(
        cls, folder: str | os.PathLike[str], *, dtype: str | None = None
    ) -> "Part[WanTransformerConfig, WanTransformer3DModel]":
        """Like `load`, but reads only the configuration and the files' headers for now."""
        config = WanTransformerConfig.read(folder)
        files = WeightFiles(folder)
        chosen = files.compute_dtype if dtype is None else dtype
        load = load_model(
            lambda: cls(config, key=jax.random.key(0), dtype=chosen),
            files,
            stacked="blocks",
            renames=_RENAMES,
        )
        return Part(config, chosen, load)

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], *, dtype: str | None = None
    ) -> "WanTransformer3DModel":
        """Loads `config.json` and the safetensors of a folder that diffusers wrote.

        Args:
            folder: the pipeline's `transformer` folder.
            dtype: "float32" or "bfloat16"; by default as stored. Each tensor is cast by itself.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: the configuration is not implemented, a file is damaged, or a tensor is
                missing, unknown or misshapen.
        """
        return cls.deferred(folder, dtype=dtype).get()

    @property
    def dtype(self) -> str:
        """Compute dtype."""
        return str(self.patch_embedding.weight.dtype)

    def grid(self, latent_shape: tuple[int, ...]) -> TokenGrid:
        """The token grid of latents `[batch, channels, frames, height, width]`.

        Raises:
            ValueError: the channels differ, or a size is no multiple of the patch or too large.
        """
        if len(latent_shape) != 5 or latent_shape[1] != self.config.in_channels:
            raise ValueError(
                f"hidden_states must be [batch, {self.config.in_channels}, frames, height, width], "
                f"got shape {tuple(latent_shape)}"
            )
        sizes = []
        for name, size, step in zip(
            ("frames", "height", "width"), latent_shape[2:], self.config.patch_size, strict=True
        ):
            most = self.config.rope_max_seq_len * step
            if size % step or not 0 < size <= most:
                raise ValueError(
                    f"hidden_states' {name} must be a multiple of {step} from {step} to {most}, "
                    f"got {size}"
                )
            sizes.append(size // step)
        return TokenGrid(*sizes)

    def __call__(
        self,
        hidden_states: Float[Array, "batch channels frames height width"],
        timestep: Float[Array, " batch"] | Int[Array, " batch"],
        encoder_hidden_states: Float[Array, "batch text text_dim"],
        *,
        attention: SelfAttention | None = None,
        step: int | Int[Array, ""] = 0,
        rng: PRNGKeyArray | None = None,
        return_record: bool = False,
        layout: ArrayLayout | None = None,
    ) -> Any:
        """Predicts the flow.

        Args:
            hidden_states: noisy latents.
            timestep: of each row of the batch, in [0, 1000].
            encoder_hidden_states: text embeddings, zero where the prompt is padded.
            attention: self-attention; dense by default.
            step: index of the denoising step, for `attention`; may be traced.
            rng: for `attention`, which gets the same key at every layer; a fixed one by default.
            return_record: whether to return what `attention` recorded, stacked over the layers.
            layout: how the tokens lie on a mesh, on which the weights must be too; None for one
                device. `attention` must be for the same mesh.

        Returns:
            The flow in the compute dtype, `[batch, out_channels, frames, height, width]`; with
            `return_record` also the records.

        Raises:
            ValueError: a shape does not fit the model.
        """
        grid = self.grid(hidden_states.shape)
        attend = DenseAttention.on(grid, self.dtype) if attention is None else attention
        rng = jax.random.key(0) if rng is None else rng
        cosine, sine = rotary_tables(
            grid.frames,
            grid.height,
            grid.width,
            self.config.attention_head_dim,
            self.config.rope_theta,
        )
        rotary = (jnp.asarray(cosine), jnp.asarray(sine))
        text = encoder_hidden_states.astype(self.dtype)
        time, modulation, text = self.condition_embedder(timestep.astype(jnp.float32), text)

        def spread(x: Array) -> Array:
            return x if layout is None else layout.constrained(x, layout.fitting(x.shape[:2]))

        def run_block(x: Array, layer: Array, block: Block) -> tuple[Array, Any]:
            def attend_here(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
                output = attend(
                    query,
                    key,
                    value,
                    step=jnp.asarray(step, jnp.int32),
                    layer=layer,
                    rng=rng,
                    return_record=return_record,
                )
                return output if return_record else (output, None)

            x, record = block(spread(x), text, modulation, rotary, attend_here, layout)
            return spread(x), record

        x, records = scan_layers(
            run_block, spread(self.patch_embedding(hidden_states)), self.blocks
        )
        shift, scale = jnp.split(self.scale_shift_table + time[:, None], 2, axis=1)
        normal = (layer_norm(x, self.config.eps) * (1 + scale) + shift).astype(self.dtype)
        flow = self._unpatchify(self.proj_out(normal), grid)
        return (flow, records) if return_record else flow

    def _unpatchify(
        self, tokens: Float[Array, "batch tokens features"], grid: TokenGrid
    ) -> Float[Array, "batch channels frames height width"]:
        sizes, patch = (grid.frames, grid.height, grid.width), self.config.patch_size
        pieces = tokens.reshape(tokens.shape[0], *sizes, *patch, -1)
        whole = (size * step for size, step in zip(sizes, patch, strict=True))
        return pieces.transpose(0, 7, 1, 4, 2, 5, 3, 6).reshape(tokens.shape[0], -1, *whole)


def rotate(
    x: Float[Array, "batch tokens heads head_dim"],
    cosine: Float[Array, "tokens pairs"],
    sine: Float[Array, "tokens pairs"],
) -> Float[Array, "batch tokens heads head_dim"]:
    """Turns every pair of neighbouring channels by its token's angle; float32 inside."""
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
    """Attention to the text, one head after the other: logits of all would take gigabytes."""
    if layout is not None:
        # Each device by itself: a loop over heads that are spread would gather them all.
        queries = layout.fitting(query.shape[:3])
        texts = PartitionSpec(queries[0], None, queries[2])
        return jax.shard_map(
            cross_attention,
            mesh=layout.mesh,
            in_specs=(queries, texts, texts),
            out_specs=queries,
            check_vma=False,
        )(query, key, value)

    def one_head(arrays: tuple[Array, Array, Array]) -> Array:
        alone = (array[:, :, np.newaxis] for array in arrays)
        return jax.nn.dot_product_attention(*alone)[:, :, 0]

    by_head = tuple(jnp.moveaxis(array, 2, 0) for array in (query, key, value))
    return jnp.moveaxis(jax.lax.map(one_head, by_head), 0, 2)
