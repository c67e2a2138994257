"""UMT5, Wan's text encoder."""

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from cinetile import _checks
from cinetile.models.wan.config import parse_config, read_json
from cinetile.models.wan.layers import Linear, RMSNorm, random_weight, scan_layers
from cinetile.models.wan.weights import Part, WeightFiles, load_model

# Where the files' names of parameters differ from the attributes here.
_RENAMES = {
    "blocks.": "encoder.block.",
    ".attention.": ".layer.0.SelfAttention.",
    ".attention_norm.": ".layer.0.layer_norm.",
    ".feed_forward.": ".layer.1.DenseReluDense.",
    ".feed_forward_norm.": ".layer.1.layer_norm.",
    "final_layer_norm.": "encoder.final_layer_norm.",
}
_TIED = {"encoder.embed_tokens.weight": "shared.weight"}


@dataclass(frozen=True)
class UMT5Config:
    """Sizes of the text encoder; names and defaults are those of transformers.

    Attributes:
        vocab_size: tokens that the embedding knows.
        d_model: channels of a token.
        d_kv: channels of a head.
        d_ff: hidden channels of the feed-forward layers.
        num_layers: encoder blocks.
        num_heads: heads.
        relative_attention_num_buckets: classes of distance that the position bias knows.
        relative_attention_max_distance: distance from which all count as one.
        layer_norm_epsilon: of all norms.
    """

    vocab_size: int = 250112
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 1024
    num_layers: int = 8
    num_heads: int = 6
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "layer_norm_epsilon":
                value = _checks.positive(field.name, value)
            else:
                value = _checks.integer(field.name, value, minimum=1)
            object.__setattr__(self, field.name, value)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "UMT5Config":
        """Reads the `config.json` of a text encoder folder.

        Such files also hold settings of the decoder, of training and of generation; only what
        the encoder computes with is looked at.

        Raises:
            FileNotFoundError: there is none.
            TypeError: a field has the wrong type.
            ValueError: it is no UMT5 with gated GELU, or a field is out of range.
        """
        path = Path(folder) / "config.json"
        document = read_json(path)
        for name, wanted in (("model_type", "umt5"), ("feed_forward_proj", "gated-gelu")):
            if document.get(name, wanted) != wanted:
                raise ValueError(
                    f"{path}: {name} must be {wanted!r}, got {_checks.shown(document[name])}"
                )
        names = {field.name for field in fields(cls)}
        return parse_config(cls, {k: v for k, v in document.items() if k in names}, path)


