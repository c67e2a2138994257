"""Printing and writing the results of commands."""

import contextlib
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cinetile.cli.tables import Numbers
from cinetile.files import replace_file
from cinetile.lab import bench

# Files and pipes have no width; this is wide enough that no line is broken there.
_UNBOUNDED_WIDTH = 160


def report(
    document: dict[str, Any],
    json_target: str | Path | None,
    render: Callable[[Console], None],
) -> None:
    """Prints a result for people and writes it for programs.

    Args:
        document: the result as JSON.
        json_target: file to write `document` to; "-" prints only `document`, to stdout.
        render: prints the result for people.
    """
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if json_target == "-":
        click.echo(text, nl=False)
        return
    render(stdout_console())
    if json_target is not None:
        replace_file(json_target, lambda file: file.write(text.encode()))
        tell_written(json_target)


def stdout_console() -> Console:
    """Returns a console on the current stdout, without automatic highlighting.

    Tables are drawn in ASCII if the encoding is not Unicode. Characters of a prompt or a path
    that stdout cannot encode become question marks.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNBOUNDED_WIDTH
    return Console(highlight=False, width=width)


def tell_written(path: str | Path) -> None:
    """Reports on stderr that a file was written."""
    click.echo(f"wrote {path}", err=True)


@contextlib.contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """Prints each of the library's warnings on its own line, without file and line number."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: click.echo(f"warning: {message}", err=True)
        yield


def facts(pairs: Iterable[tuple[str, str]]) -> Table:
    """Returns a two-column table of names and descriptions."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, text in pairs:
        table.add_row(name, text)
    return table


def numbers(first_column: str, *columns: str, expendable: tuple[str, ...] = ()) -> Numbers:
    """Returns an empty table of names and right-aligned numbers."""
    return Numbers(first_column, *columns, expendable=expendable)


@contextlib.contextmanager
def progress_on_stderr() -> Iterator[bench.Progress]:
    """Shows progress bars on a terminal, and one short line per stage elsewhere.

    Bars are redrawn only when progress is reported: a thread that redraws them would disturb the
    measurements.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _stage_lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(stage: str, current: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage)
            description = f"{stage} {current}".strip()
            bars.update(tasks[stage], description=description, completed=done, total=total)
            bars.refresh()

        yield show


def _stage_lines() -> bench.Progress:
    last_stage = ""

    def show(stage: str, current: str, done: int, total: int) -> None:
        nonlocal last_stage
        del current, done, total
        if stage != last_stage:
            click.echo(f"{stage} ...", err=True)
            last_stage = stage

    return show
