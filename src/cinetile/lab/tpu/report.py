"""The static report of a workload: its kernels compiled for a TPU, and a time for each plan."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax.numpy as jnp

from cinetile import _checks
from cinetile.kernels.pallas_tpu.config import KernelConfig, Part, Softmax
from cinetile.kernels.pallas_tpu.implementation import (
    HEAD_DIMS,
    SOFTMAXES,
    PallasTpuImplementation,
    PallasTpuTwoKernels,
)
from cinetile.kernels.pallas_tpu.tables import step_tables
from cinetile.lab.bench.timing import Progress, no_progress
from cinetile.lab.bench.workload import Workload
from cinetile.lab.tpu.aot import (
    CompiledKernel,
    KernelJob,
    SplashJob,
    compile_kernel,
    compile_splash,
    require_tpu_compiler,
)
from cinetile.lab.tpu.calibration import BAND_UNMASKED, CALIBRATION
from cinetile.lab.tpu.estimate import STEP_MS, Estimate, estimate, floor_ms
from cinetile.lab.tpu.targets import TARGETS, Target
from cinetile.plans import MODES, TilePlan

RIVALS: tuple[str, ...] = ("splash",)
# Block sizes of the stock kernel in the case study.
_SPLASH_BLOCKS = (3328, 1536, 256)
_EDGE_NAMES = {
    "full tile": "full",
    "full": "full_unit",
    "lower": "one_edge",
    "upper": "one_edge",
    "window": "two_edges",
    "general": "general",
    "padded": "padded",
}


@dataclass(frozen=True)
class StaticConfig:
    """What to compile and estimate; arguments are checked on construction.

    Attributes:
        workload: the attention call; block sizes that are None become the kernel's defaults.
        target: name in `TARGETS`.
        modes: modes of the plans to estimate.
        softmaxes: "fixed" for heads that pass the guard, "online" for the others.
        two_kernels: whether full and masked tiles run in separate kernels.
        rivals: "splash" for JAX's stock splash attention, dense.
    """

    workload: Workload
    target: str = "v6e"
    modes: tuple[str, ...] = MODES
    softmaxes: tuple[Softmax, ...] = SOFTMAXES
    two_kernels: bool = False
    rivals: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _checks.choice("target", self.target, tuple(TARGETS))
        for mode in self.modes:
            _checks.choice("modes", mode, MODES)
        for softmax in self.softmaxes:
            _checks.choice("softmaxes", softmax, SOFTMAXES)
        for rival in self.rivals:
            _checks.choice("rivals", rival, RIVALS)
        workload = self.workload
        if workload.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim must be one of {HEAD_DIMS}, got {workload.head_dim}")
        blocks = PallasTpuImplementation().default_blocks(workload.grid.num_tokens, workload.dtype)
        object.__setattr__(self, "workload", workload.with_block_sizes(*blocks))


@dataclass(frozen=True)
class StaticRow:
    """One plan under one softmax.

    Attributes:
        mode: mode of the plan.
        pattern: pattern of its mask.
        softmax: "fixed" or "online".
        static_ms: static estimate of the kernel's time.
        error_band: expected relative error of `static_ms`.
        compute_ms: part of `static_ms` in the kernel's bodies.
        steps_ms: part of `static_ms` in the overhead of grid steps.
        memory_ms: time of the HBM traffic; it is hidden if it is below the rest.
        bundles_per_mpair: instruction bundles per 2^20 pairs in each kind of body.
        floor_ms: time that the matrix units need for the kept pairs.
        vmem_bytes: vector memory that the compiler allocates.
        smem_bytes: scalar memory of the plan's tables.
        compile_s: wall time of the compilation in seconds.
        compile_cpu_s: processor time of the compilation in seconds.
        tiles_visited: grid steps per head.
        bodies: how often each kind of body runs per head.
    """

    mode: str
    pattern: str
    softmax: str
    static_ms: float
    error_band: float
    compute_ms: float
    steps_ms: float
    memory_ms: float
    bundles_per_mpair: dict[str, float]
    floor_ms: float
    vmem_bytes: int
    smem_bytes: int
    compile_s: float
    compile_cpu_s: float
    tiles_visited: int
    bodies: dict[str, int]


@dataclass(frozen=True)
class StaticRival:
    """Static estimate of a stock kernel, dense, by the same model.

    Attributes:
        name: name of the rival.
        static_ms: static estimate in ms.
        error_band: expected relative error of `static_ms`.
        bundles_per_mpair: instruction bundles per 2^20 pairs.
        compile_s: wall time of the compilation in seconds.
    """

    name: str
    static_ms: float
    error_band: float
    bundles_per_mpair: float
    compile_s: float


@dataclass(frozen=True)
class StaticReport:
    """A finished static analysis.

    Attributes:
        config: the configuration.
        rows: one row per softmax and mode.
        rivals: one entry per rival.
        utilisation: busy fraction of each kind of slot in full tiles, per softmax.
    """

    config: StaticConfig
    rows: tuple[StaticRow, ...]
    rivals: tuple[StaticRival, ...]
    utilisation: dict[str, dict[str, float]]

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.config.target,
            "kind": "static estimate; nothing ran on a TPU",
            "workload": self.config.workload.to_dict(),
            "two_kernels": self.config.two_kernels,
            "rows": [asdict(row) for row in self.rows],
            "rivals": [asdict(rival) for rival in self.rivals],
            "utilisation": self.utilisation,
            "calibration": [row.to_dict() for row in CALIBRATION],
        }


def static_report(
    config: StaticConfig,
    progress: Progress = no_progress,
    *,
    compile_one: Callable[[KernelJob], CompiledKernel] = compile_kernel,
) -> StaticReport:
    """Compiles the kernels of a workload and estimates the time of each plan.

    Args:
        config: what to compile and estimate.
        progress: called as work proceeds.
        compile_one: compiles one kernel; a caller with many reports may pass a cached function.

    Raises:
        ImportError: libtpu is missing.
        VmemOverflowError: the tiles need too much vector memory.
        TpuCompileError: the compiler refused the kernel.
        DumpFormatError: the compiler's output is not understood.
    """
    require_tpu_compiler()
    workload = config.workload
    plans = {mode: workload.plan(mode) for mode in config.modes}
    implementation = PallasTpuTwoKernels if config.two_kernels else PallasTpuImplementation
    parts = implementation.parts
    jobs: list[tuple[Softmax, Part]] = [
        (softmax, part) for softmax in config.softmaxes for part in parts
    ]
    compiled = {}
    for done, (softmax, part) in enumerate(jobs):
        progress("compiling", f"{softmax} softmax, {part} tiles", done, len(jobs))
        compiled[softmax, part] = compile_one(_job(config, softmax, part))
    progress("compiling", "", len(jobs), len(jobs))
    return StaticReport(
        config,
        rows=tuple(
            _row(config, mode, plan, softmax, {part: compiled[softmax, part] for part in parts})
            for softmax in config.softmaxes
            for mode, plan in plans.items()
        ),
        rivals=tuple(_splash(config) for _ in config.rivals),
        utilisation={
            softmax: compiled[softmax, parts[0]].dump.utilisation for softmax in config.softmaxes
        },
    )


def _job(config: StaticConfig, softmax: Softmax, part: Part) -> KernelJob:
    workload = config.workload
    plan = workload.plan("split")
    kernel = KernelConfig.for_blocks(plan.block_q, plan.block_kv, softmax, part)
    heads = workload.batch * workload.heads
    return KernelJob(config.target, kernel, plan, heads, workload.head_dim, workload.dtype)


def _row(
    config: StaticConfig,
    mode: str,
    plan: TilePlan,
    softmax: Softmax,
    compiled: dict[Part, CompiledKernel],
) -> StaticRow:
    workload, target = config.workload, TARGETS[config.target]
    heads, itemsize = workload.batch * workload.heads, jnp.dtype(workload.dtype).itemsize
    estimates: list[Estimate] = []
    bodies: dict[str, int] = {}
    costs: dict[str, float] = {}
    smem = 0
    for part, kernel_result in compiled.items():
        kernel = KernelConfig.for_blocks(plan.block_q, plan.block_kv, softmax, part)
        found = estimate(
            kernel_result.dump, plan, kernel, target, heads, workload.head_dim, itemsize
        )
        estimates.append(found)
        smem = max(smem, step_tables([plan], kernel, heads).smem_bytes(heads))
        for kind, number in found.bodies.items():
            bodies[kind] = bodies.get(kind, 0) + number
        for body in kernel_result.dump.bodies:
            name = _EDGE_NAMES[body.kind]
            costs[name] = max(costs.get(name, 0), round(body.per_mega_pair, 1))
    merge_ms = 0.0 if len(compiled) == 1 else _merge_ms(workload, target, heads, itemsize)
    return StaticRow(
        mode=mode,
        pattern=workload.pattern_name,
        softmax=softmax,
        static_ms=sum(part.static_ms for part in estimates) + merge_ms,
        error_band=max(part.error_band for part in estimates),
        compute_ms=sum(part.compute_ms for part in estimates),
        steps_ms=sum(part.steps_ms for part in estimates),
        memory_ms=sum(part.memory_ms for part in estimates) + merge_ms,
        bundles_per_mpair=costs,
        floor_ms=floor_ms(plan.stats.kept_pairs, target, heads, workload.head_dim, workload.dtype),
        vmem_bytes=max(result.dump.vmem_bytes for result in compiled.values()),
        smem_bytes=smem,
        compile_s=round(sum(result.seconds for result in compiled.values()), 2),
        compile_cpu_s=round(sum(result.cpu_seconds for result in compiled.values()), 2),
        tiles_visited=plan.stats.tiles_visited,
        bodies=bodies,
    )


def _merge_ms(workload: Workload, target: Target, heads: int, itemsize: int) -> float:
    """HBM time of the merge, which reads two outputs and writes one."""
    one_output = heads * workload.grid.num_tokens * workload.head_dim * itemsize
    return 3 * one_output / target.hbm_bytes_per_us / 1e3


def _splash(config: StaticConfig) -> StaticRival:
    workload, target = config.workload, TARGETS[config.target]
    block_q, block_kv, chunk = _SPLASH_BLOCKS
    heads = workload.batch * workload.heads
    tokens = workload.grid.num_tokens
    compiled = compile_splash(
        SplashJob(config.target, tokens, block_q, block_kv, chunk, heads, workload.head_dim)
    )
    tiles = -(-tokens // block_q) * -(-tokens // block_kv)
    ms_a_tile = compiled.run_bundles / (target.clock_ghz * 1e6) + STEP_MS
    return StaticRival(
        "splash",
        static_ms=heads * tiles * ms_a_tile,
        error_band=BAND_UNMASKED,
        bundles_per_mpair=round(compiled.run_bundles / (block_q * block_kv / 2**20), 1),
        compile_s=round(compiled.seconds, 2),
    )
