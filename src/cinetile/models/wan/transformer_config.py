"""The sizes of the diffusion transformer, as its `config.json` states them."""

import os
from dataclasses import dataclass
from pathlib import Path

from cinetile import _checks
from cinetile.models.wan.config import parse_config, read_json

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
    """The sizes of the transformer; names and defaults are those of diffusers.

    Attributes:
        patch_size: latent frames, rows and columns of a token.
        num_attention_heads: heads of self- and cross-attention.
        attention_head_dim: channels of a head, even.
        in_channels: channels of the latents.
        out_channels: channels of the prediction.
        text_dim: channels of the text embeddings.
        freq_dim: channels of the sines and cosines of the time step, even.
        ffn_dim: hidden channels of the feed-forward layers.
        num_layers: transformer blocks.
        eps: epsilon of all norms.
        rope_max_seq_len: largest number of positions on an axis of the token grid.
        rope_theta: ratio of the fastest and slowest rotation of a position. diffusers supports
            only the default.
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
            FileNotFoundError: the file does not exist.
            TypeError: a field has the wrong type.
            ValueError: a field is unknown, is out of range, or has a value that is not implemented.
        """
        path = Path(folder) / "config.json"
        return parse_config(cls, read_json(path), path, fixed=_FIXED)
