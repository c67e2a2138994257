"""Sizes of videos: rounded to what the models can make, and bounded."""

from dataclasses import dataclass, field

from cinetile import _checks
from cinetile.grid import TokenGrid
from cinetile.models.wan.caller import warn_caller
from cinetile.models.wan.folder import GenerationDefaults, PipelineParts

MAX_TOKENS = 2**22
"""Most tokens of a video; tile plans of more tokens take gigabytes."""
MAX_CALL_TOKENS = 2**24
"""Most tokens of all videos of a call."""


@dataclass(frozen=True)
class VideoSize:
    """The size of a video that a pipeline can make.

    Attributes:
        num_frames: frames.
        height: pixels.
        width: pixels.
        latent: latent frames, rows and columns.
        grid: tokens of the self-attention.
    """

    num_frames: int
    height: int
    width: int
    latent: tuple[int, int, int]
    grid: TokenGrid = field(repr=False)

    @property
    def pixels(self) -> tuple[int, int, int]:
        """Frames, height and width."""
        return self.num_frames, self.height, self.width

    def __str__(self) -> str:
        return f"{self.num_frames} frames of {self.width}x{self.height}"

    def is_trained(self, defaults: GenerationDefaults) -> bool:
        """Whether a checkpoint was trained at this size; True where it does not say."""
        return not defaults.trained_sizes or self.pixels in defaults.trained_sizes


def video_size(
    parts: PipelineParts,
    defaults: GenerationDefaults,
    num_frames: int | None,
    height: int | None,
    width: int | None,
) -> VideoSize:
    """Rounds a size down to a size that the models can make; warns if that changes it.

    Args:
        parts: the models.
        defaults: replaces sizes that are None.
        num_frames: frames.
        height: pixels.
        width: pixels.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size is below the smallest possible one or above the largest, or the sizes
            make more than `MAX_TOKENS` tokens.
    """
    config, patch = parts.vae.config, parts.transformer.config.patch_size
    time_factor, space = config.scale_factor_temporal, config.scale_factor_spatial
    asked: dict[str, int] = {}
    rounded: dict[str, int] = {}
    for name, given, step, first in (
        ("num_frames", num_frames, time_factor * patch[0], time_factor * (patch[0] - 1) + 1),
        ("height", height, space * patch[1], space * patch[1]),
        ("width", width, space * patch[2], space * patch[2]),
    ):
        value = getattr(defaults, name) if given is None else given
        most = first + step * (parts.transformer.config.rope_max_seq_len - 1)
        asked[name] = _checks.integer(name, value, minimum=first, maximum=most + step - 1)
        rounded[name] = first + (asked[name] - first) // step * step
    latent = (
        (rounded["num_frames"] - 1) // time_factor + 1,
        rounded["height"] // space,
        rounded["width"] // space,
    )
    tokens = (size // step for size, step in zip(latent, patch, strict=True))
    size = VideoSize(**rounded, latent=latent, grid=TokenGrid(*tokens))
    if size.grid.num_tokens > MAX_TOKENS:
        raise ValueError(
            f"num_frames, height and width must make at most {MAX_TOKENS:,} tokens, "
            f"got {size.grid.num_tokens:,} for {size}"
        )
    if rounded != asked:
        changes = ", ".join(
            f"{name} {asked[name]} -> {rounded[name]}"
            for name in asked
            if asked[name] != rounded[name]
        )
        warn_caller(f"the video's size is rounded down: {changes}")
    return size


def check_videos(size: VideoSize, videos: int) -> None:
    """Raises ValueError if a call asks for more videos than `MAX_CALL_TOKENS` allows."""
    most = MAX_CALL_TOKENS // size.grid.num_tokens
    if videos > most:
        raise ValueError(
            f"prompt and num_videos_per_prompt must ask for at most {most} videos of "
            f"{size.grid.num_tokens:,} tokens ({MAX_CALL_TOKENS:,} tokens in a call), got {videos}"
        )
