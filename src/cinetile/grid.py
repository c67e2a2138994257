"""The latent token grid of a video and the orders in which its tokens can stand."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int

from cinetile import _checks

Layout = Literal["frame_major", "token_major"]
LAYOUTS: tuple[str, ...] = ("frame_major", "token_major")
# Positions are int32 throughout.
MAX_TOKENS = (1 << 31) - 1


@dataclass(frozen=True)
class TokenGrid:
    """The tokens that self-attention sees: a video of latent patches, and text beside it.

    Arrays that a user passes in or gets back are in frame-major order,
    `t = frame * tokens_per_frame + row * width + column`, with the text tokens (if the model
    attends to text and video jointly) before or after all video tokens.

    Attributes:
        frames: latent frames after patchify.
        height: token rows in a frame.
        width: token columns in a frame.
        text_tokens: text tokens that stand in the same sequence; 0 for cross-attention models.
        text_first: whether the text stands before the video (CogVideoX) or after (HunyuanVideo).
    """

    frames: int
    height: int
    width: int
    text_tokens: int = 0
    text_first: bool = False

    def __post_init__(self) -> None:
        for name in ("frames", "height", "width"):
            object.__setattr__(self, name, _checks.integer(name, getattr(self, name), minimum=1))
        text_tokens = _checks.integer("text_tokens", self.text_tokens, minimum=0)
        object.__setattr__(self, "text_tokens", text_tokens)
        if self.num_tokens > MAX_TOKENS:
            raise ValueError(
                f"a grid has at most {MAX_TOKENS:,} tokens, got {_checks.shown(self.num_tokens)} "
                f"(frames {_checks.shown(self.frames)}, height {_checks.shown(self.height)}, "
                f"width {_checks.shown(self.width)}, text_tokens {_checks.shown(text_tokens)})"
            )
        text_first = _checks.boolean("text_first", self.text_first)
        object.__setattr__(self, "text_first", text_first)

    @classmethod
    def from_video(
        cls,
        num_frames: int,
        height: int,
        width: int,
        *,
        vae: tuple[int, int, int] = (4, 8, 8),
        patch: tuple[int, int, int] = (1, 2, 2),
        text_tokens: int = 0,
        text_first: bool = False,
    ) -> "TokenGrid":
        """Builds the grid of a video by the rounding rules of causal video autoencoders.

        The first frame is encoded by itself and each further group of `vae[0]` frames becomes one
        latent frame, so a video has `1 + (num_frames - 1) // vae[0]` of them; height and width
        are floored to whole patches.

        Args:
            num_frames: frames of the video.
            height: pixels.
            width: pixels.
            vae: compression of the autoencoder in time, height and width.
            patch: patch size of the transformer in time, height and width, in latents.
            text_tokens: see the class.
            text_first: see the class.

        Raises:
            ValueError: a size is below one patch, or there are more than 2,147,483,647 tokens.
        """
        vae, patch = _checks.strides("vae", vae), _checks.strides("patch", patch)
        num_frames = _checks.integer("num_frames", num_frames, minimum=1)
        height = _checks.integer("height", height, minimum=vae[1] * patch[1])
        width = _checks.integer("width", width, minimum=vae[2] * patch[2])
        latent_frames = 1 + (num_frames - 1) // vae[0]
        if latent_frames < patch[0]:
            minimum = (patch[0] - 1) * vae[0] + 1
            raise ValueError(f"num_frames must be at least {minimum}, got {num_frames}")
        return cls(
            latent_frames // patch[0],
            height // (vae[1] * patch[1]),
            width // (vae[2] * patch[2]),
            text_tokens=text_tokens,
            text_first=text_first,
        )

    @property
    def tokens_per_frame(self) -> int:
        return self.height * self.width

    @property
    def num_video_tokens(self) -> int:
        return self.frames * self.tokens_per_frame

    @property
    def num_tokens(self) -> int:
        return self.num_video_tokens + self.text_tokens

    def __str__(self) -> str:
        text = f" + {self.text_tokens} text" if self.text_tokens else ""
        return f"{self.frames}x{self.height}x{self.width}{text} = {self.num_tokens:,} tokens"


def require_grid(grid: object) -> None:
    """Raises TypeError if an argument that must be a token grid is none."""
    if not isinstance(grid, TokenGrid):
        raise TypeError(f"grid must be a TokenGrid, got {type(grid).__name__}")


@dataclass(frozen=True)
class TokenOrder:
    """An order of a grid's tokens: `[text?] [leading frames] [other frames] [text?] [padding?]`.

    Attributes:
        layout: order of the frames that do not lead: "frame_major" (`f * P + p`) or
            "token_major" (`p * F + f`).
        leading_frames: first frames of the video that stand before all others, frame-major.
        text_first: whether the valid text tokens stand first or after the video.
        padded_text: text tokens at the end of the text that are padding; they always stand last.
    """

    layout: Layout = "frame_major"
    leading_frames: int = 0
    text_first: bool = False
    padded_text: int = 0

    def __post_init__(self) -> None:
        _checks.choice("layout", self.layout, LAYOUTS)
        for name in ("leading_frames", "padded_text"):
            object.__setattr__(self, name, _checks.integer(name, getattr(self, name), minimum=0))

    def check_fits(self, grid: TokenGrid) -> None:
        """Raises ValueError if this order leads or pads more than `grid` has."""
        _checks.integer("leading_frames", self.leading_frames, minimum=0, maximum=grid.frames)
        _checks.integer("padded_text", self.padded_text, minimum=0, maximum=grid.text_tokens)

    def indices(self, grid: TokenGrid) -> Int[np.ndarray, " tokens"]:
        """Frame-major position of the token at each placed position (int32)."""
        positions = np.arange(grid.num_tokens, dtype=np.int32)
        text_start = 0 if grid.text_first else grid.num_video_tokens
        video_start = grid.text_tokens if grid.text_first else 0
        video = positions[video_start : video_start + grid.num_video_tokens]
        text = positions[text_start : text_start + grid.text_tokens]
        valid, padding = np.split(text, [grid.text_tokens - self.padded_text])
        leading, others = np.split(video, [self.leading_frames * grid.tokens_per_frame])
        if self.layout == "token_major":
            others = others.reshape(-1, grid.tokens_per_frame).T.reshape(-1)
        before, after = (valid, valid[:0]) if self.text_first else (valid[:0], valid)
        return np.concatenate([before, leading, others, after, padding])

    def text_range(self, grid: TokenGrid) -> tuple[int, int]:
        """First and one-past-last placed position of the text that is not padding."""
        start = 0 if self.text_first else grid.num_video_tokens
        return start, start + grid.text_tokens - self.padded_text

    def is_frame_major(self, grid: TokenGrid) -> bool:
        """Whether this order leaves every token of `grid` where a user's array has it."""
        return bool(np.array_equal(self.indices(grid), np.arange(grid.num_tokens)))
