"""`cinetile generate`: from a prompt to a video file."""

import dataclasses
import math
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

import cinetile
from cinetile.cli.errors import argument_errors
from cinetile.cli.options import (
    MeshType,
    OutputType,
    implementation_option,
    json_option,
    policy_option,
    read_policy,
)
from cinetile.cli.output import (
    facts,
    progress_on_stderr,
    report,
    tell_written,
    warnings_on_stderr,
)
from cinetile.cli.threads import restrict_threads
from cinetile.cli.wan_options import (
    model_options,
    open_pipeline,
    plan_in_words,
    prompt_options,
    refuse_unused_negative_prompt,
    size_document,
    size_facts,
)
from cinetile.cli.wording import percent, seconds
from cinetile.lab.bench.machine import describe_machine
from cinetile.policy import SparsityPolicy

if TYPE_CHECKING:
    from cinetile.models.wan import CallPlan, WanPipelineOutput

_EXAMPLES = """\b
Examples:
  cinetile generate "a red ball rolls to the right" --out ball.mp4
  cinetile generate "a cat" --model Wan2.1-T2V-1.3B-Diffusers --dtype bfloat16 --out cat.mp4
  cinetile generate "a cat" --model Wan2.1-T2V-1.3B-Diffusers --mesh data=2,heads=4 --out cat.mp4
"""


@click.command("generate", epilog=_EXAMPLES, short_help="Make a video from a prompt.")
@click.argument("prompt")
@click.option(
    "--out", metavar="MP4", type=OutputType(".mp4"), required=True, help="Video file to write."
)
@model_options
@prompt_options
@click.option("--fps", type=int, help="Frames per second.  [default: the model's]")
@policy_option("nowhere")
@implementation_option
@click.option(
    "--mesh",
    metavar="AXIS=N,...",
    type=MeshType(),
    help="Devices along the axes data (videos and guidance pairs), sequence (tokens) and heads, "
    "as in data=2,heads=4; on CPUs, the devices are virtual.  [default: one device]",
)
@click.option("--threads", type=int, help="Processors to use.  [default: all usable ones]")
@json_option
def generate_command(
    *,
    prompt: str,
    out: Path,
    model: Path | None,
    dtype: str | None,
    flow_shift: float | None,
    negative_prompt: str | None,
    steps: int | None,
    seed: int,
    fps: int | None,
    policy: str | None,
    implementation: str | None,
    mesh: dict[str, int] | None,
    threads: int | None,
    json_target: str | Path | None,
    **sizes: Any,
) -> None:
    """Make a video from PROMPT with Wan, text to video.

    All arguments are checked before any weight is read. Ctrl-C stops without leaving a file.
    """
    from cinetile import _checks
    from cinetile.models.video import require_av, write_video

    require_av("writing a video")
    with warnings_on_stderr(), argument_errors():
        if threads is not None:
            restrict_threads(threads)
        _checks.integer("seed", seed, minimum=0)
        pipe = open_pipeline(model, dtype, flow_shift, _make_mesh(mesh))
        fps = _checks.integer("fps", pipe.defaults.fps if fps is None else fps, minimum=1)
        sparse = None if policy is None else read_policy(policy)
        plan = pipe.plan(
            prompt,
            negative_prompt,
            num_inference_steps=steps,
            seed=seed,
            policy=sparse,
            implementation=implementation,
            **sizes,
        )
    refuse_unused_negative_prompt(plan)
    started = time.perf_counter()
    click.echo(plan_in_words(plan), err=True)
    with progress_on_stderr() as progress:
        output = pipe.run(plan, return_records=sparse is not None, progress=progress)
    elapsed = time.perf_counter() - started
    write_video(out, np.asarray(output.frames[0]), fps=fps)
    document = {
        "out": str(out),
        "model": None if model is None else str(model),
        "dtype": pipe.dtype,
        "prompt": prompt,
        "negative_prompt": negative_prompt,
        "seed": seed,
        "mesh": mesh,
    } | _to_document(plan, sparse, output, elapsed)
    report(document, json_target, lambda console: _print(console, document))
    tell_written(out)


def _to_document(
    plan: "CallPlan", policy: SparsityPolicy | None, output: "WanPipelineOutput", elapsed: float
) -> dict[str, Any]:
    """Returns the settings and times of the run as JSON."""
    return {
        "cinetile": cinetile.__version__,
        "machine": dataclasses.asdict(describe_machine()),
        "size": size_document(plan),
        "is_trained_size": plan.is_trained_size,
        "steps": len(output.step_seconds),
        "guidance_scales": list(plan.guidance_scales),
        "policy": None if policy is None else policy.to_dict(),
        "head_calls": None if policy is None else _count_routes(output.records),
        "seconds": dict(output.seconds) | {"all": elapsed},
        "step_seconds": list(output.step_seconds),
    }


def _count_routes(records: Any) -> dict[str, int]:
    """Counts how often a head was dense or took each pattern, over all steps and layers."""
    counts: Counter[str] = Counter()
    for record in (part for pair in records for part in pair if part is not None):
        routes = np.asarray(record.routes)
        for index, choice in enumerate(record.choices):
            counts[choice.pattern] += int(np.count_nonzero(routes == index))
    return dict(counts)


def _make_mesh(axes: dict[str, int] | None) -> Mesh | None:
    """Makes the mesh of --mesh; must be called before JAX starts."""
    from cinetile.parallel import make_mesh, request_cpu_devices

    if axes is None:
        return None
    request_cpu_devices(math.prod(axes.values()))
    return make_mesh(axes)


def _print(console: Console, document: dict[str, Any]) -> None:
    size, times = document["size"], document["seconds"]
    steps, calls = document["step_seconds"], document["head_calls"]
    attention = "dense"
    if calls is not None:
        shares = (f"{percent(n / sum(calls.values()))} {name}" for name, n in calls.items())
        attention = f"sparse; heads' calls: {', '.join(shares)}"
    console.print(
        facts(
            [
                *size_facts(size),
                ("attention", attention),
                ("steps", f"{len(steps)}, the last one took {seconds(steps[-1])}"),
                ("prompt", seconds(times["prompt"])),
                ("denoising", seconds(times["denoising"])),
                ("decoding", seconds(times["decoding"])),
                ("total", seconds(times["all"])),
            ]
        )
    )
