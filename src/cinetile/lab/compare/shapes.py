"""The sizes of videos and transformer blocks that are compared, and a block's arithmetic."""

from dataclasses import dataclass, replace

from cinetile import _checks
from cinetile.grid import TokenGrid

RESOLUTIONS: dict[str, TokenGrid] = {
    "480p": TokenGrid.from_video(81, 480, 832),
    "720p": TokenGrid.from_video(81, 720, 1280),
    "1080p": TokenGrid.from_video(81, 1080, 1920),
    "1440p": TokenGrid.from_video(81, 1440, 2560),
}
"""Token grids of 81 frames by the names of their heights."""

# A block with few heads gets a hidden size that matrix units like.
_FFN_MULTIPLE = 32


@dataclass(frozen=True)
class BlockShape:
    """Sizes of a Wan model's transformer blocks.

    Attributes:
        heads: attention heads.
        ffn_dim: hidden channels of the feed-forward layers.
        num_layers: blocks of the model.
        head_dim: channels of a head.
        text_tokens: tokens that cross-attention sees.
    """

    heads: int
    ffn_dim: int
    num_layers: int
    head_dim: int = 128
    text_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("heads", "ffn_dim", "num_layers", "head_dim", "text_tokens"):
            object.__setattr__(self, name, _checks.integer(name, getattr(self, name), minimum=1))

    @property
    def dim(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim

    def with_heads(self, heads: int) -> "BlockShape":
        """The same with other heads; the feed-forward keeps its ratio to the width, rounded.

        Raises:
            ValueError: there are fewer heads to choose from.
        """
        heads = _checks.integer("heads", heads, minimum=1, maximum=self.heads)
        steps = round(self.ffn_dim * heads / (self.heads * _FFN_MULTIPLE))
        ffn_dim = self.ffn_dim if heads == self.heads else max(1, steps) * _FFN_MULTIPLE
        return replace(self, heads=heads, ffn_dim=ffn_dim)

    def flops_without_attention(self, num_tokens: int) -> int:
        """Operations of a block's matrix products but for those of self-attention.

        A product of `[m, k]` and `[k, n]` counts `2 m k n`; norms, rotations and activations do
        not count.
        """
        per_token = 6 * self.dim**2 + 2 * self.dim * self.ffn_dim  # q, k, v, out; q, out; up, down
        of_text = 2 * self.dim**2  # key and value of each text token
        cross = 2 * self.text_tokens * self.dim  # both products of cross-attention, by token
        return 2 * (num_tokens * (per_token + cross) + self.text_tokens * of_text)


MODELS: dict[str, BlockShape] = {
    "14B": BlockShape(heads=40, ffn_dim=13824, num_layers=40),
    "1.3B": BlockShape(heads=12, ffn_dim=8960, num_layers=30),
}
"""Wan's models. The case study's is the 14B: its 10 heads a device are 40 over 4 devices."""
