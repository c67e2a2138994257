"""Joining processes into one jax program, so that the end of one is not the hanging of all."""

import contextlib
import os
import sys
from collections.abc import Iterator

import jax

from cinetile import _checks

COORDINATOR, PROCESSES, PROCESS = (
    f"CINETILE_{name}" for name in ("COORDINATOR", "PROCESSES", "PROCESS")
)
_FAILED = 1


@contextlib.contextmanager
def joined_processes(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_seconds: int = 20,
) -> Iterator[None]:
    """Joins this process with others by `jax.distributed`, for the time of a `with` block.

    Without arguments it takes what `python -m cinetile.parallel.launch` says, or else what jax
    finds out by itself on TPU slices, under Slurm and the like. Enter it before jax starts.

    An error within the block, as when another process has ended, is told in one line on stderr
    and ends the process at once with exit code 1: jax's own end would wait for the others.
    A process that waits for one that has gone is ended by jax after `timeout_seconds`.

    Args:
        coordinator: host and port of process 0.
        num_processes: how many there are.
        process_id: number of this one, from 0.
        timeout_seconds: for how long another process may be silent.

    Raises:
        TypeError: a number is no integer.
        ValueError: a number is out of range, or jax cannot tell the processes by itself.
    """
    timeout_seconds = _checks.integer("timeout_seconds", timeout_seconds, minimum=1)
    if coordinator is None and COORDINATOR in os.environ:
        coordinator = os.environ[COORDINATOR]
        num_processes, process_id = int(os.environ[PROCESSES]), int(os.environ[PROCESS])
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        heartbeat_timeout_seconds=timeout_seconds,
        shutdown_timeout_seconds=timeout_seconds,
    )
    try:
        yield
    except KeyboardInterrupt:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        message = (
            f"process {jax.process_index()} of {jax.process_count()} stops, as do the others: "
            f"{reason}"
        )
        print(message, file=sys.stderr, flush=True)
        os._exit(_FAILED)
    jax.distributed.shutdown()
