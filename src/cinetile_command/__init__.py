"""The installed command `cinetile`.

A package of its own, because importing any module of `cinetile` imports JAX first: an interrupt in
that time would end in a traceback.
"""

import os
import signal
import types

INTERRUPTED = 130


def run() -> None:
    """Runs the command line; an interrupt while it is imported ends the process with 130."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_now)
    from cinetile.cli import run as run_command

    if signal.getsignal(signal.SIGINT) is _end_now:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run_command()


def _end_now(number: int, frame: types.FrameType | None) -> None:
    """Ends without unwinding: libraries report exceptions in the middle of their import."""
    del number, frame
    os.write(2, b"Interrupted.\n")
    os._exit(INTERRUPTED)
