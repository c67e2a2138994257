"""Limiting the processors that a command may use."""

import os

from cinetile.lab.bench.machine import usable_threads


def restrict_threads(count: int) -> None:
    """Restricts this process, and every thread that it starts from now on, to some processors.

    JAX and PyTorch size their thread pools when they first compute, so call this before they do.
    Threads that already run keep their processors.

    Args:
        count: number of processors to keep.

    Raises:
        ValueError: `count` is below 1 or above the number of usable processors.
        NotImplementedError: the system cannot restrict processes.
    """
    available = usable_threads()
    if not 1 <= count <= available:
        raise ValueError(f"threads must lie between 1 and the {available} usable here, got {count}")
    if count == available:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise NotImplementedError("threads cannot be restricted on this system, only on Linux")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
