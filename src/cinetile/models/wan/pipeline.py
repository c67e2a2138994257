"""From a prompt to a video: a facade over the request, the denoising and the decoding."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from cinetile import _checks
from cinetile.layer.sparse_attention import SparseAttention
from cinetile.models.wan.attention import DenseAttention, SelfAttention
from cinetile.models.wan.cost import call_cost, warn_if_untrained
from cinetile.models.wan.decoding import choose_tiling, decode_frames
from cinetile.models.wan.denoising import (
    CALLBACK_TENSORS,
    Denoising,
    denoise,
)
from cinetile.models.wan.denoising import (
    warm_up as compile_steps,
)
from cinetile.models.wan.model_set import WanModels
from cinetile.models.wan.output import WanPipelineOutput
from cinetile.models.wan.prompts import AnyArray, Prompts, PromptTokens, embed_prompts
from cinetile.models.wan.request import (
    MAX_STEPS,
    OUTPUT_TYPES,
    CallPlan,
    PromptArguments,
    check_rows,
    exclude,
    guidance_scales,
    is_guided,
    make_generator,
    make_noise,
)
from cinetile.models.wan.size import VideoSize, check_videos, video_size
from cinetile.models.wan.tiling import Tiling
from cinetile.models.wan.timing import Progress, StageClock
from cinetile.policy import EXPERTS, SparsityPolicy

Callback = Callable[..., dict[str, Any] | None]


class WanPipeline(WanModels):
    """Text to video with Wan 2.1, or with the two experts of Wan 2.2.

    A call checks its arguments, plans the videos and makes them. `plan` and `run` are its two
    halves: `plan` reads no weights, and `run` takes what `plan` returned.

    Argument names are those of diffusers' pipeline. `from_pretrained` opens a folder; the
    constructor takes models.

    Args:
        tokenizer: encodes prompts as token ids.
        text_encoder: embeds token ids.
        transformer: predicts the flow; with two experts, at high noise.
        vae: decodes latents to pixels.
        scheduler: solves the flow; may be replaced at any time.
        transformer_2: the expert at low noise.
        boundary_ratio: noise level below which `transformer_2` runs.
        defaults: replace arguments of a call that are None.
        mesh: devices over which the transformers are sharded; None for one device. Prompts are
            embedded and frames decoded on one device of each process.
        sharding: as for `SparseAttention`; "data", "sequence" and "heads" are the default axes.
        weights: how weights are sharded: "tensor" over the axis of the heads, "fsdp" over all.

    Attributes:
        scheduler: as given.
        defaults: as given.
        layout: how tokens are sharded over the mesh; None without a mesh.
    """

    def video_size(
        self,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
    ) -> VideoSize:
        """Rounds a size down to a size that the models can make; warns if that changes it.

        Args:
            num_frames: becomes 4k + 1 with Wan's VAE.
            height: becomes a multiple of 16 with Wan's VAE.
            width: becomes a multiple of 16 with Wan's VAE.

        Raises:
            TypeError: a size is not an integer.
            ValueError: a size is below the smallest possible one or above the largest, or the
                sizes make too many tokens.
        """
        return video_size(self._parts, self.defaults, num_frames, height, width)

    def attentions(
        self,
        size: VideoSize,
        num_inference_steps: int,
        policy: SparsityPolicy | None = None,
        implementation: str | Sequence[str] | None = None,
    ) -> tuple[SelfAttention, SelfAttention]:
        """Makes the self-attention at high and at low noise; reads no weights.

        Args:
            size: size of the videos.
            num_inference_steps: denoising steps.
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
            if made and expert is None:
                made.append(made[0])
            elif policy is None:
                made.append(DenseAttention.on(size.grid, part.dtype, implementation, self.layout))
            else:
                made.append(
                    SparseAttention(
                        size.grid,
                        policy,
                        mesh=None if self.layout is None else self.layout.mesh,
                        sharding=None if self.layout is None else self.layout.spec,
                        implementation=implementation,
                        num_steps=num_inference_steps,
                        num_layers=part.config.num_layers,
                        expert=expert,
                        dtype=part.dtype,
                    )
                )
        return made[0], made[1]

    def encode_prompt(
        self,
        prompt: str | list[str],
        negative_prompt: str | list[str] | None = None,
        do_classifier_free_guidance: bool = True,
        num_videos_per_prompt: int = 1,
        max_sequence_length: int | None = None,
    ) -> tuple[Float[Array, "batch text dim"], Float[Array, "batch text dim"] | None]:
        """Embeds prompts, with zeros at padding.

        Args:
            prompt: a prompt or several.
            negative_prompt: a string for all prompts, or a list with a string for each; by default
                the pipeline's.
            do_classifier_free_guidance: whether the negative prompts are embedded.
            num_videos_per_prompt: how often each embedding is repeated.
            max_sequence_length: tokens to pad to; by default the pipeline's.

        Returns:
            Embeddings of the prompts, and of the negative prompts or None.

        Raises:
            TypeError: a prompt is not a string.
            ValueError: a prompt is empty or too long, or the numbers of prompts differ.
        """
        prompts, negatives = PromptArguments(
            prompt,
            negative_prompt,
            num_videos_per_prompt=num_videos_per_prompt,
            max_sequence_length=max_sequence_length,
        ).check(self._parts, self.defaults, do_classifier_free_guidance)
        return self._embed(prompts, negatives)

    def embedded(self, plan: CallPlan) -> CallPlan:
        """Embeds the prompts of a plan, so that several runs of it read the text encoder once."""
        prompts, negatives = self._embed(plan.prompts, plan.negative_prompts)
        return replace(plan, prompts=prompts, negative_prompts=negatives)

    def _embed(self, *prompts: Prompts | None) -> tuple[Any, Any]:
        """Embeds the prompts that are tokens, and releases the text encoder unless it is kept."""
        positive, negative = (
            embed_prompts(self.text_encoder, part) if isinstance(part, PromptTokens) else part
            for part in prompts
        )
        if not self._keep_text_encoder:
            self._parts.text_encoder.release()
        return positive, negative

    def plan(
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
        max_sequence_length: int | None = None,
        *,
        seed: int | None = None,
        policy: SparsityPolicy | None = None,
        implementation: str | Sequence[str] | None = None,
        attention: SelfAttention | None = None,
        attention_2: SelfAttention | None = None,
        vae_tiling: bool | Tiling | None = None,
    ) -> CallPlan:
        """Checks the arguments of a call and plans it; reads no weights and runs no model.

        Arguments that are None take the pipeline's `defaults`, unless said otherwise. Long because
        it lists and passes on the arguments of a call.

        Args:
            prompt: a prompt or several; or give `prompt_embeds`.
            negative_prompt: guidance leads away from it; a string for all prompts, or a list with
                a string for each.
            height: pixels; rounded down, see `video_size`.
            width: pixels; rounded down.
            num_frames: frames; rounded down.
            num_inference_steps: denoising steps.
            guidance_scale: weight of the prompt against the negative prompt; 1 or less for no
                guidance.
            guidance_scale_2: the same for the expert at low noise; None for `guidance_scale`.
            num_videos_per_prompt: videos of each prompt.
            generator: draws the noise; or give `seed`.
            latents: the noise itself, `[batch, channels, frames, rows, columns]`.
            prompt_embeds: embeddings that `encode_prompt` returned.
            negative_prompt_embeds: the same for the negative prompt.
            output_type: "np" for frames, "latent" for normalized latents.
            max_sequence_length: tokens that prompts are padded to.
            seed: seed of the noise and of the self-attention; equal seeds give equal videos.
            policy: where self-attention is sparse; None for dense attention.
            implementation: implementation of the self-attention, as in `ct.attention`.
            attention: any self-attention, in place of `policy` and `implementation`.
            attention_2: the same for the expert at low noise; None for `attention`.
            vae_tiling: whether, or how, the VAE decodes in tiles; None for tiles where frames are
                large.

        Returns:
            What `run` takes.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument is out of range or does not fit the others.
            NotImplementedError: the implementation cannot run here.

        Warns:
            UserWarning: a size was rounded, the checkpoint was not trained at the size, or a prompt
                has words that the model does not know.
        """
        _checks.choice("output_type", output_type, OUTPUT_TYPES)
        exclude(attention=attention, policy=policy)
        exclude(attention=attention, implementation=implementation)
        generator = make_generator(generator, seed, self.layout)
        scales = guidance_scales(
            self._parts, self.defaults.guidance_scale, guidance_scale, guidance_scale_2
        )
        guided = is_guided(scales)
        prompts, negatives = PromptArguments(
            prompt,
            negative_prompt,
            prompt_embeds,
            negative_prompt_embeds,
            num_videos_per_prompt,
            max_sequence_length,
        ).check(self._parts, self.defaults, guided)
        if num_inference_steps is None:
            num_inference_steps = self.defaults.num_inference_steps
        steps = _checks.integer(
            "num_inference_steps", num_inference_steps, minimum=1, maximum=MAX_STEPS
        )
        size = self.video_size(num_frames, height, width)
        videos = len(prompts)
        check_rows(self.layout, videos, guided)
        check_videos(size, videos)
        shape = (videos, self._parts.vae.config.z_dim, *size.latent)
        noise = make_noise(latents, shape, generator)
        if attention is None:
            attention, attention_2 = self.attentions(size, steps, policy, implementation)
        cost = call_cost(self._parts, size, videos=videos, steps=steps, guided=guided)
        warn_if_untrained(self._parts, self.defaults, size, cost)
        return CallPlan(
            size=size,
            is_trained_size=size.is_trained(self.defaults),
            scheduler=self.scheduler,
            schedule=self.scheduler.schedule(steps),
            guidance_scales=scales,
            prompts=prompts,
            negative_prompts=negatives,
            latents=noise,
            attentions=(attention, attention if attention_2 is None else attention_2),
            attention_seed=int(generator.integers(2**31)),
            tiling=choose_tiling(vae_tiling, size),
            output_type=output_type,
        )

    def run(
        self,
        plan: CallPlan,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        *,
        return_records: bool = False,
        warm_up: bool = False,
        progress: Progress | None = None,
    ) -> WanPipelineOutput:
        """Makes the videos of a plan.

        Args:
            plan: what `plan` returned, or that with some fields replaced.
            callback_on_step_end: called after each step with the pipeline, the index of the step,
                its time step and a dictionary of arrays; the arrays that it returns replace them.
            callback_on_step_end_tensor_inputs: names of the arrays in the dictionary: `latents`,
                `prompt_embeds`, `negative_prompt_embeds`.
            return_records: whether to keep the records of the self-attention.
            warm_up: whether to compile before the first step, so that no step's time includes
                compilation.
            progress: called with a stage, "", the finished steps and all steps.

        Raises:
            ValueError: a name of an array is unknown.
            FloatingPointError: the latents stop being finite.
        """
        for name in callback_on_step_end_tensor_inputs:
            _checks.choice("callback_on_step_end_tensor_inputs", name, CALLBACK_TENSORS)
        clock = StageClock(progress)
        if isinstance(plan.prompts, PromptTokens) or isinstance(
            plan.negative_prompts, PromptTokens
        ):
            with clock.stage("prompt"):
                plan = self.embedded(plan)
        with clock.stage("weights"):
            experts = tuple(
                expert for expert in (self.transformer, self.transformer_2) if expert is not None
            )
        run, latents = Denoising.of(plan, experts, self.boundary_ratio, self.layout, return_records)
        if warm_up:
            with clock.stage("warm-up"):
                compile_steps(run, latents)
        callback = callback_on_step_end
        step_end = None if callback is None else functools.partial(callback, self)
        frames, records, step_seconds = denoise(
            run, latents, clock, step_end, callback_on_step_end_tensor_inputs
        )
        if self.layout is not None:
            frames = jnp.asarray(np.asarray(frames))  # from the mesh to a device of this process
        if plan.output_type == "np":
            frames = decode_frames(self.vae, frames, plan.tiling, clock)
        return WanPipelineOutput(frames, records, clock.seconds, step_seconds)

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
        callback_on_step_end: Callback | None = None,
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
        """Makes videos: `plan`, then `run`.

        All arguments are checked before any weight is read. Arguments that are None take the
        pipeline's `defaults`, unless said otherwise. Long because it lists and passes on the
        arguments of `plan` and `run`.

        Args:
            prompt: a prompt or several; or give `prompt_embeds`.
            negative_prompt: guidance leads away from it; a string for all prompts, or a list with
                a string for each.
            height: pixels; rounded down, see `video_size`.
            width: pixels; rounded down.
            num_frames: frames; rounded down.
            num_inference_steps: denoising steps.
            guidance_scale: weight of the prompt against the negative prompt; 1 or less for no
                guidance.
            guidance_scale_2: the same for the expert at low noise; None for `guidance_scale`.
            num_videos_per_prompt: videos of each prompt.
            generator: draws the noise; or give `seed`.
            latents: the noise itself, `[batch, channels, frames, rows, columns]`.
            prompt_embeds: embeddings that `encode_prompt` returned.
            negative_prompt_embeds: the same for the negative prompt.
            output_type: "np" for frames, "latent" for normalized latents.
            callback_on_step_end: called after each step with the pipeline, the index of the step,
                its time step and a dictionary of arrays; the arrays that it returns replace them.
            callback_on_step_end_tensor_inputs: names of the arrays in the dictionary: `latents`,
                `prompt_embeds`, `negative_prompt_embeds`.
            max_sequence_length: tokens that prompts are padded to.
            seed: seed of the noise and of the self-attention; equal seeds give equal videos.
            policy: where self-attention is sparse; None for dense attention.
            implementation: implementation of the self-attention, as in `ct.attention`.
            attention: any self-attention, in place of `policy` and `implementation`.
            attention_2: the same for the expert at low noise; None for `attention`.
            vae_tiling: whether, or how, the VAE decodes in tiles; None for tiles where frames are
                large.
            return_records: whether to keep the records of the self-attention.
            warm_up: whether to compile before the first step, so that no step's time includes
                compilation.
            progress: called with a stage, "", the finished steps and all steps.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument is out of range or does not fit the others.
            NotImplementedError: the implementation cannot run here.
            FloatingPointError: the latents stop being finite.

        Warns:
            UserWarning: a size was rounded, the checkpoint was not trained at the size, or a prompt
                has words that the model does not know.
        """
        for name in callback_on_step_end_tensor_inputs:
            _checks.choice("callback_on_step_end_tensor_inputs", name, CALLBACK_TENSORS)
        plan = self.plan(
            prompt=prompt,
            negative_prompt=negative_prompt,
            height=height,
            width=width,
            num_frames=num_frames,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            guidance_scale_2=guidance_scale_2,
            num_videos_per_prompt=num_videos_per_prompt,
            generator=generator,
            latents=latents,
            prompt_embeds=prompt_embeds,
            negative_prompt_embeds=negative_prompt_embeds,
            output_type=output_type,
            max_sequence_length=max_sequence_length,
            seed=seed,
            policy=policy,
            implementation=implementation,
            attention=attention,
            attention_2=attention_2,
            vae_tiling=vae_tiling,
        )
        return self.run(
            plan,
            callback_on_step_end,
            callback_on_step_end_tensor_inputs,
            return_records=return_records,
            warm_up=warm_up,
            progress=progress,
        )
