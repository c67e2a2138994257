"""Turning errors into one line and an exit code."""

import contextlib
import errno
from collections.abc import Iterator

import click

INTERRUPTED = 130


class ErrorMappingGroup(click.Group):
    """A group whose commands end without a traceback unless --debug asks for one."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)
        except Exception as error:
            closed_pipe = isinstance(error, OSError) and error.errno == errno.EPIPE
            if closed_pipe or _debugging(ctx):
                raise
            raise click.ClickException(_describe(error)) from error


@contextlib.contextmanager
def argument_errors() -> Iterator[None]:
    """Reports the library's errors about arguments as usage errors (exit code 2)."""
    try:
        yield
    except (ValueError, TypeError, FileNotFoundError) as error:
        context = click.get_current_context()
        if _debugging(context):
            raise
        raise click.UsageError(_describe(error), ctx=context) from error


def _debugging(context: click.Context) -> bool:
    return bool(context.find_root().params.get("debug"))


def _describe(error: Exception) -> str:
    message = str(error).strip() or "no further message"
    expected = (
        ValueError,
        TypeError,
        OSError,
        ImportError,
        NotImplementedError,
        FloatingPointError,
    )
    if isinstance(error, expected):
        return message
    first_line = message.splitlines()[0]
    return f"{type(error).__name__}: {first_line} (cinetile --debug shows the traceback)"
