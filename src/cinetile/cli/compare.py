"""`cinetile compare`: dense against sparse, speed and quality."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.console import Console

import cinetile
from cinetile.cli.compare_shapes import compare_shapes, shape_only_options
from cinetile.cli.errors import argument_errors
from cinetile.cli.options import (
    OutputType,
    implementation_option,
    json_option,
    policy_option,
    read_policy,
    refuse_without_effect,
)
from cinetile.cli.output import (
    facts,
    numbers,
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
from cinetile.cli.wording import counted, percent, percent_or_dash, seconds
from cinetile.lab import pictures
from cinetile.lab.bench.machine import describe_machine
from cinetile.lab.canvas import require_matplotlib
from cinetile.layer.route_table import RouteTable
from cinetile.policy import SparsityPolicy

if TYPE_CHECKING:
    from cinetile.lab.compare.videos import ComparisonPlan, Side, VideoComparison

DEFAULT_POLICY = "moderate"

_EXAMPLES = """\b
Examples:
  cinetile compare "a red ball rolls to the right" --out compare.mp4 --picture compare.png
  cinetile compare --shape-only --resolutions 480p,720p --policy aggressive
  cinetile compare "a cat" --model Wan2.1-T2V-1.3B-Diffusers --policy aggressive --out cat.mp4
