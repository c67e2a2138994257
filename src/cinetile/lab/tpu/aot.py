"""Compiling for a TPU without one, in a child process.

The TPU compiler reads its settings from the environment once per process, and only one process
at a time may load it. Each compilation therefore runs in a new child process and leaves the
caller's process unchanged.
"""

import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cinetile._extras import install_hint
from cinetile.grid import TokenGrid
from cinetile.kernels.pallas_tpu.config import KernelConfig
from cinetile.lab.tpu.bundles import DumpFormatError, KernelDump
from cinetile.parallel import Collective
from cinetile.plans import TilePlan
from cinetile.policy import SparsityPolicy

_DUMP_FLAGS = (
    "--xla_jf_dump_to={folder}",
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=final|static-bundle-profile",
)
# What libtpu would otherwise ask of a metadata server, or of a chip.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class TpuCompileError(RuntimeError):
    """The TPU compiler rejected the kernel."""


class VmemOverflowError(TpuCompileError):
    """The kernel needs more vector memory than the limit."""


@dataclass(frozen=True)
class KernelJob:
    """One kernel to compile.

    Attributes:
        target: name in `TARGETS`.
        config: chunks, groups and spans of the kernel.
        plan: a plan with the same block sizes.
        heads: attention heads.
        head_dim: 64, 128 or 256.
        dtype: "bfloat16" or "float32".
    """

    target: str
    config: KernelConfig
    plan: TilePlan
    heads: int
    head_dim: int
    dtype: str


@dataclass(frozen=True)
class CallJob:
    """A whole call of the TPU implementation to compile: placement, guard, both kernels.

    Attributes:
        target: name in `TARGETS`.
        plans: plans that heads can be routed to.
        heads: attention heads.
        head_dim: features per head.
        dtype: "bfloat16" or "float32".
        two_kernels: whether full and masked tiles run in separate kernels.
    """

    target: str
    plans: tuple[TilePlan, ...]
    heads: int
    head_dim: int
    dtype: str
    two_kernels: bool = False


@dataclass(frozen=True)
class SplashJob:
    """JAX's stock splash attention to compile, dense, with tokens padded to whole tiles.

    Attributes:
        target: name in `TARGETS`.
        num_tokens: tokens of the sequence.
        block_q: queries per tile.
        block_kv: keys per tile.
        kv_chunk: keys per inner step (`block_kv_compute`).
        heads: attention heads.
        head_dim: features per head.
    """

    target: str
    num_tokens: int
    block_q: int
    block_kv: int
    kv_chunk: int
    heads: int
    head_dim: int


@dataclass(frozen=True)
class LayerJob:
    """A sparse layer on a slice of several chips to compile: exchange, routing, attention.

    Attributes:
        target: name in `TARGETS`.
        topology: shape of the slice, for example "2x4".
        axes: names and sizes of the mesh's axes, "data", "sequence" and "heads".
        grid: the tokens.
        policy: policy of the layer; step 1 and layer 1 are compiled.
        batch: batch rows.
        heads: attention heads.
        head_dim: features per head.
        dtype: "bfloat16" or "float32".
    """

    target: str
    topology: str
    axes: tuple[tuple[str, int], ...]
    grid: TokenGrid
    policy: SparsityPolicy
    batch: int
    heads: int
    head_dim: int
    dtype: str


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel.

    Attributes:
        dump: the instructions that the compiler emitted.
        seconds: wall time of the compilation.
        cpu_seconds: processor time of the compilation.
    """

    dump: KernelDump
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class CompiledCall:
    """A compiled whole call.

    Attributes:
        seconds: wall time of the compilation.
        temporary_bytes: HBM of temporaries, besides arguments and results.
    """

    seconds: float
    temporary_bytes: int


@dataclass(frozen=True)
class CompiledLayer:
    """A compiled layer on a slice.

    Attributes:
        seconds: wall time of the compilation.
        temporary_bytes: HBM of temporaries per chip, besides arguments and results.
        collectives: the collectives of the program.
    """

    seconds: float
    temporary_bytes: int
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class CompiledSplash:
    """The compiled stock kernel.

    Attributes:
        run_bundles: instruction bundles per tile.
        seconds: wall time of the compilation.
    """

    run_bundles: int
    seconds: float


@dataclass(frozen=True)
class Failure:
    """Why a child process has no result; it can be pickled."""

    error: str
    message: str


_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (DumpFormatError, VmemOverflowError, TpuCompileError)
}


def require_tpu_compiler() -> None:
    """Raises ImportError with an installation hint if libtpu is missing."""
    if importlib.util.find_spec("libtpu") is None:
        hint = install_hint("tpu-aot")
        raise ImportError(f"compiling for a TPU needs libtpu (Linux only): {hint}")


def compile_kernel(job: KernelJob) -> CompiledKernel:
    """Compiles one kernel and counts its instructions.

    Raises:
        ImportError: libtpu is missing.
        VmemOverflowError: the kernel needs too much vector memory.
        TpuCompileError: the compiler rejected the kernel for another reason.
        DumpFormatError: the compiler's output has an unexpected format.
    """
    return _in_child(job)


def compile_call(job: CallJob) -> CompiledCall:
    """Compiles a whole call; raises what `compile_kernel` does."""
    return _in_child(job)


def compile_layer(job: LayerJob) -> CompiledLayer:
    """Compiles a layer on a slice; raises what `compile_kernel` does."""
    return _in_child(job)


def compile_splash(job: SplashJob) -> CompiledSplash:
    """Compiles JAX's stock kernel; raises what `compile_kernel` does."""
    return _in_child(job)


def _in_child(job: KernelJob | CallJob | LayerJob | SplashJob) -> Any:
    require_tpu_compiler()
    with tempfile.TemporaryDirectory(prefix="cinetile-tpu-") as folder:
        dump, result = Path(folder, "dump"), Path(folder, "result")
        dump.mkdir()
        flags = " ".join(_DUMP_FLAGS).format(folder=dump)
        inherited = os.environ.get("LIBTPU_INIT_ARGS", "")
        child = subprocess.run(
            [sys.executable, "-m", "cinetile.lab.tpu.compiler", str(dump), str(result)],
            input=pickle.dumps(job),
            capture_output=True,
            env=os.environ | _ENVIRONMENT | {"LIBTPU_INIT_ARGS": f"{flags} {inherited}".strip()},
            check=False,
        )
        if child.returncode or not result.exists():
            last = child.stderr.decode(errors="replace").strip().splitlines()[-3:]
            raise TpuCompileError(
                f"the TPU compiler's process ended with {child.returncode}: {' '.join(last)}"
            )
        found = pickle.loads(result.read_bytes())
    if isinstance(found, Failure):
        raise _ERRORS[found.error](found.message)
    return found
