"""From a prompt to a video."""

import contextlib
import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from cinetile import _checks
from cinetile.grid import TokenGrid
from cinetile.layer.record import RoutingRecord
from cinetile.layer.sparse_attention import SparseAttention
from cinetile.models.wan.attention import DenseAttention, SelfAttention
from cinetile.models.wan.folder import GenerationDefaults, PipelineParts, VideoCodec, open_folder
from cinetile.models.wan.schedulers import Schedule, Scheduler
from cinetile.models.wan.sharding import WEIGHT_SHARDINGS, WeightSharding, place_weights
from cinetile.models.wan.text_encoder import UMT5EncoderModel
from cinetile.models.wan.tiling import Tiling
from cinetile.models.wan.tokenizer import PromptTokenizer, clean_prompt
from cinetile.models.wan.transformer import WanTransformer3DModel
from cinetile.models.wan.weights import Part, Put, put_all, put_on_default_device
from cinetile.parallel.layout import ArrayLayout, array_layout, automatic, replicated
from cinetile.policy import EXPERTS, SparsityPolicy

AnyArray = Array | np.ndarray
Progress = Callable[[str, str, int, int], object]

OUTPUT_TYPES = ("np", "latent")
_CALLBACK_TENSORS = ("latents", "prompt_embeds", "negative_prompt_embeds")
# Pixels of a frame from which its decoding at once would take more memory than it is worth.
_TILED_FROM = 640 * 640


