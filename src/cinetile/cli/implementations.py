"""`cinetile implementations`: lists the kernels and which of them can run here."""

from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

import cinetile
from cinetile.cli.options import json_option
from cinetile.cli.output import numbers, report


@click.command("implementations", short_help="List the kernels and which can run here.")
@json_option
def implementations_command(json_target: str | Path | None) -> None:
    """List the kernels, what each needs, and why some cannot run here."""
    statuses = cinetile.implementations()
    document = {
        "cinetile": cinetile.__version__,
        "implementations": [asdict(status) for status in statuses],
    }

    def render(console: Console) -> None:
        table = numbers("name")
        for column in ("runs here", "chosen by default", "needs"):
            table.add_text_column(column)
        for status in statuses:
            path = "" if status.path == status.name else f", its path {status.path}"
            runs = f"yes{path}" if status.available else f"no: {status.reason}"
            automatic = "if it is the first that can run" if status.automatic else "never"
            table.add_row(status.name, runs, automatic, status.requirements)
        console.print(table)

    report(document, json_target, render)
