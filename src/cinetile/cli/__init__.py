"""The command line: `cinetile`."""

import os
import sys

import click

from cinetile.cli.compare import compare_command
from cinetile.cli.errors import INTERRUPTED, ErrorMappingGroup
from cinetile.cli.generate import generate_command
from cinetile.cli.implementations import implementations_command
from cinetile.cli.ladder import ladder_command
from cinetile.cli.plan import plan_command
from cinetile.cli.route import route_command
from cinetile.cli.tpu import tpu_command
from cinetile.cli.tune import tune_command

# Each command is one module of this package and is listed here.
_COMMANDS: tuple[click.Command, ...] = (
    ladder_command,
    plan_command,
    route_command,
    tune_command,
    tpu_command,
    generate_command,
    compare_command,
    implementations_command,
)

_EXAMPLES = """\b
Examples:
  cinetile ladder --clip sample --picture ladder.png
  cinetile plan --grid 21x45x80 --mode aligned
  cinetile generate "a red ball rolls to the right" --out ball.mp4
"""


@click.group(
    cls=ErrorMappingGroup,
    epilog=_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="cinetile", prog_name="cinetile")
@click.option(
    "--debug",
    is_flag=True,
    envvar="CINETILE_DEBUG",
    help="Show tracebacks of errors (also CINETILE_DEBUG=1).",
)
def main(debug: bool) -> None:
    """Sparse attention for video diffusion in JAX.

    Exits with 0 when done, 2 for bad arguments and 1 when something failed.
    """
    del debug  # read from the context, where errors are turned into messages


for _command in _COMMANDS:
    main.add_command(_command)


def run() -> None:
    """Runs the installed command; an interrupt ends the process without waiting for threads."""
    try:
        main()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)  # normal interpreter shutdown crashes while XLA compiles
        raise


__all__ = ["main", "run"]