class SelfAttention(eqx.Module):
    """Attention without a scale, with a learnt bias for each distance and head."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    relative_attention_bias: "Embedding"

    def __init__(self, config: UMT5Config, *, key: PRNGKeyArray, dtype: jnp.dtype) -> None:
        inner = config.num_heads * config.d_kv
        first, second, third, last, bias = jax.random.split(key, 5)
        self.q, self.k, self.v = (
            Linear(config.d_model, inner, key=layer_key, dtype=dtype, use_bias=False)
            for layer_key in (first, second, third)
        )
        self.o = Linear(inner, config.d_model, key=last, dtype=dtype, use_bias=False)
        self.relative_attention_bias = Embedding(
            config.relative_attention_num_buckets, config.num_heads, key=bias, dtype=dtype
        )

    def __call__(
        self,
        x: Float[Array, "batch tokens dim"],
        mask: Bool[Array, "batch tokens"],
        buckets: Int[Array, "tokens tokens"],
    ) -> Float[Array, "batch tokens dim"]:
        biases = self.relative_attention_bias(buckets).astype(jnp.float32)
        split = (*x.shape[:2], biases.shape[-1], -1)
        query, key, value = (layer(x).reshape(split) for layer in (self.q, self.k, self.v))
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
        logits = logits + jnp.moveaxis(biases, -1, 0)
        logits = jnp.where(mask[:, None, None], logits, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
        heads = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return self.o(heads.reshape(*x.shape[:2], -1))


class Embedding(eqx.Module):
    """A row of `weight` for each index."""

    weight: Float[Array, "entries features"]

    def __init__(self, entries: int, features: int, *, key: PRNGKeyArray, dtype: jnp.dtype) -> None:
        self.weight = random_weight(key, (entries, features), 1, dtype)

    def __call__(self, indices: Int[Array, "*axes"]) -> Float[Array, "*axes features"]:
        return self.weight[indices]


class GatedFeedForward(eqx.Module):
    """`wo(gelu(wi_0(x)) * wi_1(x))` with the GELU by tanh."""

    wi_0: Linear
    wi_1: Linear
    wo: Linear

    def __init__(self, config: UMT5Config, *, key: PRNGKeyArray, dtype: jnp.dtype) -> None:
        gate, up, down = jax.random.split(key, 3)
        self.wi_0, self.wi_1 = (
            Linear(config.d_model, config.d_ff, key=layer_key, dtype=dtype, use_bias=False)
            for layer_key in (gate, up)
        )
        self.wo = Linear(config.d_ff, config.d_model, key=down, dtype=dtype, use_bias=False)

    def __call__(self, x: Float[Array, "batch tokens dim"]) -> Float[Array, "batch tokens dim"]:
        return self.wo(jax.nn.gelu(self.wi_0(x), approximate=True) * self.wi_1(x))


class EncoderBlock(eqx.Module):
    """Self-attention and feed-forward, each with a norm before and a sum after it."""

    attention: SelfAttention
    attention_norm: RMSNorm
    feed_forward: GatedFeedForward
    feed_forward_norm: RMSNorm

    def __init__(self, config: UMT5Config, *, key: PRNGKeyArray, dtype: jnp.dtype) -> None:
        attention, feed_forward = jax.random.split(key)
        self.attention = SelfAttention(config, key=attention, dtype=dtype)
        self.attention_norm = RMSNorm(config.d_model, config.layer_norm_epsilon, dtype=dtype)
        self.feed_forward = GatedFeedForward(config, key=feed_forward, dtype=dtype)
        self.feed_forward_norm = RMSNorm(config.d_model, config.layer_norm_epsilon, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "batch tokens dim"],
        mask: Bool[Array, "batch tokens"],
        buckets: Int[Array, "tokens tokens"],
    ) -> Float[Array, "batch tokens dim"]:
        x = x + self.attention(self.attention_norm(x), mask, buckets)
        return x + self.feed_forward(self.feed_forward_norm(x))


class UMT5EncoderModel(eqx.Module):
    """Turns token ids into embeddings; the parameters of all blocks are stacked.

    Built with random weights; `load` reads trained ones.

    Args:
        config: sizes.
        key: of the random weights.
        dtype: "float32" or "bfloat16"; norms and softmax compute in float32.
    """

    class_name: ClassVar[str] = "UMT5EncoderModel"

    shared: Embedding
    blocks: EncoderBlock
    final_layer_norm: RMSNorm
    config: UMT5Config = eqx.field(static=True)

    def __init__(self, config: UMT5Config, *, key: PRNGKeyArray, dtype: str = "float32") -> None:
        kind = jnp.dtype(_checks.choice("dtype", dtype, ("float32", "bfloat16")))
        shared, blocks = jax.random.split(key)
        self.config = config
        self.shared = Embedding(config.vocab_size, config.d_model, key=shared, dtype=kind)
        self.blocks = eqx.filter_vmap(
            lambda layer_key: EncoderBlock(config, key=layer_key, dtype=kind)
        )(jax.random.split(blocks, config.num_layers))
        self.final_layer_norm = RMSNorm(config.d_model, config.layer_norm_epsilon, dtype=kind)

    @classmethod
    def deferred(
        cls, folder: str | os.PathLike[str], *, dtype: str | None = None
    ) -> "Part[UMT5Config, UMT5EncoderModel]":
        """Like `load`, but reads only the configuration and the files' headers for now."""
        config = UMT5Config.read(folder)
        files = WeightFiles(folder, tied=_TIED)
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
    ) -> "UMT5EncoderModel":
        """Loads `config.json` and the safetensors of a folder that transformers wrote.

        Args:
            folder: the pipeline's `text_encoder` folder.
            dtype: "float32" or "bfloat16"; by default as stored. Each tensor is cast by itself.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: the model is another one, a file is damaged, or a tensor is missing,
                unknown or misshapen.
        """
        return cls.deferred(folder, dtype=dtype).get()

    def __call__(
        self,
        input_ids: Int[Array, "batch tokens"],
        attention_mask: Bool[Array, "batch tokens"],
    ) -> Float[Array, "batch tokens dim"]:
        """Encodes prompts.

        Args:
            input_ids: token ids, padded.
            attention_mask: False where a token is padding, which no token attends to.

        Returns:
            The last hidden states in the compute dtype.
        """
        buckets = jnp.asarray(
            distance_buckets(
                input_ids.shape[1],
                self.config.relative_attention_num_buckets,
                self.config.relative_attention_max_distance,
            )
        )

        def run_block(x: Array, layer: Array, block: EncoderBlock) -> tuple[Array, None]:
            del layer
            return block(x, attention_mask, buckets), None

        x, _ = scan_layers(run_block, self.shared(input_ids), self.blocks)
        return self.final_layer_norm(x)


def distance_buckets(
    num_tokens: int, num_buckets: int, max_distance: int
) -> Int[np.ndarray, "tokens tokens"]:
    """The relative-position bucket of each query (row) and key (column).

    Half of the buckets are for keys after the query. In each half, short distances have a bucket
    each; longer distances share buckets that grow logarithmically, up to `max_distance`.
    """
    positions = np.arange(num_tokens)
    distance = positions[np.newaxis] - positions[:, np.newaxis]
    half = num_buckets // 2
    exact = half // 2
    absolute = np.abs(distance)
    # In float32 as upstream: rounding decides the bucket where the ratio is near an integer.
    ratio = np.log(np.maximum(absolute, 1).astype(np.float32) / np.float32(exact))
    growth = ratio / np.float32(math.log(max_distance / exact)) * np.float32(half - exact)
    coarse = np.minimum(exact + growth.astype(np.int32), half - 1)
    return (np.where(absolute < exact, absolute, coarse) + (distance > 0) * half).astype(np.int32)
