"""The caption's way into the model: a word tokenizer and a UMT5 encoder of one layer."""

import math
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional

MAX_TOKENS = 24
PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
_WORDS = (
    *("a", "the", "an", "and", "of", "in", "front", "behind", "over", "on", "with", "to"),
    *("moves", "rolls", "slides", "drifts", "camera"),
    *("red", "green", "blue", "yellow", "purple", "cyan"),
    *("circle", "ball", "disc", "square", "box", "triangle", "plain", "striped"),
    *("left", "right", "up", "down", "dark", "light", "tiled", "background", "post"),
)

Params = dict[str, Tensor]


def tokenizer() -> Tokenizer:
    """Splits lower-cased words; ends every caption with `</s>`, as T5 does."""
    vocabulary = {word: index for index, word in enumerate((PAD, END, UNKNOWN, *_WORDS))}
    result = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    result.normalizer = normalizers.Lowercase()
    result.pre_tokenizer = pre_tokenizers.Whitespace()
    result.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, vocabulary[END])]
    )
    return result


def tokenize(captions: list[str], encoder: Tokenizer) -> Tensor:
    """Token ids padded with 0, int64 [captions, 24].

    Raises:
        ValueError: a caption has more than 24 tokens.
    """
    ids = torch.zeros(len(captions), MAX_TOKENS, dtype=torch.int64)
    for row, encoding in zip(ids, encoder.encode_batch(captions), strict=True):
        if len(encoding.ids) > MAX_TOKENS:
            raise ValueError(f"captions must have at most {MAX_TOKENS} tokens: {encoding.tokens}")
        row[: len(encoding.ids)] = torch.tensor(encoding.ids)
    return ids


@dataclass(frozen=True)
class TextConfig:
    """Sizes of the UMT5 encoder, by their names in transformers."""

    vocab_size: int
    d_model: int = 64
    d_kv: int = 16
    num_heads: int = 4
    d_ff: int = 128
    relative_attention_num_buckets: int = 16
    relative_attention_max_distance: int = 32

    def to_json(self) -> dict:
        """The content of `config.json` as transformers reads it."""
        fixed = {
            "architectures": ["UMT5EncoderModel"],
            "model_type": "umt5",
            "num_layers": 1,
            "num_decoder_layers": 1,
            "layer_norm_epsilon": 1e-6,
            "dropout_rate": 0.0,
            "feed_forward_proj": "gated-gelu",
            "dense_act_fn": "gelu_new",
            "is_gated_act": True,
            "is_encoder_decoder": True,
            "scalable_attention": True,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
            "torch_dtype": "bfloat16",
        }
        return vars(self) | fixed


def init(config: TextConfig, generator: torch.Generator) -> Params:
    """Weights by their names in transformers; the layer adds nothing at first."""
    inner = config.num_heads * config.d_kv
    layer = "encoder.block.0.layer"

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    width, hidden = config.d_model, config.d_ff
    return {
        "shared.weight": normal(config.vocab_size, width, std=1.0),
        f"{layer}.0.SelfAttention.q.weight": normal(
            inner, width, std=(width * config.d_kv) ** -0.5
        ),
        f"{layer}.0.SelfAttention.k.weight": normal(inner, width, std=width**-0.5),
        f"{layer}.0.SelfAttention.v.weight": normal(inner, width, std=width**-0.5),
        f"{layer}.0.SelfAttention.o.weight": torch.zeros(width, inner),
        f"{layer}.0.SelfAttention.relative_attention_bias.weight": normal(
            config.relative_attention_num_buckets, config.num_heads, std=0.5
        ),
        f"{layer}.0.layer_norm.weight": torch.ones(width),
        f"{layer}.1.DenseReluDense.wi_0.weight": normal(hidden, width, std=width**-0.5),
        f"{layer}.1.DenseReluDense.wi_1.weight": normal(hidden, width, std=width**-0.5),
        f"{layer}.1.DenseReluDense.wo.weight": torch.zeros(width, hidden),
        f"{layer}.1.layer_norm.weight": torch.ones(width),
        "encoder.final_layer_norm.weight": torch.ones(width),
    }


def embed(params: Params, config: TextConfig, ids: Tensor) -> Tensor:
    """Embeddings [captions, 24, d_model]; zero where the caption is padded."""
    count, length = ids.shape
    heads, d_kv = config.num_heads, config.d_kv
    real = ids != 0
    hidden = functional.embedding(ids, params["shared.weight"])

    prefix = "encoder.block.0.layer.0."
    normed = _rms(hidden, params[prefix + "layer_norm.weight"])
    q, k, v = (
        functional.linear(normed, params[f"{prefix}SelfAttention.{name}.weight"])
        .view(count, length, heads, d_kv)
        .transpose(1, 2)
        for name in "qkv"
    )
    buckets = _buckets(length, config)
    bias = params[prefix + "SelfAttention.relative_attention_bias.weight"][buckets].permute(2, 0, 1)
    scores = q @ k.transpose(-1, -2) + bias
    scores = scores.masked_fill(~real[:, None, None, :], -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(count, length, heads * d_kv)
    hidden = hidden + functional.linear(mixed, params[prefix + "SelfAttention.o.weight"])

    prefix = "encoder.block.0.layer.1."
    normed = _rms(hidden, params[prefix + "layer_norm.weight"])
    gate, up = (
        functional.linear(normed, params[f"{prefix}DenseReluDense.{name}.weight"])
        for name in ("wi_0", "wi_1")
    )
    product = functional.gelu(gate, approximate="tanh") * up
    hidden = hidden + functional.linear(product, params[prefix + "DenseReluDense.wo.weight"])
    hidden = _rms(hidden, params["encoder.final_layer_norm.weight"])
    return hidden * real[..., None]


def _rms(hidden: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(hidden, hidden.shape[-1:], weight, eps=1e-6)


def _buckets(length: int, config: TextConfig) -> Tensor:
    """T5's bidirectional buckets of key minus query, [length, length]."""
    half = config.relative_attention_num_buckets // 2
    exact = half // 2
    place = torch.arange(length)
    offset = place[None, :] - place[:, None]
    distance = offset.abs()
    span = math.log(config.relative_attention_max_distance / exact)
    far = exact + (distance.clamp(min=1) / exact).log() / span * (half - exact)
    far = far.to(torch.int64).clamp(max=half - 1)
    return torch.where(distance < exact, distance, far) + half * (offset > 0)
