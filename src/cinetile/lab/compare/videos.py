"""One prompt with dense and with sparse attention: times, and how far the videos are apart."""

import statistics
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from cinetile import _checks
from cinetile.lab import metrics
from cinetile.lab.compare.stand_in import add_up
from cinetile.layer.record import RoutingRecord
from cinetile.layer.route_table import RouteTable
from cinetile.models.wan import SelfAttention, WanPipeline
from cinetile.models.wan.pipeline import Progress
from cinetile.policy import SparsityPolicy

# Steps of the run without attention; every one takes the same time.
_STEPS_WITHOUT = 3


@dataclass(frozen=True)
class NoAttention:
    """Only adds up query, key and value: what is left of a step's time is not attention."""

    def __call__(self, query: Array, key: Array, value: Array, **call: Any) -> Any:
        """See `cinetile.models.wan.SelfAttention`; the record is None."""
        output = add_up(query, key, value)
        return (output, None) if call.get("return_record") else output


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two videos.

    Attributes:
        frames: `[frames, height, width, 3]` in [0, 1].
        denoise_s: wall time of all denoising steps, in seconds; the median over rounds.
        step_seconds: wall time of each step, likewise; no step holds a compilation.
        attention_share: the part of `denoise_s` that self-attention takes. Measured: what a step
            takes longer than one whose self-attention only adds up query, key and value.
    """

    frames: Float[np.ndarray, "frames height width 3"] = field(repr=False)
    denoise_s: float
    step_seconds: tuple[float, ...]
    attention_share: float


@dataclass(frozen=True, eq=False)
class VideoComparison:
    """A dense and a sparse video from the same noise.

    Attributes:
        dense: with dense self-attention.
        sparse: under the policy.
        psnr: of each sparse frame against the dense one, decibels.
        ssim: likewise; 1 where nothing differs.
        flip: likewise; 0 where nothing differs.
        routes: where every head went in each step and layer; for the prompt, not for the negative
            prompt.
    """

    dense: Side
    sparse: Side
    psnr: Float[np.ndarray, " frames"]
    ssim: Float[np.ndarray, " frames"]
    flip: Float[np.ndarray, " frames"]
    routes: RouteTable = field(repr=False)

    @property
    def speedup(self) -> float:
        """Denoising time, dense over sparse."""
        return self.dense.denoise_s / self.sparse.denoise_s


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

    Args:
        pipe: the pipeline.
        prompt: one prompt.
        policy: of the sparse video.
        implementation: as in `ct.attention`, for both.
        repeats: rounds of both, of which times are medians.
        seed: of the noise, and of the rows on which heads are routed.
        progress: called with a stage, which video it is about, the steps done and all steps.
        **arguments: of the pipeline's call: `negative_prompt`, `num_inference_steps`, sizes and
            guidance scales.

    Raises:
        ImportError: a metric's package is not installed.
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
        NotImplementedError: the implementation cannot run here.
    """
    metrics.require_metrics()
    repeats = _checks.integer("repeats", repeats, minimum=1)
    if not isinstance(prompt, str):
        raise TypeError(f"prompt must be one string, got {prompt!r}")
    plan = pipe.check_inputs(prompt, **arguments)
    attentions = {
        "dense": pipe.attentions(plan, None, implementation),
        "sparse": pipe.attentions(plan, policy, implementation),
    }
    embeds, negative = pipe.encode_prompt(
        prompt, arguments.pop("negative_prompt", None), plan.guided
    )
    arguments |= {"prompt_embeds": embeds, "negative_prompt_embeds": negative, "seed": seed}

    def run(side: str, both: tuple[SelfAttention, SelfAttention], **changes: Any) -> Any:
        def show(stage: str, current: str, done: int, total: int) -> None:
            del current
            if progress is not None and stage in ("denoising", "warm-up", "decoding"):
                progress(f"{side}: {stage}", "", done, total)

        return pipe(
            attention=both[0],
            attention_2=both[1],
            warm_up=True,
            progress=show,
            **(arguments | changes),
        )

    outputs: dict[str, list[Any]] = {"dense": [], "sparse": []}
    for turn in range(repeats):
        for side, both in attentions.items():
            outputs[side].append(
                run(
                    side,
                    both,
                    output_type="np" if turn == 0 else "latent",
                    return_records=side == "sparse" and turn == 0,
                )
            )
    without = run(
        "no attention",
        (NoAttention(), NoAttention()),
        output_type="latent",
        num_inference_steps=min(_STEPS_WITHOUT, len(plan.schedule.timesteps)),
    )
    bare_step = statistics.median(without.step_seconds)
    dense, sparse = (_side(outputs[side], bare_step) for side in ("dense", "sparse"))
    return VideoComparison(
        dense=dense,
        sparse=sparse,
        psnr=metrics.psnr(sparse.frames, dense.frames),
        ssim=metrics.ssim(sparse.frames, dense.frames),
        flip=metrics.flip(sparse.frames, dense.frames),
        routes=RouteTable.from_records(_records(outputs["sparse"][0])),
    )


def _side(rounds: list[Any], bare_step: float) -> Side:
    steps = np.median([one.step_seconds for one in rounds], axis=0)
    denoise = float(np.median([sum(one.step_seconds) for one in rounds]))
    return Side(
        frames=np.asarray(rounds[0].frames[0], np.float32),
        denoise_s=denoise,
        step_seconds=tuple(map(float, steps)),
        attention_share=1 - bare_step * len(steps) / denoise,
    )


def _records(output: Any) -> list[RoutingRecord]:
    return [of_prompt for of_prompt, _ in output.records]
