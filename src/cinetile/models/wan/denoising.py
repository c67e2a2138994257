"""Denoising: solving the flow from noise to clean latents with guidance and experts."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from cinetile.layer.record import LayerRecord
from cinetile.models.wan.attention import SelfAttention
from cinetile.models.wan.prompts import PromptTokens
from cinetile.models.wan.request import CallPlan
from cinetile.models.wan.schedulers import Schedule, Scheduler
from cinetile.models.wan.timing import StageClock
from cinetile.models.wan.transformer import WanTransformer3DModel
from cinetile.parallel.layout import ArrayLayout, replicated

CALLBACK_TENSORS = ("latents", "prompt_embeds", "negative_prompt_embeds")
"""The arrays that a callback can see and replace."""

StepEnd = Callable[[int, float, dict[str, Any]], Mapping[str, Any] | None]
Records = tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, eq=False)
class Denoising:
    """Everything that the steps of one run share.

    Attributes:
        experts: the transformer, or the transformers for high and for low noise.
        boundary_timestep: time step below which the expert for low noise runs; None for one
            transformer.
        scheduler: solves the flow.
        schedule: the steps.
        embeds: prompt embeddings.
        negative: negative prompt embeddings; None without guidance.
        scales: guidance scales at high and at low noise.
        attentions: self-attention at high and at low noise.
        key: random key of the self-attention.
        return_records: whether to keep what self-attention recorded.
        layout: how tokens are sharded over a mesh; None for one device.
    """

    experts: tuple[WanTransformer3DModel, ...]
    boundary_timestep: float | None
    scheduler: Scheduler
    schedule: Schedule
    embeds: Float[Array, "batch text dim"]
    negative: Float[Array, "batch text dim"] | None
    scales: tuple[float, float]
    attentions: tuple[SelfAttention, SelfAttention]
    key: PRNGKeyArray
    return_records: bool
    layout: ArrayLayout | None

    @classmethod
    def of(
        cls,
        plan: CallPlan,
        experts: tuple[WanTransformer3DModel, ...],
        boundary_ratio: float | None,
        layout: ArrayLayout | None,
        return_records: bool,
    ) -> tuple["Denoising", Float[Array, "batch channels frames rows columns"]]:
        """Puts the arrays of a plan, with embedded prompts, on the devices.

        Returns:
            What the steps share, and the noise.
        """
        assert not isinstance(plan.prompts, PromptTokens)
        assert not isinstance(plan.negative_prompts, PromptTokens)
        negative = plan.negative_prompts
        arrays = (
            jnp.asarray(plan.prompts),
            None if negative is None else jnp.asarray(negative),
            jnp.asarray(plan.latents, jnp.float32),
            jax.random.key(plan.attention_seed),
        )
        if layout is not None:
            arrays = replicated(arrays, layout.mesh)
        embeds, negative, latents, key = arrays
        boundary = None
        if boundary_ratio is not None:
            boundary = boundary_ratio * plan.scheduler.num_train_timesteps
        run = cls(
            experts=experts,
            boundary_timestep=boundary,
            scheduler=plan.scheduler,
            schedule=plan.schedule,
            embeds=embeds,
            negative=negative,
            scales=plan.guidance_scales,
            attentions=plan.attentions,
            key=key,
            return_records=return_records,
            layout=layout,
        )
        return run, latents

    def low_noise(self, timestep: np.floating) -> int:
        """Index of the expert that runs at a time step: 1 at low noise, else 0."""
        return int(self.boundary_timestep is not None and timestep < self.boundary_timestep)

    def flow(self, latents: Array, step: int) -> tuple[Array, tuple[Any, Any]]:
        """Predicts the guided flow at a step.

        Returns:
            The flow in float32, and the records of the self-attention for the prompt and for the
            negative prompt (None without guidance).
        """
        timestep = self.schedule.timesteps[step]
        expert = self.low_noise(timestep)

        def predict(embeds: Array, latents: Array) -> tuple[Array, Any]:
            return _predict(
                self.experts[expert],
                latents,
                np.full(len(latents), timestep, np.float32),
                embeds,
                np.int32(step),
                self.key,
                attention=self.attentions[expert],
                return_record=self.return_records,
                layout=self.layout,
            )

        if self.negative is None:
            flow, record = predict(self.embeds, latents)
            return flow, (record, None)
        if self.layout is not None and self.layout.batch:
            # The prompt and the negative prompt run at once, each on its share of the devices.
            twice = jnp.concatenate([latents, latents])
            flow, record = predict(jnp.concatenate([self.embeds, self.negative]), twice)
            flow, unguided = jnp.split(flow, 2)
            record, other = _split_record(record)
        else:
            flow, record = predict(self.embeds, latents)
            unguided, other = predict(self.negative, latents)
        return unguided + self.scales[expert] * (flow - unguided), (record, other)

    def update(
        self, latents: Array, step_end: StepEnd, step: int, names: Sequence[str]
    ) -> tuple["Denoising", Array]:
        """Calls a callback after a step and takes over the arrays that it returns."""
        arrays = {
            "latents": latents,
            "prompt_embeds": self.embeds,
            "negative_prompt_embeds": self.negative,
        }
        shown = {name: arrays[name] for name in names}
        changes = step_end(step, float(self.schedule.timesteps[step]), shown) or {}
        arrays |= {name: changes[name] for name in CALLBACK_TENSORS if name in changes}
        arrays["latents"] = jnp.asarray(arrays["latents"], jnp.float32)
        if self.layout is not None:
            arrays = replicated(arrays, self.layout.mesh)
        changed = replace(
            self, embeds=arrays["prompt_embeds"], negative=arrays["negative_prompt_embeds"]
        )
        return changed, arrays["latents"]


def warm_up(run: Denoising, latents: Float[Array, "batch channels frames rows columns"]) -> None:
    """Compiles the programs of denoising: runs the first step of each expert and drops it."""
    state = run.scheduler.init(latents)
    experts = [run.low_noise(timestep) for timestep in run.schedule.timesteps]
    for step in sorted({experts.index(expert) for expert in experts}):
        flow, _ = run.flow(latents, step)
        stepped = run.scheduler.step(run.schedule.coefficients[step], state, flow, latents)
        jax.block_until_ready(stepped)


def denoise(
    run: Denoising,
    latents: Float[Array, "batch channels frames rows columns"],
    clock: StageClock,
    step_end: StepEnd | None = None,
    callback_tensors: Sequence[str] = (),
) -> tuple[Float[Array, "batch channels frames rows columns"], Records, tuple[float, ...]]:
    """Solves the flow from noise to clean latents.

    Args:
        run: what the steps share.
        latents: the noise.
        clock: is told the time of denoising and the steps done.
        step_end: called after each step with its index, its time step and a dictionary of arrays;
            the arrays that it returns replace those of the run.
        callback_tensors: names of the arrays that `step_end` gets, from `CALLBACK_TENSORS`.

    Returns:
        The latents, the records of each step if the run keeps them, and the wall time of each
        step in seconds.

    Raises:
        FloatingPointError: the latents stop being finite.
    """
    state = run.scheduler.init(latents)
    records: list[tuple[Any, Any]] = []
    seconds: list[float] = []
    steps = len(run.schedule.timesteps)
    clock.show("denoising", 0, steps)
    for step in range(steps):
        started = time.perf_counter()
        flow, record = run.flow(latents, step)
        latents, state = run.scheduler.step(run.schedule.coefficients[step], state, flow, latents)
        is_finite = bool(jnp.isfinite(latents).all())  # waits for the step to end
        seconds.append(time.perf_counter() - started)
        if not is_finite:
            raise FloatingPointError(
                f"the latents are not finite after step {step}: weights, embeddings or "
                "latents hold NaN, or a value is beyond the range of the dtype"
            )
        if run.return_records:
            records.append(record)
        if step_end is not None:
            run, latents = run.update(latents, step_end, step, callback_tensors)
        clock.show("denoising", step + 1, steps)
    clock.seconds["denoising"] = sum(seconds)
    return latents, tuple(records), tuple(seconds)


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
        # Replicate: the scheduler and every process need whole arrays.
        flow, record = jax.tree.map(
            lambda array: layout.constrained(array, PartitionSpec()), (flow, record)
        )
    return flow, record


def _split_record(record: Any) -> tuple[Any, Any]:
    """Splits a record of a guidance pair into that of the prompt and of the negative prompt."""
    if not isinstance(record, LayerRecord):
        return record, record
    routes, errors = (jnp.split(array, 2, axis=1) for array in (record.routes, record.errors))
    first, second = (replace(record, routes=routes[half], errors=errors[half]) for half in range(2))
    return first, second
