"""Starts several processes of one script on this machine: `python -m cinetile.parallel.launch`.

For testing on one machine a script that will run on several hosts, where a scheduler starts one
process per host. The script joins the processes with `cinetile.parallel.joined_processes()`.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from cinetile.parallel.processes import COORDINATOR, PROCESS, PROCESSES

_GRACE_SECONDS = 60.0
_POLL_SECONDS = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a script in several processes; returns 0 if all of them return 0."""
    parser = argparse.ArgumentParser(
        prog="python -m cinetile.parallel.launch",
        description="Starts several processes of one script on this machine.",
    )
    parser.add_argument("--processes", type=int, required=True, help="how many")
    parser.add_argument("script", help="Python file to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"--processes must be at least 1, got {options.processes}")
    if not os.path.isfile(options.script):
        parser.error(f"script must be a Python file, got {options.script!r}")
    return launch([options.script, *options.arguments], options.processes)


def launch(command: Sequence[str], processes: int) -> int:
    """Runs `python COMMAND...` in several processes with a coordinator on the loopback address.

    When one process fails, the others get a minute to end by themselves and are then killed.

    Returns:
        0 if all processes exit with 0, else 1.
    """
    coordinator = f"127.0.0.1:{_free_port()}"
    children = [
        subprocess.Popen(
            [sys.executable, *command],
            env=os.environ
            | {COORDINATOR: coordinator, PROCESSES: str(processes), PROCESS: str(process)},
        )
        for process in range(processes)
    ]
    try:
        return _wait(children)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def _wait(children: list[subprocess.Popen[bytes]]) -> int:
    deadline: float | None = None
    reported: set[int] = set()
    while True:
        codes = [child.poll() for child in children]
        for process, code in enumerate(codes):
            if code and process not in reported:
                reported.add(process)
                reason = f"signal {-code}" if code < 0 else f"exit code {code}"
                _report(f"process {process} of {len(children)} ended with {reason}")
        if all(code is not None for code in codes):
            return int(any(codes))
        if reported and deadline is None:
            deadline = time.monotonic() + _GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            _report("ending the processes that are left")
            return 1
        time.sleep(_POLL_SECONDS)


def _report(message: str) -> None:
    print(f"launch: {message}", file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that launch() kills its processes
    sys.exit(main())