@dataclass(frozen=True, eq=False)
class WanPipelineOutput:
    """What a pipeline returns.

    Attributes:
        frames: videos `[batch, frames, height, width, channels]` in [0, 1]; with `output_type`
            "latent", normalized latents `[batch, channels, frames, height, width]`.
        records: for each step a pair of what self-attention recorded for the prompt and for the
            negative prompt (None without guidance), stacked over layers. Empty unless asked for.
        seconds: wall time of each stage: "prompt", "weights", "denoising", "decoding", and
            "warm-up" where it was asked for.
        step_seconds: wall time of each step; without a warm-up the first one holds the
            compilation.
    """

    frames: AnyArray
    records: tuple[tuple[Any, Any], ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    step_seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class VideoSize:
    """The size of a video that a pipeline can make.

    Attributes:
        num_frames: frames.
        height: pixels.
        width: pixels.
        latent: latent frames, rows and columns.
        grid: tokens that self-attention sees.
    """

    num_frames: int
    height: int
    width: int
    latent: tuple[int, int, int]
    grid: TokenGrid = field(repr=False)


@dataclass(frozen=True, eq=False)
class CallPlan:
    """What a call of a pipeline would do.

    Attributes:
        size: of the video, rounded.
        schedule: the denoising steps.
        guidance_scales: at high and at low noise.
    """

    size: VideoSize
    schedule: Schedule
    guidance_scales: tuple[float, float]

    @property
    def guided(self) -> bool:
        """Whether the negative prompt is used."""
        return max(self.guidance_scales) > 1


class WanPipeline:
    """Text to video with Wan 2.1, or with the two experts of Wan 2.2.

    Argument names are those of diffusers' pipeline. `from_pretrained` opens a folder; models can
    also be given one by one.

    Args:
        tokenizer: of the prompts.
        text_encoder: of the prompts.
        transformer: predicts the flow; with two experts, at high noise.
        vae: from latents to pixels.
        scheduler: solves the flow; may be replaced at any time.
        transformer_2: the expert at low noise.
        boundary_ratio: noise level under which `transformer_2` takes over.
        defaults: of a call.
        mesh: devices for the transformers, whose weights are spread over them; None for one
            device. Prompts are embedded and frames decoded on one device of each process.
        sharding: as for `SparseAttention`; "data", "sequence" and "heads" are the default axes.
        weights: how weights are spread: "tensor" over the axis of the heads, "fsdp" over all.

    Attributes:
        scheduler: as given.
        defaults: as given.
        layout: how tokens lie on the mesh; None without one.
    """

    def __init__(
        self,
        *,
        tokenizer: PromptTokenizer,
        text_encoder: UMT5EncoderModel,
        transformer: WanTransformer3DModel,
        vae: VideoCodec,
        scheduler: Scheduler,
        transformer_2: WanTransformer3DModel | None = None,
        boundary_ratio: float | None = None,
        defaults: GenerationDefaults | None = None,
        mesh: Mesh | None = None,
        sharding: PartitionSpec | None = None,
        weights: WeightSharding = "fsdp",
    ) -> None:
        self._set_layout(mesh, sharding)
        self._set_parts(
            PipelineParts(
                tokenizer=tokenizer,
                text_encoder=_loaded(text_encoder),
                transformer=_loaded(transformer),
                vae=_loaded(vae),
                scheduler=scheduler,
                transformer_2=None if transformer_2 is None else _loaded(transformer_2),
                boundary_ratio=boundary_ratio,
                defaults=GenerationDefaults() if defaults is None else defaults,
            ),
            weights,
        )

    def _set_layout(self, mesh: Mesh | None, sharding: PartitionSpec | None) -> None:
        if mesh is None and sharding is not None:
            raise ValueError(f"sharding needs a mesh, got {sharding} and none")
        self.layout = None if mesh is None else automatic(array_layout(mesh, sharding))

    def _set_parts(
        self, parts: PipelineParts, weights: WeightSharding, keep_text_encoder: bool = True
    ) -> None:
        _checks.choice("weights", weights, WEIGHT_SHARDINGS)
        if self.layout is not None:
            for part in (parts.transformer, parts.transformer_2):
                if part is not None:
                    part.place_by(place_weights(self.layout, weights))
        self._parts = parts
        self._keep_text_encoder = keep_text_encoder
        self.scheduler = parts.scheduler
        self.defaults = parts.defaults

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        dtype: str | None = None,
        keep_text_encoder: bool = True,
        mesh: Mesh | None = None,
        sharding: PartitionSpec | None = None,
        weights: WeightSharding = "fsdp",
    ) -> "WanPipeline":
        """Opens a folder in diffusers' layout.

        Every configuration and the names and shapes of all tensors are checked now; a model's
        weights are read when it is first needed.

        Args:
            folder: holds `model_index.json`.
            dtype: "float32" or "bfloat16" for the transformer and the text encoder; by default
                as stored. The VAE computes in float32.
            keep_text_encoder: whether the text encoder, of the published models the largest
                part, stays in memory after it was used.
            mesh: as for the class, as are the others.
            sharding: see there.
            weights: see there.

        Raises:
            FileNotFoundError: the folder or a file of it is missing.
            ImportError: a package that reads them is not installed.
            ValueError: a configuration is not implemented, a file is damaged, or a tensor is
                missing, unknown or misshapen.
        """
        if dtype is not None:
            _checks.choice("dtype", dtype, ("float32", "bfloat16"))
        pipeline = cls.__new__(cls)
        pipeline._set_layout(mesh, sharding)
        pipeline._set_parts(open_folder(folder, dtype), weights, keep_text_encoder)
        return pipeline

    @property
    def tokenizer(self) -> PromptTokenizer:
        """Of the prompts."""
        return self._parts.tokenizer

    @property
    def text_encoder(self) -> UMT5EncoderModel:
        """Of the prompts; loaded now if it was not."""
        return self._parts.text_encoder.get()

    @property
    def transformer(self) -> WanTransformer3DModel:
        """Predicts the flow; loaded now if it was not."""
        return self._parts.transformer.get()

    @property
    def transformer_2(self) -> WanTransformer3DModel | None:
        """The expert at low noise, if there is one; loaded now if it was not."""
        return None if self._parts.transformer_2 is None else self._parts.transformer_2.get()

    @property
    def vae(self) -> VideoCodec:
        """From latents to pixels; loaded now if it was not."""
        return self._parts.vae.get()

    @property
    def dtype(self) -> str:
        """What the transformer computes in."""
        return self._parts.transformer.dtype

    @property
    def boundary_ratio(self) -> float | None:
        """Noise level under which `transformer_2` takes over."""
        return self._parts.boundary_ratio

    def video_size(
        self,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
    ) -> VideoSize:
        """Rounds a size down to one that the models can make, with a warning if that changes it.

        Args:
            num_frames: becomes 4k + 1 with Wan's VAE.
            height: becomes a multiple of 16 with Wan's VAE.
            width: likewise.

        Raises:
            TypeError: a size is no integer.
            ValueError: a size is below the smallest possible one, or above the largest.
        """
        config, patch = self._parts.vae.config, self._parts.transformer.config.patch_size
        time_factor, space = config.scale_factor_temporal, config.scale_factor_spatial
        asked: dict[str, int] = {}
        rounded: dict[str, int] = {}
        for name, given, step, first in (
            ("num_frames", num_frames, time_factor * patch[0], time_factor * (patch[0] - 1) + 1),
            ("height", height, space * patch[1], space * patch[1]),
            ("width", width, space * patch[2], space * patch[2]),
        ):
            value = getattr(self.defaults, name) if given is None else given
            most = first + step * (self._parts.transformer.config.rope_max_seq_len - 1)
            asked[name] = _checks.integer(name, value, minimum=first, maximum=most + step - 1)
            rounded[name] = first + (asked[name] - first) // step * step
        if rounded != asked:
            changes = ", ".join(
                f"{name} {asked[name]} -> {rounded[name]}"
                for name in asked
                if asked[name] != rounded[name]
            )
            warnings.warn(f"the video's size is rounded down: {changes}", stacklevel=3)
        latent = (
            (rounded["num_frames"] - 1) // time_factor + 1,
            rounded["height"] // space,
            rounded["width"] // space,
        )
        tokens = (size // step for size, step in zip(latent, patch, strict=True))
        return VideoSize(**rounded, latent=latent, grid=TokenGrid(*tokens))

    def check_prompts(
        self,
        prompt: str | list[str],
        negative_prompt: str | list[str] | None = None,
        max_sequence_length: int | None = None,
    ) -> None:
        """Raises an error if a prompt is empty or has too many tokens; loads no weights.

        Raises:
            TypeError: a prompt is no string.
            ValueError: see above, or the numbers of prompts differ.
        """
        length = self._sequence_length(max_sequence_length)
        prompts = _strings("prompt", prompt)
        for one in prompts:
            if not clean_prompt(one):
                raise ValueError("prompt must not be empty")
        self.tokenizer(prompts, length, "prompt")
        unknown = self.tokenizer.unknown_words(prompts)
        if unknown:
            words = ", ".join(map(repr, unknown))
            warnings.warn(f"prompt has words that the model does not know: {words}", stacklevel=3)
        if negative_prompt is not None:
            negatives = _strings("negative_prompt", negative_prompt)
            if not isinstance(negative_prompt, str) and len(negatives) != len(prompts):
                raise ValueError(
                    f"negative_prompt must have one string for each of the {len(prompts)} prompts, "
                    f"got {len(negatives)}"
                )
            self.tokenizer(negatives, length, "negative_prompt")

    def attentions(
        self,
        plan: CallPlan,
        policy: SparsityPolicy | None = None,
        implementation: str | Sequence[str] | None = None,
    ) -> tuple[SelfAttention, SelfAttention]:
        """The self-attention of a call, at high and at low noise; loads no weights.

        Args:
            plan: what `check_inputs` returned.
            policy: where it is sparse; None for dense attention.
            implementation: as in `ct.attention`.

        Raises:
            ValueError: the policy does not fit the token grid.
            NotImplementedError: the implementation cannot run here.
        """
        parts = [self._parts.transformer, self._parts.transformer_2 or self._parts.transformer]
        experts = (None, None) if self._parts.transformer_2 is None else EXPERTS
        made: list[SelfAttention] = []
        for part, expert in zip(parts, experts, strict=True):
            if policy is None:
                made.append(
                    DenseAttention.on(plan.size.grid, part.dtype, implementation, self.layout)
                )
            else:
                made.append(
                    SparseAttention(
                        plan.size.grid,
                        policy,
                        mesh=None if self.layout is None else self.layout.mesh,
                        sharding=None if self.layout is None else self.layout.spec,
                        implementation=implementation,
                        num_steps=len(plan.schedule.timesteps),
                        num_layers=part.config.num_layers,
                        expert=expert,
                        dtype=part.dtype,
                    )
                )
        return made[0], made[1]

    def check_rows(self, batch: int, guided: bool) -> None:
        """Raises ValueError unless videos, or their guidance pairs, divide by the data axis.

        Args:
            batch: videos of a call.
            guided: whether each has a negative prompt beside it.
        """
        if self.layout is None:
            return
        rows, devices = batch * (1 + guided), self.layout.size(self.layout.batch)
        if rows % devices:
            pairs = "with guidance" if guided else "without guidance"
            raise ValueError(
                f"mesh must have a data axis that divides the {rows} rows of a call with "
                f"{batch} videos {pairs}, got {devices}"
            )

    def encode_prompt(
        self,
        prompt: str | list[str],
        negative_prompt: str | list[str] | None = None,
        do_classifier_free_guidance: bool = True,
        num_videos_per_prompt: int = 1,
        max_sequence_length: int | None = None,
    ) -> tuple[Float[Array, "batch text dim"], Float[Array, "batch text dim"] | None]:
        """Embeds prompts, with zeros where they are padded.

        Args:
            prompt: one or several.
            negative_prompt: one for all, or one each; by default the pipeline's.
            do_classifier_free_guidance: whether the negative prompts are embedded.
            num_videos_per_prompt: how often each embedding is repeated.
            max_sequence_length: tokens to pad to; by default the pipeline's.

        Returns:
            Embeddings of the prompts, and of the negative ones or None.

        Raises:
            TypeError: a prompt is no string.
            ValueError: a prompt is empty or too long, or the numbers of prompts differ.
        """
        self.check_prompts(prompt, negative_prompt, max_sequence_length)
        repeats = _checks.integer("num_videos_per_prompt", num_videos_per_prompt, minimum=1)
        length = self._sequence_length(max_sequence_length)
        prompts = _strings("prompt", prompt)
        positive = self._embed(prompts, length, repeats)
        negative = None
        if do_classifier_free_guidance:
            given = self.defaults.negative_prompt if negative_prompt is None else negative_prompt
            negatives = [given] * len(prompts) if isinstance(given, str) else given
            negative = self._embed(negatives, length, repeats)
        if not self._keep_text_encoder:
            self._parts.text_encoder.release()
        return positive, negative

    def _embed(
        self, prompts: list[str], length: int, repeats: int
    ) -> Float[Array, "batch text dim"]:
        ids, mask = self.tokenizer(prompts, length)
        return jnp.repeat(
            _embed_tokens(self.text_encoder, jnp.asarray(ids), jnp.asarray(mask)), repeats, axis=0
        )

    def _sequence_length(self, given: int | None) -> int:
        value = self.defaults.max_sequence_length if given is None else given
        return _checks.integer("max_sequence_length", value, minimum=1)

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        guidance_scale_2: float | None = None,
        num_videos_per_prompt: int = 1,
        generator: np.random.Generator | None = None,
        latents: Float[AnyArray, "batch channels frames rows columns"] | None = None,
        prompt_embeds: Float[AnyArray, "batch text dim"] | None = None,
        negative_prompt_embeds: Float[AnyArray, "batch text dim"] | None = None,
        output_type: str = "np",
        callback_on_step_end: Callable[..., dict[str, Any] | None] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        max_sequence_length: int | None = None,
        *,
        seed: int | None = None,
        policy: SparsityPolicy | None = None,
        implementation: str | Sequence[str] | None = None,
        attention: SelfAttention | None = None,
        attention_2: SelfAttention | None = None,
        vae_tiling: bool | Tiling | None = None,
        return_records: bool = False,
        warm_up: bool = False,
        progress: Progress | None = None,
    ) -> WanPipelineOutput:
        """Makes videos.

        All arguments are checked before any weight is read. Where nothing else is said, a value
        that is None is the pipeline's own (`defaults`).

        Args:
            prompt: one or several; or give `prompt_embeds`.
            negative_prompt: what guidance leads away from; one for all, or one each.
            height: pixels; rounded down, see `video_size`.
            width: pixels, likewise.
            num_frames: frames, likewise.
            num_inference_steps: denoising steps.
            guidance_scale: weight of the prompt against the negative prompt; 1 or less for none.
            guidance_scale_2: the same for the expert at low noise; None for `guidance_scale`.
            num_videos_per_prompt: videos of each prompt.
            generator: what the noise is drawn from; or give `seed`.
            latents: the noise itself, `[batch, channels, frames, rows, columns]`.
            prompt_embeds: what `encode_prompt` returned.
            negative_prompt_embeds: likewise.
            output_type: "np" for frames, "latent" for normalized latents.
            callback_on_step_end: called after each step with the pipeline, the step's index, its
                time step and a dictionary of arrays; what it returns replaces them.
            callback_on_step_end_tensor_inputs: which arrays: `latents`, `prompt_embeds`,
                `negative_prompt_embeds`.
            max_sequence_length: tokens that prompts are padded to.
            seed: of the noise and of what self-attention draws; equal seeds give equal videos.
            policy: where self-attention is sparse; None for dense attention.
            implementation: as in `ct.attention`, for self-attention.
            attention: any self-attention, instead of `policy` and `implementation`.
            attention_2: the same for the expert at low noise; None for `attention`.
            vae_tiling: whether, or how, the VAE works in tiles; None where frames are large.
            return_records: whether to keep what self-attention recorded.
            warm_up: whether to run a step of each expert once before the first one, so that no
                step's time holds a compilation.
            progress: called with a stage, "", the steps done and all steps.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument is out of range or does not fit the others.
            FloatingPointError: the latents stop being finite.

        Warns:
            UserWarning: a size was rounded, or a prompt has words that the model does not know.
        """
        _checks.choice("output_type", output_type, OUTPUT_TYPES)
        for name in callback_on_step_end_tensor_inputs:
            _checks.choice("callback_on_step_end_tensor_inputs", name, _CALLBACK_TENSORS)
        _exclude(generator=generator, seed=seed)
        _exclude(negative_prompt=negative_prompt, negative_prompt_embeds=negative_prompt_embeds)
        _exclude(attention=attention, policy=policy)
        _exclude(attention=attention, implementation=implementation)
        generator = self._generator(generator, seed)
        if (prompt is None) == (prompt_embeds is None):
            raise ValueError("give either prompt or prompt_embeds")
        plan = self.check_inputs(
            prompt,
            negative_prompt,
            height,
            width,
            num_frames,
            num_inference_steps,
            guidance_scale,
            guidance_scale_2,
            max_sequence_length,
        )
        if prompt is None:
            assert prompt_embeds is not None
            self._check_embeddings(prompt_embeds, negative_prompt_embeds, plan.guided)
            batch = len(prompt_embeds)
        else:
            repeats = _checks.integer("num_videos_per_prompt", num_videos_per_prompt, minimum=1)
            batch = len(_strings("prompt", prompt)) * repeats
        self.check_rows(batch, plan.guided)
        shape = (batch, self._parts.vae.config.z_dim, *plan.size.latent)
        noise = self._noise(latents, shape, generator)
        if attention is None:
            attention, attention_2 = self.attentions(plan, policy, implementation)
        key = jax.random.key(int(generator.integers(2**31)))

        show = _ignore if progress is None else progress
        seconds: dict[str, float] = {}
        if prompt is not None:
            with _stage("prompt", seconds, show):
                encoded = self.encode_prompt(
                    prompt, negative_prompt, plan.guided, num_videos_per_prompt, max_sequence_length
                )
            prompt_embeds = encoded[0]
            if negative_prompt_embeds is None:
                negative_prompt_embeds = encoded[1]
        with _stage("weights", seconds, show):
            experts = [self.transformer]
            if self.transformer_2 is not None:
                experts.append(self.transformer_2)
        negative = jnp.asarray(negative_prompt_embeds) if plan.guided else None
        embeds, negative, noise, key = self._everywhere(
            (jnp.asarray(prompt_embeds), negative, noise, key)
        )
        run = _Run(
            experts=tuple(experts),
            embeds=embeds,
            negative=negative,
            scales=plan.guidance_scales,
            attentions=(attention, attention if attention_2 is None else attention_2),
            key=key,
            return_records=return_records,
            layout=self.layout,
        )
        if warm_up:
            with _stage("warm-up", seconds, show):
                self._warm_up(run, noise, plan.schedule)
        frames, records, step_seconds = self._denoise(
            run,
            noise,
            plan.schedule,
            callback_on_step_end,
            callback_on_step_end_tensor_inputs,
            show,
        )
        seconds["denoising"] = sum(step_seconds)
        if self.layout is not None:
            frames = jnp.asarray(np.asarray(frames))  # off the mesh, on a device of this process
        if output_type == "np":
            started = time.perf_counter()
            frames = self._decode(frames, self._tiling(vae_tiling, plan.size), show)
            seconds["decoding"] = time.perf_counter() - started
        return WanPipelineOutput(frames, tuple(records), seconds, tuple(step_seconds))

    def _generator(
        self, generator: np.random.Generator | None, seed: int | None
    ) -> np.random.Generator:
        if generator is not None:
            return generator
        if seed is None and self.layout is not None and jax.process_count() > 1:
            raise ValueError("seed must be given, the same in each process, got None")
        return np.random.default_rng(
            None if seed is None else _checks.integer("seed", seed, minimum=0)
        )

    def _everywhere(self, arrays: Any) -> Any:
        return arrays if self.layout is None else replicated(arrays, self.layout.mesh)

    def check_inputs(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        guidance_scale_2: float | None = None,
        max_sequence_length: int | None = None,
    ) -> "CallPlan":
        """Checks the arguments of a call without reading any weight.

        Args:
            prompt: as in a call, as are all others.
            negative_prompt: see there.
            height: see there.
            width: see there.
            num_frames: see there.
            num_inference_steps: see there.
            guidance_scale: see there.
            guidance_scale_2: see there.
            max_sequence_length: see there.

        Returns:
            What the call would do.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument is out of range or does not fit the others.
        """
        if prompt is not None:
            self.check_prompts(prompt, negative_prompt, max_sequence_length)
        if num_inference_steps is None:
            num_inference_steps = self.defaults.num_inference_steps
        return CallPlan(
            size=self.video_size(num_frames, height, width),
            schedule=self.scheduler.schedule(num_inference_steps),
            guidance_scales=self._guidance_scales(guidance_scale, guidance_scale_2),
        )

    def _guidance_scales(self, first: float | None, second: float | None) -> tuple[float, float]:
        first = self.defaults.guidance_scale if first is None else first
        first = _checks.finite("guidance_scale", first)
        if second is None:
            return first, first
        if self._parts.transformer_2 is None:
            raise ValueError("guidance_scale_2 is for pipelines with a transformer_2 alone")
        return first, _checks.finite("guidance_scale_2", second)

    def _check_embeddings(self, embeds: AnyArray, negative: AnyArray | None, guided: bool) -> None:
        if guided and negative is None:
            raise ValueError("prompt_embeds needs negative_prompt_embeds where there is guidance")
        dim = self._parts.transformer.config.text_dim
        for name, array in (("prompt_embeds", embeds), ("negative_prompt_embeds", negative)):
            if array is not None and (
                array.ndim != 3 or array.shape[0] != len(embeds) or array.shape[2] != dim
            ):
                raise ValueError(
                    f"{name} must be [{len(embeds)}, tokens, {dim}], got {array.shape}"
                )

    def _noise(
        self, latents: AnyArray | None, shape: tuple[int, ...], generator: np.random.Generator
    ) -> Float[Array, "batch channels frames rows columns"]:
        if latents is None:
            return jnp.asarray(generator.standard_normal(shape, np.float32))
        if latents.shape != shape:
            raise ValueError(f"latents must have the shape {shape}, got {latents.shape}")
        return jnp.asarray(latents, jnp.float32)

    def _warm_up(self, run: "_Run", latents: Array, schedule: Schedule) -> None:
        """Compiles what denoising needs, by the first step of each expert."""
        state = self.scheduler.init(latents)
        stages = [self._low_noise(timestep) for timestep in schedule.timesteps]
        for step in sorted({stages.index(stage) for stage in stages}):
            flow, _ = self._flow(run, latents, step, schedule.timesteps[step])
            stepped = self.scheduler.step(schedule.coefficients[step], state, flow, latents)
            jax.block_until_ready(stepped)

    def _denoise(
        self,
        run: "_Run",
        latents: Float[Array, "batch channels frames rows columns"],
        schedule: Schedule,
        callback: Callable[..., dict[str, Any] | None] | None,
        callback_inputs: Sequence[str],
        show: Progress,
    ) -> tuple[
        Float[Array, "batch channels frames rows columns"], list[tuple[Any, Any]], list[float]
    ]:
        """Solves the flow from noise to clean latents."""
        state = self.scheduler.init(latents)
        records: list[tuple[Any, Any]] = []
        seconds: list[float] = []
        steps = len(schedule.timesteps)
        show("denoising", "", 0, steps)
        for step, timestep in enumerate(schedule.timesteps):
            started = time.perf_counter()
            flow, record = self._flow(run, latents, step, timestep)
            latents, state = self.scheduler.step(schedule.coefficients[step], state, flow, latents)
            is_finite = bool(jnp.isfinite(latents).all())  # waits for them
            seconds.append(time.perf_counter() - started)
            if not is_finite:
                raise FloatingPointError(
                    f"the latents are not finite after step {step}: weights, embeddings or "
                    "latents hold NaN, or a value is beyond the dtype's range"
                )
            if run.return_records:
                records.append(record)
            if callback is not None:
                arrays = {
                    "latents": latents,
                    "prompt_embeds": run.embeds,
                    "negative_prompt_embeds": run.negative,
                }
                chosen = {name: arrays[name] for name in callback_inputs}
                changed = arrays | (callback(self, step, float(timestep), chosen) or {})
                latents = self._everywhere(jnp.asarray(changed["latents"], jnp.float32))
                embeds, negative = changed["prompt_embeds"], changed["negative_prompt_embeds"]
                embeds, negative = self._everywhere((embeds, negative))
                run = replace(run, embeds=embeds, negative=negative)
            show("denoising", "", step + 1, steps)
        return latents, records, seconds

    def _flow(
        self, run: "_Run", latents: Array, step: int, timestep: np.floating
    ) -> tuple[Array, tuple[Any, Any]]:
        """The guided flow at a step, and what self-attention recorded."""
        low_noise = self._low_noise(timestep)
        expert = run.experts[low_noise]
        attention = run.attentions[low_noise]

        def predict(embeds: Array, latents: Array) -> tuple[Array, Any]:
            return _predict(
                expert,
                latents,
                np.full(len(latents), timestep, np.float32),
                embeds,
                np.int32(step),
                run.key,
                attention=attention,
                return_record=run.return_records,
                layout=run.layout,
            )

        if run.negative is None:
            flow, record = predict(run.embeds, latents)
            return flow, (record, None)
        if run.layout is not None and run.layout.batch:
            # Both parts of guidance at once, each on its share of the devices.
            twice = jnp.concatenate([latents, latents])
            flow, record = predict(jnp.concatenate([run.embeds, run.negative]), twice)
            flow, unguided = jnp.split(flow, 2)
            record, other = _split_record(record)
        else:
            flow, record = predict(run.embeds, latents)
            unguided, other = predict(run.negative, latents)
        return unguided + run.scales[low_noise] * (flow - unguided), (record, other)

    def _low_noise(self, timestep: np.floating) -> int:
        """Index of the expert at a time step."""
        if self.boundary_ratio is None:
            return 0
        return int(timestep < self.boundary_ratio * self.scheduler.num_train_timesteps)

    def _tiling(self, given: bool | Tiling | None, size: VideoSize) -> Tiling | None:
        if isinstance(given, Tiling):
            return given
        tiled = size.height * size.width > _TILED_FROM if given is None else given
        return Tiling() if tiled else None

    def _decode(
        self, latents: Array, tiling: Tiling | None, show: Progress
    ) -> Float[np.ndarray, "batch frames height width channels"]:
        pixels = self.vae.decode(
            self.vae.denormalize(latents),
            tiling=tiling,
            progress=lambda done, total: show("decoding", "", done, total),
        )
        return np.moveaxis(np.clip(pixels / 2 + 0.5, 0.0, 1.0), 1, -1)


