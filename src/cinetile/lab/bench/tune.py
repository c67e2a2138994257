"""Searching the tile sizes that run fastest, block_q and block_kv together."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp

from cinetile import _checks
from cinetile.attention import attention
from cinetile.kernels.base import AttentionRequest
from cinetile.kernels.registry import select_implementation
from cinetile.lab.bench.machine import Machine, describe_machine
from cinetile.lab.bench.timing import Progress, no_progress, time_interleaved
from cinetile.lab.bench.workload import Workload
from cinetile.lab.inputs import random_inputs
from cinetile.lab.ratios import Stated, speedup
from cinetile.plans import MODES, TilePlan


@dataclass(frozen=True)
class TuneConfig:
    """What is searched; checked when it is built, before anything is computed.

    Attributes:
        workload: the attention call; its own tile sizes give way to those searched.
        mode: mode of the plans.
        block_q: candidates for the queries in a tile.
        block_kv: candidates for the keys in a tile.
        implementation: name of the kernel; None for the best that can run here.
        repeats: rounds that count.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or the implementation is unknown.
        NotImplementedError: the implementation cannot run on this machine.
    """

    workload: Workload
    mode: str = "split"
    block_q: tuple[int, ...] = (128, 256, 512)
    block_kv: tuple[int, ...] = (128, 256, 512)
    implementation: str | None = None
    repeats: int = 5

    def __post_init__(self) -> None:
        _checks.choice("mode", self.mode, MODES)
        for name in ("block_q", "block_kv"):
            sizes = getattr(self, name)
            if not sizes:
                raise ValueError(f"{name} must hold at least one size, got none")
            unique = tuple(dict.fromkeys(_checks.integer(name, size, minimum=1) for size in sizes))
            object.__setattr__(self, name, unique)
        _checks.integer("repeats", self.repeats, minimum=1)
        select_implementation(self.implementation, None)

    def plans(self) -> dict[str, TilePlan]:
        """The plan of every pair of sizes, by its name."""
        return {
            f"{block_q}x{block_kv}": replace(
                self.workload, block_q=block_q, block_kv=block_kv
            ).plan(self.mode)
            for block_q in self.block_q
            for block_kv in self.block_kv
        }


@dataclass(frozen=True)
class TuneRow:
    """Measurements of one pair of tile sizes.

    Attributes:
        block_q: queries in a tile.
        block_kv: keys in a tile.
        ms_median: median wall time of a call.
        ms_min: shortest.
        ms_max: longest.
        rounds_ms: wall time of each round.
        tiles_visited: tiles that ran.
        tiles_masked: tiles that ran with a mask.
    """

    block_q: int
    block_kv: int
    ms_median: float
    ms_min: float
    ms_max: float
    rounds_ms: tuple[float, ...]
    tiles_visited: int
    tiles_masked: int


@dataclass(frozen=True)
class TuneResult:
    """A finished search.

    Attributes:
        machine: where it ran.
        workload: what was computed.
        mode: mode of the plans.
        implementation: name of the kernel that ran.
        path: its code path; the name again if it has only one.
        repeats: rounds that counted.
        rows: one for each pair of sizes, the fastest first.
    """

    machine: Machine
    workload: Workload
    mode: str
    implementation: str
    path: str
    repeats: int
    rows: tuple[TuneRow, ...]

    @property
    def best(self) -> TuneRow:
        return self.rows[0]

    def against_best(self, row: TuneRow) -> Stated:
        """How many times as long a pair of sizes takes as the best one, if they differ at all."""
        return speedup(row.rounds_ms, self.best.rounds_ms)

    def to_dict(self) -> dict[str, Any]:
        return {
            "cinetile": version("cinetile"),
            "machine": self.machine.to_dict(),
            "workload": self.workload.to_dict(),
            "mode": self.mode,
            "implementation": self.implementation,
            "path": self.path,
            "repeats": self.repeats,
            "rows": [asdict(row) for row in self.rows],
        }

    def merge_into(self, table: dict[str, Any]) -> dict[str, Any]:
        """Adds the best sizes to a table as `kernels/cpu/tuned_blocks.json` holds it.

        Sizes stand under code path, dtype and tokens, and beside them where they were measured.
        """
        tokens = str(self.workload.grid.num_tokens)
        entry = [self.best.block_q, self.best.block_kv]
        merged = {"blocks": {}, "measured": {}, **table}
        blocks = dict(merged["blocks"])
        of_path = dict(blocks.get(self.path, {}))
        of_path[self.workload.dtype] = {**of_path.get(self.workload.dtype, {}), tokens: entry}
        blocks[self.path] = of_path
        machine = self.machine
        measured = {
            **merged["measured"],
            f"{self.path} {self.workload.dtype} {tokens}": (
                f"{machine.cpu}, {machine.threads} threads, jax {machine.jax}, {self.mode} plan, "
                f"{self.workload.pattern_name}, {self.workload.heads} heads of "
                f"{self.workload.head_dim}"
            ),
        }
        return {**merged, "blocks": blocks, "measured": measured}


def tune_blocks(config: TuneConfig, progress: Progress = no_progress) -> TuneResult:
    """Times every pair of tile sizes in turn, round after round, on random inputs.

    Raises:
        NotImplementedError: the named implementation cannot run the workload.
    """
    workload, plans = config.workload, config.plans()
    request = AttentionRequest(
        workload.batch, workload.heads, workload.head_dim, workload.dtype, tuple(plans.values())
    )
    chosen = select_implementation(config.implementation, request)
    inputs = random_inputs(workload.grid.num_tokens, workload.heads, workload.head_dim, seed=0)
    query, key, value = (
        jnp.asarray(array, workload.dtype) for array in (inputs.query, inputs.key, inputs.value)
    )

    def call(plan: TilePlan) -> Callable[[], jax.Array]:
        return lambda: attention(
            query, key, value, plan, implementation=chosen.name
        ).block_until_ready()

    timings = time_interleaved(
        {name: call(plan) for name, plan in plans.items()}, config.repeats, progress=progress
    )
    rows = [
        TuneRow(
            plan.block_q,
            plan.block_kv,
            timings[name].median,
            timings[name].minimum,
            timings[name].maximum,
            timings[name].milliseconds,
            plan.stats.tiles_visited,
            plan.stats.tiles_masked,
        )
        for name, plan in plans.items()
    ]
    return TuneResult(
        machine=describe_machine(),
        workload=workload,
        mode=config.mode,
        implementation=chosen.name,
        path=chosen.path,
        repeats=config.repeats,
        rows=tuple(sorted(rows, key=lambda row: row.ms_median)),
    )
