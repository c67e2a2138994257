"""Making a mesh of the devices that there are."""

import math
import os
from collections.abc import Mapping

import jax
from jax.sharding import AxisType, Mesh

from cinetile import _checks

_MOST_VIRTUAL = 8  # on fewer processors they are for trying things out
_FLAG = "--xla_force_host_platform_device_count"


def make_mesh(axes: Mapping[str, int]) -> Mesh:
    """A mesh over all processes' devices, the nearest ones along its last axes.

    Args:
        axes: devices along each axis, by its name; by custom "data", "sequence" and "heads".

    Raises:
        TypeError: `axes` is no mapping, or a number of devices is no integer.
        ValueError: there are no axes, a number is below 1, or there are fewer devices, or more
            but of other processes.
    """
    if not isinstance(axes, Mapping):
        raise TypeError(f"axes must be a mapping of names to sizes, got {type(axes).__name__}")
    if not axes:
        raise ValueError("axes must name at least one axis, got none")
    sizes = tuple(_checks.integer(name, size, minimum=1) for name, size in axes.items())
    needed, devices = math.prod(sizes), jax.devices()
    product = " x ".join(f"{size} {name}" for name, size in axes.items())
    if needed > len(devices) or (jax.process_count() > 1 and needed != len(devices)):
        kind = devices[0].platform
        raise ValueError(
            f"a mesh of {product} needs {needed} devices, jax has {len(devices)} ({kind})"
        )
    automatic = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, tuple(axes), automatic, devices=devices[:needed])


def request_cpu_devices(count: int) -> None:
    """Makes so many devices of this machine's processors, where jax runs on these.

    Does nothing after jax has started, or where XLA_FLAGS or jax's settings tell a number.

    Raises:
        TypeError: `count` is no integer.
        ValueError: it is below 1, or beyond what the processors could run: 8, or as many as
            there are.
    """
    count = _checks.integer("count", count, minimum=1)
    told = _FLAG in os.environ.get("XLA_FLAGS", "") or jax.config.jax_num_cpu_devices >= 0  # pyright: ignore[reportAttributeAccessIssue]
    if told:
        return
    processors = os.cpu_count() or 1
    most = max(_MOST_VIRTUAL, processors)
    if count > most:
        raise ValueError(
            f"count must be at most {most} on this machine's {processors} processors, got {count}"
        )
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # it has started
        return
