"""What was measured and where, as every measuring command tells it."""

from cinetile.cli.wording import counted, percent
from cinetile.lab.bench import Machine, Workload

Facts = list[tuple[str, str]]


def workload_facts(workload: Workload) -> Facts:
    """The attention call and its mask."""
    mask = workload.mask()
    batch = "" if workload.batch == 1 else f"batch {workload.batch}, "
    return [
        (
            "workload",
            f"{workload.grid}, {batch}{counted(workload.heads, 'head')} of "
            f"{workload.head_dim}, {workload.dtype}",
        ),
        (
            "mask",
            f"{workload.pattern_name}, width {mask.width:,}, sink of "
            f"{counted(workload.sink_frames, 'frame')}: "
            f"{percent(mask.density)} of the pairs",
        ),
    ]


def machine_facts(machine: Machine, *further_versions: str) -> Facts:
    """The machine and the libraries on it."""
    cores = "" if machine.cores is None else f"{counted(machine.cores, 'core')}, "
    features = ", ".join(machine.features) or "no extensions of note"
    versions = (
        f"Python {machine.python}",
        f"jax {machine.jax} on {machine.backend}",
        f"jaxlib {machine.jaxlib}",
        f"numpy {machine.numpy}",
        *further_versions,
    )
    return [
        (
            "machine",
            f"{machine.cpu}, {cores}{counted(machine.threads, 'thread')}, {features}; "
            f"{machine.system}",
        ),
        ("versions", ", ".join(versions)),
    ]


def kernel_name(implementation: str, path: str) -> str:
    """An implementation with its code path, where it has several."""
    return implementation if path == implementation else f"{implementation} ({path})"
