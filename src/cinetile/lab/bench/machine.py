"""Facts about the machine that a measurement ran on."""

import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

# What decides which kernels can run, and how fast; other flags tell a reader nothing here.
_RELEVANT_FEATURES = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
    "sve2",
)


@dataclass(frozen=True)
class Machine:
    """Where a measurement ran.

    Attributes:
        cpu: model name of the processor.
        architecture: instruction set, as in "x86_64".
        cores: physical cores of the machine; None where the system does not tell.
        threads: logical processors that this process may use.
        memory_gib: main memory; None where the system does not tell.
        features: instruction set extensions that matter for attention.
        system: operating system and its release.
        backend: platform that JAX computes on.
        devices: kinds of the JAX devices.
        python: version.
        jax: version.
        jaxlib: version.
        numpy: version.
    """

    cpu: str
    architecture: str
    cores: int | None
    threads: int
    memory_gib: float | None
    features: tuple[str, ...]
    system: str
    backend: str
    devices: tuple[str, ...]
    python: str
    jax: str
    jaxlib: str
    numpy: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe_machine() -> Machine:
    """Collects the facts of this machine; starts JAX's backend."""
    processors = _read_cpuinfo()
    first = processors[0] if processors else {}
    flags = set(first.get("flags", first.get("Features", "")).split())
    places = {(p["physical id"], p["core id"]) for p in processors if "core id" in p}
    return Machine(
        cpu=first.get("model name") or platform.processor() or platform.machine(),
        architecture=platform.machine(),
        cores=len(places) or None,
        threads=usable_threads(),
        memory_gib=_memory_gib(),
        features=tuple(name for name in _RELEVANT_FEATURES if name in flags),
        system=f"{platform.system()} {platform.release()}",
        backend=jax.default_backend(),
        devices=tuple(device.device_kind for device in jax.devices()),
        python=platform.python_version(),
        jax=jax.__version__,
        jaxlib=version("jaxlib"),
        numpy=version("numpy"),
    )


def usable_threads() -> int:
    """Logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_cpuinfo() -> list[dict[str, str]]:
    """One table of Linux's processor facts for each logical processor; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return []
    processors = []
    for block in text.strip().split("\n\n"):
        pairs = (line.split(":", 1) for line in block.splitlines() if ":" in line)
        processors.append({name.strip(): value.strip() for name, value in pairs})
    return processors


def _memory_gib() -> float | None:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    return round(total / 2**30, 1)
