"""What a call asks for: every argument checked once, before any weight is read."""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float

from cinetile import _checks
from cinetile.models.wan.attention import SelfAttention
from cinetile.models.wan.caller import warn_caller
from cinetile.models.wan.folder import GenerationDefaults, PipelineParts
from cinetile.models.wan.prompts import (
    AnyArray,
    Prompts,
    check_embeddings,
    read_negative_prompts,
    read_prompts,
)
from cinetile.models.wan.schedulers import Schedule, Scheduler
from cinetile.models.wan.size import VideoSize
from cinetile.models.wan.tiling import Tiling
from cinetile.parallel.layout import ArrayLayout

OUTPUT_TYPES = ("np", "latent")
MAX_STEPS = 2**16
MAX_PROMPT_TOKENS = 2**14


@dataclass(frozen=True, eq=False)
class CallPlan:
    """A call of a pipeline whose arguments are checked: `WanPipeline.run` makes its videos.

    A plan holds no state: two runs of it make equal videos. `dataclasses.replace` changes a
    field, for example `attentions`.

    Attributes:
        size: size of the videos, rounded.
        is_trained_size: False if the checkpoint says that it was not trained at this size.
        scheduler: solves the flow.
        schedule: the denoising steps.
        guidance_scales: weights of the prompt at high and at low noise.
        prompts: token ids or embeddings of the prompts.
        negative_prompts: the same for the negative prompts; None without guidance.
        latents: the noise, `[batch, channels, frames, rows, columns]`.
        attentions: self-attention at high and at low noise.
        attention_seed: seed of the rows on which self-attention routes its heads.
        tiling: tiles in which frames are decoded; None for whole frames.
        output_type: "np" for frames, "latent" for normalized latents.
    """

    size: VideoSize
    is_trained_size: bool
    scheduler: Scheduler
    schedule: Schedule
    guidance_scales: tuple[float, float]
    prompts: Prompts
    negative_prompts: Prompts | None
    latents: Float[AnyArray, "batch channels frames rows columns"]
    attentions: tuple[SelfAttention, SelfAttention]
    attention_seed: int
    tiling: Tiling | None
    output_type: str

    @property
    def guided(self) -> bool:
        """Whether the negative prompts are used."""
        return is_guided(self.guidance_scales)


@dataclass(frozen=True, eq=False)
class PromptArguments:
    """The arguments of a call that say what its videos show; see `WanPipeline.plan`."""

    prompt: str | list[str] | None = None
    negative_prompt: str | list[str] | None = None
    prompt_embeds: Float[AnyArray, "batch text dim"] | None = None
    negative_prompt_embeds: Float[AnyArray, "batch text dim"] | None = None
    num_videos_per_prompt: int = 1
    max_sequence_length: int | None = None

    def check(
        self, parts: PipelineParts, defaults: GenerationDefaults, guided: bool
    ) -> tuple[Prompts, Prompts | None]:
        """Checks and encodes the prompts; warns of words that the model does not know.

        Args:
            parts: the tokenizer, and the width of the embeddings.
            defaults: the length and the negative prompt, where the call does not name them.
            guided: whether the negative prompts are used.

        Returns:
            The prompts, and the negative prompts or None.

        Raises:
            TypeError: a prompt is not a string.
            ValueError: arguments exclude each other, or a prompt is empty, too long or misshapen.
        """
        exclude(
            negative_prompt=self.negative_prompt, negative_prompt_embeds=self.negative_prompt_embeds
        )
        if (self.prompt is None) == (self.prompt_embeds is None):
            raise ValueError("give either prompt or prompt_embeds")
        length, repeats = self._length(defaults), self._repeats()
        dim = parts.transformer.config.text_dim
        prompts: Prompts
        negatives: Prompts | None = self.negative_prompt_embeds
        if self.prompt is not None:
            prompts, unknown = read_prompts(parts.tokenizer, self.prompt, length, repeats)
            if self.negative_prompt is not None or (guided and negatives is None):
                text = self.negative_prompt
                negatives = read_negative_prompts(
                    parts.tokenizer,
                    defaults.negative_prompt if text is None else text,
                    len(prompts.ids),
                    length,
                    repeats,
                )
            if unknown:
                words = ", ".join(map(repr, unknown))
                warn_caller(f"prompt has words that the model does not know: {words}")
        else:
            assert self.prompt_embeds is not None
            prompts = self.prompt_embeds
            if self.negative_prompt is not None:
                raise ValueError("negative_prompt needs prompt; prompt_embeds was given")
            if guided and negatives is None:
                raise ValueError(
                    "prompt_embeds needs negative_prompt_embeds where there is guidance"
                )
            check_embeddings("prompt_embeds", prompts, len(prompts), dim)
        if self.negative_prompt_embeds is not None:
            check_embeddings(
                "negative_prompt_embeds", self.negative_prompt_embeds, len(prompts), dim
            )
        return prompts, negatives if guided else None

    def _length(self, defaults: GenerationDefaults) -> int:
        value = self.max_sequence_length
        value = defaults.max_sequence_length if value is None else value
        return _checks.integer("max_sequence_length", value, minimum=1, maximum=MAX_PROMPT_TOKENS)

    def _repeats(self) -> int:
        return _checks.integer("num_videos_per_prompt", self.num_videos_per_prompt, minimum=1)


