"""`cinetile tune`: the tile sizes that run fastest here."""

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from cinetile.cli.circumstances import kernel_name, machine_facts, workload_facts
from cinetile.cli.errors import argument_errors
from cinetile.cli.options import (
    OutputType,
    SizeListType,
    json_option,
    make_workload,
    refuse_rounding_without,
    shape_options,
    stacked,
)
from cinetile.cli.output import facts, numbers, progress_on_stderr, report, tell_written
from cinetile.cli.threads import restrict_threads
from cinetile.cli.wording import counted, milliseconds
from cinetile.files import read_object, reading, replace_file
from cinetile.lab.bench import TuneConfig, TuneResult, tune_blocks
from cinetile.plans import MODES

_EXAMPLES = """\b
Examples:
  cinetile tune --grid 21x30x40 --heads 2
  cinetile tune --block-q 128,256,512 --block-kv 128,256 --mode aligned --json -
  cinetile tune --dtype float32 --save tuned_blocks.json
"""

_search_options = stacked(
    click.option(
        "--block-q",
        metavar="A,B",
        type=SizeListType(),
        default=(128, 256, 512),
        help="Tile sizes to try, in queries.  [default: 128,256,512]",
    ),
    click.option(
        "--block-kv",
        metavar="A,B",
        type=SizeListType(),
        default=(128, 256, 512),
        help="Tile sizes to try, in keys.  [default: 128,256,512]",
    ),
    click.option("--heads", type=int, default=1, show_default=True, help="Attention heads."),
    click.option("--head-dim", type=int, default=128, show_default=True, help="Head size."),
    click.option(
        "--mode",
        type=click.Choice(MODES),
        default="split",
        show_default=True,
        help="Mode of the plans.",
    ),
    click.option(
        "--repeats", type=int, default=5, show_default=True, help="Rounds after the warm-up."
    ),
    click.option("--threads", type=int, help="Processors to use.  [default: all usable ones]"),
)


@click.command("tune", epilog=_EXAMPLES, short_help="Search the tile sizes that run fastest here.")
@shape_options
@_search_options
@click.option(
    "--save",
    metavar="JSON",
    type=OutputType(".json"),
    help="Add the best sizes to a table such as the library's own tuned_blocks.json.",
)
@json_option
def tune_command(
    *,
    mode: str,
    block_q: tuple[int, ...],
    block_kv: tuple[int, ...],
    implementation: str | None,
    repeats: int,
    threads: int | None,
    save: Path | None,
    json_target: str | Path | None,
    **shape: Any,
) -> None:
    """Search block_q and block_kv together for the sizes that run fastest on this machine.

    Every pair runs once per round, so a change in the machine's speed affects all pairs alike.
    """
    refuse_rounding_without((mode,))
    with argument_errors():
        workload = make_workload(**shape)
        config = TuneConfig(workload, mode, block_q, block_kv, implementation, repeats)
        table = {} if save is None or not save.exists() else _read_table(save)
        if threads is not None:
            restrict_threads(threads)
    with progress_on_stderr() as progress:
        result = tune_blocks(config, progress)
    report(result.to_dict(), json_target, lambda console: _print(console, result))
    if save is not None:
        text = json.dumps(result.merge_into(table), indent=2, sort_keys=True) + "\n"
        replace_file(save, lambda file: file.write(text.encode()))
        tell_written(save)


def _read_table(path: Path) -> dict[str, Any]:
    expected = "a table of tile sizes, as --save writes"
    table = read_object(path, expected)
    with reading(path, expected):
        if not isinstance(table.get("blocks", {}), dict):
            raise ValueError("blocks must be an object")
        return table


def _print(console: Console, result: TuneResult) -> None:
    console.print(
        facts(
            [
                *workload_facts(result.workload),
                ("plans", result.mode),
                ("kernel", kernel_name(result.implementation, result.path)),
                *machine_facts(result.machine),
                ("method", f"median of {counted(result.repeats, 'interleaved round')}"),
            ]
        )
    )
    table = numbers("tiles", "time", "min to max", "against the best", "visited", "masked")
    for row in result.rows:
        table.add_row(
            f"{row.block_q} x {row.block_kv}",
            milliseconds(row.ms_median),
            f"{milliseconds(row.ms_min)} to {milliseconds(row.ms_max)}",
            "" if row is result.best else result.against_best(row).words(),
            f"{row.tiles_visited:,}",
            f"{row.tiles_masked:,}",
        )
    console.print(table)
    options = f"--block-q {result.best.block_q} --block-kv {result.best.block_kv}"
    console.print(f"Fastest here by the median: {options}.")
    equal = [row for row in result.rows[1:] if result.against_best(row).value is None]
    if equal:
        names = ", ".join(f"{row.block_q} x {row.block_kv}" for row in equal)
        reason = result.against_best(equal[0]).reason
        console.print(f"Not measurably slower ({reason}): {names}.")
