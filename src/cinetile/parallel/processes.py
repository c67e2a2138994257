"""Joining processes into one JAX program: one failing process ends the others."""

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
    """Joins this process with others by `jax.distributed` for the duration of a `with` block.

    Without arguments it uses the environment variables that `python -m cinetile.parallel.launch`
    sets, or what JAX detects on TPU slices and under Slurm. Enter it before JAX starts.

    An exception inside the block prints one line to stderr and ends the process at once with
    exit code 1, because JAX's own shutdown would wait for the other processes. JAX ends a
    process that waits for a dead one after `timeout_seconds`.

    Args:
        coordinator: "host:port" of process 0.
        num_processes: number of processes.
        process_id: index of this process, from 0.
        timeout_seconds: seconds without a heartbeat after which a process counts as dead.

    Raises:
        TypeError: a number is no integer.
        ValueError: a number is out of range, or JAX cannot detect the processes.
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