@dataclass(frozen=True, eq=False)
class _Run:
    """What stays the same over the steps of one call."""

    experts: tuple[WanTransformer3DModel, ...]
    embeds: Float[Array, "batch text dim"]
    negative: Float[Array, "batch text dim"] | None
    scales: tuple[float, float]
    attentions: tuple[SelfAttention, SelfAttention]
    key: PRNGKeyArray
    return_records: bool
    layout: ArrayLayout | None


@functools.partial(jax.jit, static_argnames=("attention", "return_record", "layout"))
def _predict(
    transformer: WanTransformer3DModel,
    latents: Array,
    timesteps: Array,
    embeds: Array,
    step: Any,
    key: PRNGKeyArray,
    attention: SelfAttention,
    return_record: bool,
    layout: ArrayLayout | None,
) -> tuple[Array, Any]:
    result = transformer(
        latents,
        timesteps,
        embeds,
        attention=attention,
        step=step,
        rng=key,
        return_record=return_record,
        layout=layout,
    )
    flow, record = result if return_record else (result, None)
    flow = flow.astype(jnp.float32)
    if layout is not None:
        # Whole on every device, as what the scheduler and every process want it.
        flow, record = jax.tree.map(
            lambda array: layout.constrained(array, PartitionSpec()), (flow, record)
        )
    return flow, record