"""


@click.command("compare", epilog=_EXAMPLES, short_help="Dense against sparse: speed and quality.")
@click.argument("prompt", required=False)
@click.option(
    "--shape-only",
    is_flag=True,
    help="Time one block with random weights at standard sizes instead; takes no PROMPT.",
)
@shape_only_options
@click.option(
    "--out",
    metavar="MP4",
    type=OutputType(".mp4"),
    help="Video to write: dense, sparse and their difference side by side.",
)
@click.option(
    "--picture",
    metavar="PNG",
    type=OutputType(".png"),
    help="Draw frames, their difference and quality (needs the extra `plot`).",
)
@click.option(
    "--routes",
    metavar="PNG|CSV",
    type=OutputType(".png", ".csv"),
    help="Write the pattern of every head: a picture (extra `plot`) or one CSV line per head.",
)
@model_options
@prompt_options
@policy_option(DEFAULT_POLICY)
@implementation_option
@click.option(
    "--repeats",
    type=int,
    help="Rounds to measure; times are medians over rounds.  "
    "[default: 1; with --shape-only: 5, or 3 for long sequences]",
)
@click.option("--threads", type=int, help="Processors to use.  [default: all usable ones]")
@json_option
def compare_command(
    *,
    prompt: str | None,
    shape_only: bool,
    resolutions: tuple[str, ...],
    heads: int,
    full_width: str,
    out: Path | None,
    picture: Path | None,
    routes: Path | None,
    model: Path | None,
    dtype: str | None,
    flow_shift: float | None,
    negative_prompt: str | None,
    steps: int | None,
    seed: int,
    policy: str | None,
    implementation: str | None,
    repeats: int | None,
    threads: int | None,
    json_target: str | Path | None,
    **sizes: Any,
) -> None:
    """Make a video from PROMPT with dense and with sparse attention, from the same noise.

    Prints times, attention's share of them, and how far each sparse frame is from the dense one.
    With --shape-only, times one transformer block at the token counts of 480p to 1440p and
    estimates the speed-up of a whole run.
    \f

    Long because its arguments are the options of the command.
    """  # noqa: D301
    if shape_only:
        _refuse_options_of_videos()
        compare_shapes(
            _read_policy(policy),
            resolutions=resolutions,
            heads=heads,
            full_width=full_width,
            repeats=repeats,
            implementation=implementation,
            threads=threads,
            json_target=json_target,
        )
        return
    refuse_without_effect(
        ("resolutions", "heads", "full_width"), "has an effect only with --shape-only"
    )
    if prompt is None:
        raise click.UsageError("PROMPT is missing; it may be omitted only with --shape-only")
    _require_extras(out, picture, routes)
    sparse = _read_policy(policy)
    from cinetile import _checks
    from cinetile.lab.compare.videos import plan_comparison, run_comparison

    with warnings_on_stderr(), argument_errors():
        if threads is not None:
            restrict_threads(threads)
        _checks.integer("seed", seed, minimum=0)
        pipe = open_pipeline(model, dtype, flow_shift)
        plan = plan_comparison(
            pipe,
            prompt,
            sparse,
            implementation=implementation,
            repeats=1 if repeats is None else repeats,
            seed=seed,
            negative_prompt=negative_prompt,
            num_inference_steps=steps,
            **sizes,
        )
    refuse_unused_negative_prompt(plan.dense)
    click.echo(plan_in_words(plan.dense), err=True)
    with progress_on_stderr() as progress:
        result = run_comparison(pipe, plan, progress)
    subtitle = _in_a_line(result, plan, sparse)
    written = _write_files(result, (prompt, subtitle), pipe.defaults.fps, out, picture, routes)
    document = {
        "cinetile": cinetile.__version__,
        "machine": dataclasses.asdict(describe_machine()),
        "model": None if model is None else str(model),
        "dtype": pipe.dtype,
        "prompt": prompt,
        "size": size_document(plan.dense),
        "seed": seed,
        "repeats": plan.repeats,
        "policy": sparse.to_dict(),
    } | to_document(result)
    report(document, json_target, lambda console: _print(console, result, document))
    for path in written:
        tell_written(path)


def _in_a_line(result: "VideoComparison", plan: "ComparisonPlan", policy: SparsityPolicy) -> str:
    """Size, policy and times, for the picture."""
    return (
        f"{plan.dense.size.grid}, "
        f"{counted(len(plan.dense.schedule.timesteps), 'step')}; density {policy.density}, "
        f"mode {policy.mode}; denoising: dense {seconds(result.dense.denoise_s)}, "
        f"sparse {seconds(result.sparse.denoise_s)} "
        f"({counted(plan.repeats, 'interleaved round')})"
    )


def _require_extras(out: Path | None, picture: Path | None, routes: Path | None) -> None:
    """Raises ImportError if a package that the comparison or its files need is missing."""
    from cinetile.lab import metrics
    from cinetile.models.video import require_av

    metrics.require_metrics()
    if out is not None:
        require_av("writing a video")
    if picture is not None or _is_picture(routes):
        require_matplotlib()


def _is_picture(path: Path | None) -> bool:
    return path is not None and path.suffix.lower() == ".png"


def _write_files(
    result: "VideoComparison",
    headings: tuple[str, str],
    fps: int,
    out: Path | None,
    picture: Path | None,
    routes: Path | None,
) -> list[Path]:
    """Writes the requested files and returns their paths."""
    from cinetile.lab.compare.pictures import (
        comparison_picture,
        played_again,
        side_by_side,
    )
    from cinetile.models.video import write_video

    if out is not None:
        abreast = side_by_side(result.dense.frames, result.sparse.frames)
        write_video(out, played_again(abreast, fps), fps=fps)
    if picture is not None:
        comparison_picture(result, picture, title=headings[0], subtitle=headings[1])
    if routes is not None:
        write = pictures.route_picture if _is_picture(routes) else RouteTable.to_csv
        write(result.routes, routes)
    return [path for path in (out, picture, routes) if path is not None]


def _refuse_options_of_videos() -> None:
    with_effect = ("shape_only", "resolutions", "heads", "full_width", "policy", "implementation")
    with_effect += ("repeats", "threads", "json_target")
    every = {parameter.name for parameter in click.get_current_context().command.params}
    refuse_without_effect(
        every.difference(with_effect), "has no effect with --shape-only: no video is made"
    )


def _read_policy(value: str | None) -> SparsityPolicy:
    with warnings_on_stderr(), argument_errors():
        return read_policy(DEFAULT_POLICY if value is None else value)


def to_document(result: "VideoComparison") -> dict[str, Any]:
    """Returns the measurements as a JSON document."""
    document: dict[str, Any] = {
        "dense": _side(result.dense),
        "sparse": _side(result.sparse),
        **result.speedup.to_dict("speedup"),
        "is_trained_size": result.is_trained_size,
    }
    for name, worst in (("psnr", np.min), ("ssim", np.min), ("flip", np.max)):
        values = getattr(result, name)
        document[f"{name}_mean"] = float(values.mean())
        document[f"{name}_{'max' if worst is np.max else 'min'}"] = float(worst(values))
        document[name] = values.tolist()
    calls = [entry["pattern"] for entry in result.routes.entries]
    document["routes"] = {name: calls.count(name) for name in ("dense", *result.routes.patterns)}
    return document


def _side(side: "Side") -> dict[str, Any]:
    return {
        "denoise_s": side.denoise_s,
        "rounds_s": list(side.rounds_s),
        **side.attention_share.to_dict("attention_share"),
        "step_seconds": list(side.step_seconds),
    }


def _print(console: Console, result: "VideoComparison", document: dict[str, Any]) -> None:
    size, routes = document["size"], document["routes"]
    calls = ", ".join(f"{percent(n / sum(routes.values()))} {name}" for name, n in routes.items())
    console.print(
        facts(
            [
                *size_facts(size),
                ("heads' calls", calls),
            ]
        )
    )
    times = numbers("attention", "denoising", "its share", "step, median", "speed-up")
    for name in ("dense", "sparse"):
        side = document[name]
        times.add_row(
            name,
            seconds(side["denoise_s"]),
            percent_or_dash(side["attention_share"]),
            seconds(float(np.median(side["step_seconds"]))),
            "" if name == "dense" else result.speedup.words(),
        )
    console.print(times)
    if result.speedup.reason is not None:
        console.print(f"No speed-up is stated: {result.speedup.reason}. More rounds: --repeats.")
    quality = numbers("sparse against dense", "mean", "worst frame")
    quality.add_row("PSNR", f"{document['psnr_mean']:.2f} dB", f"{document['psnr_min']:.2f} dB")
    quality.add_row("SSIM", f"{document['ssim_mean']:.4f}", f"{document['ssim_min']:.4f}")
    quality.add_row(
        "FLIP (0 is equal)", f"{document['flip_mean']:.4f}", f"{document['flip_max']:.4f}"
    )
    console.print(quality)
    if not document["is_trained_size"]:
        console.print(
            "The checkpoint was not trained at this size: expect noise in both videos. PSNR, SSIM "
            "and FLIP say little about quality."
        )