def exclude(**arguments: object) -> None:
    """Raises ValueError if more than one argument is given."""
    if sum(value is not None for value in arguments.values()) > 1:
        raise ValueError(f"{' and '.join(arguments)} exclude each other")


def is_guided(scales: tuple[float, float]) -> bool:
    """Whether guidance scales ask for the negative prompts: one of them is above 1."""
    return max(scales) > 1


def guidance_scales(
    parts: PipelineParts, default: float, first: float | None, second: float | None
) -> tuple[float, float]:
    """Checks the guidance scales at high and at low noise.

    Raises:
        TypeError: a scale is not a number.
        ValueError: a scale is not finite, or the second one is given and there is one transformer.
    """
    first = _checks.finite("guidance_scale", default if first is None else first)
    if second is None:
        return first, first
    if parts.transformer_2 is None:
        raise ValueError("guidance_scale_2 is for pipelines with a transformer_2 only")
    return first, _checks.finite("guidance_scale_2", second)


def check_rows(layout: ArrayLayout | None, videos: int, guided: bool) -> None:
    """Raises ValueError unless the batch rows of a call divide by the data axis of the mesh.

    Args:
        layout: how arrays are sharded over the mesh; None for one device.
        videos: videos of the call.
        guided: whether each video has a row for the negative prompt, too.
    """
    if layout is None:
        return
    rows, devices = videos * (1 + guided), layout.size(layout.batch)
    if rows % devices:
        pairs = "with guidance" if guided else "without guidance"
        raise ValueError(
            f"mesh must have a data axis that divides the {rows} rows of a call with "
            f"{videos} videos {pairs}, got {devices}"
        )


def make_generator(
    generator: np.random.Generator | None, seed: int | None, layout: ArrayLayout | None
) -> np.random.Generator:
    """The generator of a call, from the caller's or from a seed.

    Raises:
        TypeError: the seed is not an integer.
        ValueError: both are given, the seed is negative, or several processes have no seed.
    """
    exclude(generator=generator, seed=seed)
    if generator is not None:
        return generator
    if seed is None and layout is not None and jax.process_count() > 1:
        raise ValueError("seed must be given, the same in each process, got None")
    return np.random.default_rng(None if seed is None else _checks.integer("seed", seed, minimum=0))


def make_noise(
    latents: AnyArray | None, shape: tuple[int, ...], generator: np.random.Generator
) -> Float[AnyArray, "batch channels frames rows columns"]:
    """The caller's latents, or noise that is drawn from a generator.

    Raises:
        ValueError: the latents do not have `shape`.
    """
    if latents is None:
        return generator.standard_normal(shape, np.float32)
    if latents.shape != shape:
        raise ValueError(f"latents must have the shape {shape}, got {latents.shape}")
    return latents