def _split_record(record: Any) -> tuple[Any, Any]:
    """What attention recorded of the first and of the second half of the batch's rows."""
    if not isinstance(record, RoutingRecord):
        return record, record
    routes, errors = (jnp.split(array, 2, axis=1) for array in (record.routes, record.errors))
    first, second = (replace(record, routes=routes[half], errors=errors[half]) for half in range(2))
    return first, second


@jax.jit
def _embed_tokens(
    text_encoder: UMT5EncoderModel,
    ids: Int[Array, "batch text"],
    mask: Bool[Array, "batch text"],
) -> Array:
    embeddings = text_encoder(ids, mask)
    return jnp.where(mask[..., jnp.newaxis], embeddings, 0)


def _loaded(model: Any) -> Part[Any, Any]:
    def load(put: Put) -> Any:
        return model if put is put_on_default_device else put_all(put, model)

    return Part(model.config, getattr(model, "dtype", "float32"), load)


def _exclude(**arguments: object) -> None:
    """Raises ValueError if more than one argument is given."""
    if sum(value is not None for value in arguments.values()) > 1:
        raise ValueError(f"{' and '.join(arguments)} exclude each other")


def _strings(name: str, value: str | list[str]) -> list[str]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(one, str) for one in strings):
        raise TypeError(f"{name} must be a string or a list of strings, got {value!r}")
    if not strings:
        raise ValueError(f"{name} must not be an empty list")
    return strings


@contextlib.contextmanager
def _stage(name: str, seconds: dict[str, float], show: Progress) -> Iterator[None]:
    """Shows that a stage runs, and takes its time."""
    show(name, "", 0, 1)
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
    show(name, "", 1, 1)


def _ignore(stage: str, current: str, done: int, total: int) -> None:
    del stage, current, done, total
