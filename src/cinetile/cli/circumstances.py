"""Describes the workload and the machine of a measurement; all measuring commands use it."""

from cinetile.cli.wording import counted, percent
from cinetile.lab.bench import Machine, Workload

Facts = list[tuple[str, str]]


def workload_facts(workload: Workload) -> Facts:
    """Describes the attention call and its mask."""
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
    """Describes the machine and its library versions."""
    cores = "" if machine.cores is None else f"{counted(machine.cores, 'core')}, "
    features = ", ".join(machine.features) or "no relevant extensions"
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
    """The implementation's name, followed by its code path if it has several."""
    return implementation if path == implementation else f"{implementation} ({path})"
