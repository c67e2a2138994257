"""One prompt with dense and with sparse attention: times, and how far the videos differ."""

import statistics
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from cinetile import _checks
from cinetile.lab import metrics
from cinetile.lab.compare.stand_in import add_up
from cinetile.lab.ratios import Stated, share, speedup
from cinetile.layer.record import LayerRecord
from cinetile.layer.route_table import RouteTable
from cinetile.models.wan import CallPlan, WanPipeline, WanPipelineOutput
from cinetile.models.wan.timing import Progress
from cinetile.policy import SparsityPolicy

# Steps of the run without attention; each step takes the same time.
_STEPS_WITHOUT = 3


@dataclass(frozen=True)
class NoAttention:
    """Adds up query, key and value in place of attention, to time the rest of a step."""

    def __call__(self, query: Array, key: Array, value: Array, **call: Any) -> Any:
        """See `cinetile.models.wan.SelfAttention`; the record is None."""
        output = add_up(query, key, value)
        return (output, None) if call.get("return_record") else output


@dataclass(frozen=True, eq=False)
class ComparisonPlan:
    """A comparison whose arguments are checked.

    Attributes:
        dense: the call with dense attention.
        sparse: the same call under the policy.
        without: a short call without attention, for the time of everything else.
        repeats: rounds of all three.
    """

    dense: CallPlan
    sparse: CallPlan
    without: CallPlan
    repeats: int


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two videos.

    Attributes:
        frames: `[frames, height, width, 3]` in [0, 1].
        denoise_s: wall time of all denoising steps in seconds; the median over rounds.
        step_seconds: wall time of each step in seconds, without compilation; medians over rounds.
        rounds_s: wall time of all denoising steps in seconds, one entry per round.
        attention_share: the share of `rounds_s` that self-attention takes: the time that a step
            takes longer than a step of the same round whose self-attention only adds up query, key
            and value.
    """

    frames: Float[np.ndarray, "frames height width 3"] = field(repr=False)
    denoise_s: float
    step_seconds: tuple[float, ...]
    rounds_s: tuple[float, ...]
    attention_share: Stated


@dataclass(frozen=True, eq=False)
class VideoComparison:
    """A dense and a sparse video from the same noise.

    Attributes:
        dense: with dense self-attention.
        sparse: under the policy.
        psnr: PSNR of each sparse frame against the dense frame, in decibels.
        ssim: SSIM of each frame; 1 where nothing differs.
        flip: FLIP of each frame; 0 where nothing differs.
        routes: the pattern of every head in each step and layer, for the prompt and not for the
            negative prompt.
        is_trained_size: False if the checkpoint was not trained at this size: both videos are
            noise, and the metrics mean little.
    """

    dense: Side
    sparse: Side
    psnr: Float[np.ndarray, " frames"]
    ssim: Float[np.ndarray, " frames"]
    flip: Float[np.ndarray, " frames"]
    routes: RouteTable = field(repr=False)
    is_trained_size: bool = True

    @property
    def speedup(self) -> Stated:
        """Denoising time, dense over sparse, if the rounds tell the two apart."""
        return speedup(self.dense.rounds_s, self.sparse.rounds_s)


def plan_comparison(
    pipe: WanPipeline,
    prompt: str,
    policy: SparsityPolicy,
    *,
    implementation: str | None = None,
    repeats: int = 1,
    seed: int = 0,
    **arguments: Any,
) -> ComparisonPlan:
    """Checks the arguments of a comparison; reads no weights.

    Args:
        pipe: the pipeline.
        prompt: a prompt.
        policy: policy of the sparse video.
        implementation: implementation of both, as in `ct.attention`.
        repeats: rounds of both; times are medians over the rounds.
        seed: seed of the noise, and of the rows on which heads are routed.
        **arguments: of the pipeline's call: `negative_prompt`, `num_inference_steps`, sizes and
            guidance scales.

    Raises:
        ImportError: the package of a metric is not installed.
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
        NotImplementedError: the implementation cannot run here.

    Warns:
        UserWarning: as `WanPipeline.plan`.
    """
    metrics.require_metrics()
    repeats = _checks.integer("repeats", repeats, minimum=1)
    if not isinstance(prompt, str):
        raise TypeError(f"prompt must be one string, got {prompt!r}")
    dense = pipe.plan(prompt, implementation=implementation, seed=seed, **arguments)
    steps = len(dense.schedule.timesteps)
    return ComparisonPlan(
        dense=dense,
        sparse=replace(
            dense, attentions=pipe.attentions(dense.size, steps, policy, implementation)
        ),
        without=replace(
            dense,
            attentions=(NoAttention(), NoAttention()),
            schedule=dense.scheduler.schedule(min(_STEPS_WITHOUT, steps)),
        ),
        repeats=repeats,
    )


def run_comparison(
    pipe: WanPipeline, plan: ComparisonPlan, progress: Progress | None = None
) -> VideoComparison:
    """Makes the videos of a plan, in turn, and compares them.

    Args:
        pipe: the pipeline that made the plan.
        plan: what `plan_comparison` returned.
        progress: called with a stage that names its video, "", the finished steps and all steps.

    Raises:
        FloatingPointError: the latents stop being finite.
    """
    embedded = pipe.embedded(plan.dense)

    def run(side: str, call: CallPlan, output_type: str, **options: Any) -> WanPipelineOutput:
        def show(stage: str, current: str, done: int, total: int) -> None:
            del current
            if progress is not None and stage in ("denoising", "warm-up", "decoding"):
                progress(f"{side}: {stage}", "", done, total)

        call = replace(
            call,
            prompts=embedded.prompts,
            negative_prompts=embedded.negative_prompts,
            output_type=output_type,
        )
        return pipe.run(call, warm_up=True, progress=show, **options)

    dense: list[WanPipelineOutput] = []
    sparse: list[WanPipelineOutput] = []
    bare_steps: list[float] = []
    for turn in range(plan.repeats):
        output_type = "np" if turn == 0 else "latent"
        dense.append(run("dense", plan.dense, output_type))
        sparse.append(run("sparse", plan.sparse, output_type, return_records=turn == 0))
        without = run("no attention", plan.without, "latent")
        bare_steps.append(statistics.median(without.step_seconds))
    first, second = _side(dense, bare_steps), _side(sparse, bare_steps)
    return VideoComparison(
        dense=first,
        sparse=second,
        psnr=metrics.psnr(second.frames, first.frames),
        ssim=metrics.ssim(second.frames, first.frames),
        flip=metrics.flip(second.frames, first.frames),
        routes=RouteTable.from_records(_records(sparse[0])),
        is_trained_size=plan.dense.is_trained_size,
    )


def compare_videos(
    pipe: WanPipeline,
    prompt: str,
    policy: SparsityPolicy,
    *,
    implementation: str | None = None,
    repeats: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
    **arguments: Any,
) -> VideoComparison:
    """Makes a video with dense and with sparse attention from the same noise, in turn.

    `plan_comparison`, then `run_comparison`.

    Args:
        pipe: the pipeline.
        prompt: a prompt.
        policy: policy of the sparse video.
        implementation: implementation of both, as in `ct.attention`.
        repeats: rounds of both; times are medians over the rounds.
        seed: seed of the noise, and of the rows on which heads are routed.
        progress: called with a stage that names its video, "", the finished steps and all steps.
        **arguments: of the pipeline's call: `negative_prompt`, `num_inference_steps`, sizes and
            guidance scales.

    Raises:
        ImportError: the package of a metric is not installed.
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
        NotImplementedError: the implementation cannot run here.
        FloatingPointError: the latents stop being finite.

    Warns:
        UserWarning: as `WanPipeline.plan`.
    """
    plan = plan_comparison(
        pipe,
        prompt,
        policy,
        implementation=implementation,
        repeats=repeats,
        seed=seed,
        **arguments,
    )
    return run_comparison(pipe, plan, progress)


def _side(rounds: list[WanPipelineOutput], bare_steps: list[float]) -> Side:
    """What the rounds of one video took; `bare_steps` holds a step without attention per round."""
    steps = np.median([output.step_seconds for output in rounds], axis=0)
    taken = tuple(float(sum(output.step_seconds)) for output in rounds)
    return Side(
        frames=np.asarray(rounds[0].frames[0], np.float32),
        denoise_s=statistics.median(taken),
        step_seconds=tuple(map(float, steps)),
        rounds_s=taken,
        attention_share=share(taken, [bare * len(steps) for bare in bare_steps]),
    )


def _records(output: WanPipelineOutput) -> list[LayerRecord]:
    return [of_prompt for of_prompt, _ in output.records]
