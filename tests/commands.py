"""Commands in processes of their own."""

import sys

_HEED_INTERRUPTS = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def heeding_interrupts(*command: str) -> list[str]:
    """The command that runs `command` so that it heeds interrupts.

    A shell that started the tests in its background has the signal ignored, and all that it
    starts inherits that.
    """
    return [sys.executable, "-c", _HEED_INTERRUPTS, *command]
