"""Making a mesh of the devices that there are."""

import math
import os
from collections.abc import Mapping

import jax
from jax.sharding import AxisType, Mesh

from cinetile import _checks

_FLAG = "--xla_force_host_platform_device_count"


def make_mesh(axes: Mapping[str, int]) -> Mesh:
    """A mesh over all processes' devices, the nearest ones along its last axes.

    Args:
        axes: devices along each axis, by its name; by custom "data", "sequence" and "heads".

    Raises:
        TypeError: a number of devices is no integer.
        ValueError: there are no axes, a number is below 1, or there are fewer devices, or more
            but of other processes.
    """
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
    """
    told = _FLAG in os.environ.get("XLA_FLAGS", "") or jax.config.jax_num_cpu_devices >= 0  # pyright: ignore[reportAttributeAccessIssue]
    if told:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # it has started
        return
