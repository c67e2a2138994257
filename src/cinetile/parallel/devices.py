"""Device meshes, and virtual devices on a CPU."""

import math
import os
from collections.abc import Mapping

import jax
from jax.sharding import AxisType, Mesh

from cinetile import _checks

_MOST_VIRTUAL = 8  # more virtual devices than processors are only for trying things out
_FLAG = "--xla_force_host_platform_device_count"


def make_mesh(axes: Mapping[str, int]) -> Mesh:
    """Makes a mesh over the devices of all processes; neighbours lie along the last axes.

    Args:
        axes: number of devices by axis name; the default names are "data", "sequence", "heads".

    Raises:
        TypeError: `axes` is no mapping, or a number of devices is no integer.
        ValueError: `axes` is empty, a number is below 1, there are fewer devices than asked for,
            or with several processes the mesh does not use all devices.
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
    """Asks JAX for `count` virtual CPU devices (platform "cpu" only).

    Does nothing after JAX has started, or if XLA_FLAGS or JAX's configuration sets a number.

    Raises:
        TypeError: `count` is no integer.
        ValueError: `count` is below 1, or above both 8 and the number of processors.
    """
    count = _checks.integer("count", count, minimum=1)
    is_set = _FLAG in os.environ.get("XLA_FLAGS", "") or jax.config.jax_num_cpu_devices >= 0  # pyright: ignore[reportAttributeAccessIssue]
    if is_set:
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
