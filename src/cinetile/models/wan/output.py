"""What a call of a pipeline returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cinetile.models.wan.prompts import AnyArray


@dataclass(frozen=True, eq=False)
class WanPipelineOutput:
    """What a pipeline returns.

    Attributes:
        frames: videos `[batch, frames, height, width, channels]` in [0, 1]; with `output_type`
            "latent", normalized latents `[batch, channels, frames, height, width]`.
        records: for each step the records of self-attention for the prompt and for the negative
            prompt (None without guidance), stacked over layers. Empty unless asked for.
        seconds: wall time of each stage: "prompt", "weights", "denoising", "decoding", and
            "warm-up" where it was asked for.
        step_seconds: wall time of each step; without a warm-up the first step includes
            compilation.
    """

    frames: AnyArray
    records: tuple[tuple[Any, Any], ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    step_seconds: tuple[float, ...] = ()
