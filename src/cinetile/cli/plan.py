"""`cinetile plan`: what a tile plan visits and masks, without running attention."""

import dataclasses
from pathlib import Path
from typing import Any

import click
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel

import cinetile
from cinetile.cli.errors import argument_errors
from cinetile.cli.options import (
    OutputType,
    json_option,
    make_workload,
    refuse_rounding_without,
    workload_options,
)
from cinetile.cli.output import facts, numbers, report, tell_written
from cinetile.cli.wording import counted, percent
from cinetile.lab import pictures
from cinetile.lab.bench import Workload
from cinetile.lab.canvas import require_matplotlib
from cinetile.plans import MODES, TilePlan
from cinetile.plans.picture import text_picture

# Drawn if no mode is given: the exact plan beside the rounded plan.
_MODES_TO_COMPARE = ("split", "aligned")
_COLUMNS_OF_ONE, _COLUMNS_OF_TWO = 64, 34
_BORDERS = 2

_EXAMPLES = """\b
Examples:
  cinetile plan --video 81x720x1280 --block-q 3328 --block-kv 1536
  cinetile plan --grid 21x30x52 --pattern temporal --picture plan.png
  cinetile plan --mode aligned --save plan.npz --json -
"""


@click.command("plan", epilog=_EXAMPLES, short_help="Show what a tile plan visits and masks.")
@workload_options
@click.option("--mode", type=click.Choice(MODES), help="Plan only this mode.  [default: all modes]")
@click.option(
    "--picture",
    metavar="PNG",
    type=OutputType(".png"),
    help="Draw the tile maps (needs the extra `plot`).",
)
@click.option(
    "--save",
    metavar="FILE",
    type=OutputType(".json", ".npz"),
    help="Save the plan of --mode; `TilePlan.load` reads it.",
)
@json_option
def plan_command(
    *,
    mode: str | None,
    picture: Path | None,
    save: Path | None,
    json_target: str | Path | None,
    implementation: str | None,
    **shape: Any,
) -> None:
    """Show what a tile plan visits and masks, without running attention."""
    if save is not None and mode is None:
        raise click.UsageError("--save needs --mode, which selects the plan to save")
    refuse_rounding_without(MODES if mode is None else (mode,))
    with argument_errors():
        workload = make_workload(**shape).with_blocks(implementation)
        plans = {name: workload.plan(name) for name in (MODES if mode is None else (mode,))}
    if picture is not None:
        require_matplotlib()

    document = {
        "cinetile": cinetile.__version__,
        "workload": _describe(workload),
        "plans": [
            {"mode": name, "rounding": tile_plan.rounding, **dataclasses.asdict(tile_plan.stats)}
            for name, tile_plan in plans.items()
        ],
    }
    report(document, json_target, lambda console: _print(console, workload, plans))
    if save is not None and mode is not None:
        plans[mode].save(save)
        tell_written(save)
    if picture is not None:
        pictures.plan_picture(tuple(plans.values()), picture)
        tell_written(picture)


def _describe(workload: Workload) -> dict[str, Any]:
    about_arrays = ("batch", "heads", "head_dim")
    facts_of_it = workload.to_dict()
    return {name: fact for name, fact in facts_of_it.items() if name not in about_arrays}


def _print(console: Console, workload: Workload, plans: dict[str, TilePlan]) -> None:
    mask = workload.mask()
    console.print(
        facts(
            [
                ("tokens", str(workload.grid)),
                (
                    "mask",
                    f"{workload.pattern_name}, width {mask.width:,}, sink of "
                    f"{counted(workload.sink_frames, 'frame')}: "
                    f"{percent(mask.density)} of the pairs",
                ),
                ("tiles", f"{workload.block_q} queries x {workload.block_kv} keys"),
            ]
        )
    )
    table = numbers(
        "",
        "tiles visited",
        "tiles masked",
        "of visited",
        "pairs kept",
        "pairs added",
        "pairs dropped",
    )
    for mode, tile_plan in plans.items():
        stats = tile_plan.stats
        table.add_row(
            mode if tile_plan.rounding is None else f"{mode} ({tile_plan.rounding})",
            f"{stats.tiles_visited:,} of {stats.tiles_total:,}",
            f"{stats.tiles_masked:,}",
            percent(stats.masked_fraction),
            percent(stats.kept_fraction),
            f"{stats.pairs_added:,}",
            f"{stats.pairs_dropped:,}",
        )
    console.print(table)
    modes = tuple(plans) if len(plans) == 1 else _MODES_TO_COMPARE
    columns = _COLUMNS_OF_ONE if len(modes) == 1 else _COLUMNS_OF_TWO
    columns = max(1, min(columns, console.width - _BORDERS))
    panels, legend = [], ""
    for mode in modes:
        drawn = text_picture(plans[mode].tile_map(), max_columns=columns)
        tiles, legend = drawn.rsplit("\n", 1)
        panels.append(Panel(tiles, title=mode, expand=False, padding=0))
    console.print(Columns(panels))
    console.print(legend, style="dim")
