"""The ladder: dense, naive, split and aligned attention side by side in one run."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from cinetile import _checks
from cinetile.attention import attention
from cinetile.kernels.base import AttentionRequest, Implementation
from cinetile.kernels.registry import select_implementation
from cinetile.lab.bench.machine import Machine, describe_machine
from cinetile.lab.bench.mask_errors import MaskErrors, compare_masks
from cinetile.lab.bench.overheads import OverheadRow, overhead_calls, overhead_rows
from cinetile.lab.bench.reference import (
    RoundedInputs,
    max_abs_error,
    reference_output,
    relative_error,
    sample_rows,
)
from cinetile.lab.bench.rivals import Rival, RivalRow, check_rivals, rivals_ready
from cinetile.lab.bench.sources import InputSource, load_inputs
from cinetile.lab.bench.timing import Progress, Timing, no_progress, time_interleaved
from cinetile.lab.bench.workload import Workload
from cinetile.lab.inputs import Inputs, random_inputs
from cinetile.lab.ratios import Stated, speedup
from cinetile.plans import MODES, TilePlan

# The modes whose references say what a mask costs; "naive" keeps the same pairs as "split".
_REFERENCE_MODES = ("dense", "split", "aligned")

_SampledRows = dict[str, Float[np.ndarray, "batch rows heads head_dim"]]


@dataclass(frozen=True)
class LadderConfig:
    """What a ladder measures; checked when it is built, before anything is computed.

    Attributes:
        workload: the attention call; tile sizes that it leaves open are chosen here, and its
            batch, heads and head_dim give way to those of a file.
        source: where query, key and value come from.
        modes: which modes to run, in any order.
        implementation: name of the kernel; None for the best that can run here.
        rivals: other libraries to measure in the same rounds: "torch-sdpa", "torch-flex".
        repeats: rounds that count.
        check_rows: query rows on which errors are measured.
        with_routing: whether to measure routing and placement too.
    """

    workload: Workload
    source: InputSource = field(default_factory=InputSource)
    modes: tuple[str, ...] = MODES
    implementation: str | None = None
    rivals: tuple[str, ...] = ()
    repeats: int = 3
    check_rows: int = 64
    with_routing: bool = False

    def __post_init__(self) -> None:
        for mode in self.modes:
            _checks.choice("modes", mode, MODES)
        if not self.modes or len(set(self.modes)) < len(self.modes):
            listed = ", ".join(self.modes) or "none"
            raise ValueError(f"modes must name at least one mode and none twice, got {listed}")
        object.__setattr__(self, "modes", tuple(mode for mode in MODES if mode in self.modes))
        _checks.integer("repeats", self.repeats, minimum=1)
        _checks.integer("check_rows", self.check_rows, minimum=2)
        check_rivals(self.rivals)
        object.__setattr__(self, "workload", self.workload.with_blocks(self.implementation))

    def plans(self) -> dict[str, TilePlan]:
        """The tile plan of each mode."""
        return {mode: self.workload.plan(mode) for mode in self.modes}


@dataclass(frozen=True)
class LadderRow:
    """Measurements of one mode.

    Attributes:
        mode: "dense", "naive", "split" or "aligned".
        implementation: name of the kernel that ran.
        path: its code path; the name again if it has only one.
        ms_median: median wall time of a call.
        ms_min: shortest.
        ms_max: longest.
        speedup_vs_dense: time of the dense row over this one; None where the measurement does
            not support one.
        no_speedup_reason: why `speedup_vs_dense` is None; None where it is not.
        kept_fraction: pairs that are computed and kept, of all pairs.
        tiles_total: tiles of dense attention.
        tiles_visited: tiles that ran.
        tiles_masked: tiles that ran with a mask.
        max_abs_error: against the float64 reference of the pairs that this row keeps.
        rel_error: the same error, relative: the error of the kernel itself.
        rel_error_vs_exact: against the reference of the exact mask.
        rel_error_vs_dense: against the reference of dense attention.
    """

    mode: str
    implementation: str
    path: str
    ms_median: float
    ms_min: float
    ms_max: float
    speedup_vs_dense: float | None
    no_speedup_reason: str | None
    kept_fraction: float
    tiles_total: int
    tiles_visited: int
    tiles_masked: int
    max_abs_error: float
    rel_error: float
    rel_error_vs_exact: float
    rel_error_vs_dense: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class LadderResult:
    """A finished ladder.

    Attributes:
        machine: where it ran.
        workload: what was computed.
        input: the query, key and value in words.
        repeats: rounds that counted.
        checked_rows: query rows on which errors were measured.
        rows: one for each mode.
        rivals: one for each rival.
        overheads: routing and placement, where they were asked for.
        mask_errors: what the masks change, for this input and for a random one.
    """

    machine: Machine
    workload: Workload
    input: str
    repeats: int
    checked_rows: int
    rows: tuple[LadderRow, ...]
    rivals: tuple[RivalRow, ...]
    overheads: tuple[OverheadRow, ...]
    mask_errors: tuple[MaskErrors, ...]

    def row(self, mode: str) -> LadderRow | None:
        """The row of a mode; None if it did not run."""
        return next((row for row in self.rows if row.mode == mode), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "cinetile": version("cinetile"),
            "machine": self.machine.to_dict(),
            "workload": self.workload.to_dict(),
            "input": self.input,
            "repeats": self.repeats,
            "checked_rows": self.checked_rows,
            "rows": [row.to_dict() for row in (*self.rows, *self.overheads)],
            "rivals": [rival.to_dict() for rival in self.rivals],
            "mask_errors": [errors.to_dict() for errors in self.mask_errors],
        }


def run_ladder(config: LadderConfig, progress: Progress = no_progress) -> LadderResult:
    """Runs every mode and rival in turn, round after round, and checks their outputs.

    Args:
        config: what to measure.
        progress: told what is going on.

    Raises:
        ImportError: an optional package is missing.
        FileNotFoundError: the input file does not exist.
        ValueError: the input file does not fit the workload.
        NotImplementedError: the named implementation cannot run the workload.
    """
    return measure_ladder(config, load_inputs(config.source, config.workload, progress), progress)


def measure_ladder(
    config: LadderConfig, inputs: Inputs, progress: Progress = no_progress
) -> LadderResult:
    """`run_ladder` on inputs that are loaded already.

    Raises:
        ValueError: the inputs do not have the grid's tokens.
        NotImplementedError: the named implementation cannot run the workload.
        RuntimeError: an output is not finite.
    """
    batch, num_tokens, heads, head_dim = inputs.query.shape
    workload = replace(config.workload, batch=batch, heads=heads, head_dim=head_dim)
    if num_tokens != workload.grid.num_tokens:
        raise ValueError(f"inputs must have the tokens of {workload.grid}, got {num_tokens:,}")
    plans = config.plans()
    request = AttentionRequest(batch, heads, head_dim, workload.dtype, tuple(plans.values()))
    chosen = select_implementation(config.implementation, request)
    rows = sample_rows(num_tokens, config.check_rows, config.source.seed)
    rounded = RoundedInputs.of(inputs, workload.dtype)

    outputs: _SampledRows = {}
    with rivals_ready(config.rivals, rounded, workload.mask(), workload.dtype) as rivals:
        query, key, value = (
            jnp.asarray(array, workload.dtype)
            for array in (rounded.query, rounded.key, rounded.value)
        )
        own_calls = {
            mode: _call(query, key, value, plan, chosen.name) for mode, plan in plans.items()
        }
        readers = dict.fromkeys(own_calls, _read_rows) | {r.name: r.rows for r in rivals}
        overheads: dict[str, Callable[[], Any]] = {}
        if config.with_routing:
            overheads = overhead_calls(workload, chosen, query, key, value)

        def examine(name: str, output: Any) -> None:
            if name in overheads:
                return
            sampled = readers[name](output, rows)
            if not np.isfinite(sampled).all():
                raise RuntimeError(f"{name} gave an output that is not finite")
            outputs[name] = sampled

        timings = time_interleaved(
            own_calls | overheads | {rival.name: rival.run for rival in rivals},
            config.repeats,
            examine=examine,
            progress=progress,
        )

    references = _references(workload, rounded, rows, progress)
    mask_errors = [compare_masks(inputs.description, references)]
    if config.source.kind != "random":
        mask_errors.append(_random_mask_errors(config, workload, rows, progress))
    return LadderResult(
        machine=describe_machine(),
        workload=workload,
        input=inputs.description,
        repeats=config.repeats,
        checked_rows=rows.size,
        rows=_mode_rows(chosen, plans, timings, outputs, references),
        rivals=tuple(_rival_row(rival, workload, timings, outputs, references) for rival in rivals),
        overheads=overhead_rows(workload, chosen, timings) if config.with_routing else (),
        mask_errors=tuple(mask_errors),
    )


def _mode_rows(
    chosen: Implementation,
    plans: dict[str, TilePlan],
    timings: dict[str, Timing],
    outputs: _SampledRows,
    references: _SampledRows,
) -> tuple[LadderRow, ...]:
    return tuple(
        LadderRow(
            mode=mode,
            implementation=chosen.name,
            path=chosen.path,
            **_times(timings[mode], timings.get("dense")),
            kept_fraction=plan.stats.kept_fraction,
            tiles_total=plan.stats.tiles_total,
            tiles_visited=plan.stats.tiles_visited,
            tiles_masked=plan.stats.tiles_masked,
            **_errors(outputs[mode], references, "split" if mode == "naive" else mode),
        )
        for mode, plan in plans.items()
    )


def _rival_row(
    rival: Rival,
    workload: Workload,
    timings: dict[str, Timing],
    outputs: _SampledRows,
    references: _SampledRows,
) -> RivalRow:
    return RivalRow(
        name=rival.name,
        version=rival.version,
        **_times(timings[rival.name], timings.get("dense")),
        kept_fraction=workload.plan(rival.mode).stats.kept_fraction,
        **_errors(outputs[rival.name], references, rival.mode),
    )


def _random_mask_errors(
    config: LadderConfig, workload: Workload, rows: Int[np.ndarray, " rows"], progress: Progress
) -> MaskErrors:
    """What the masks change for random inputs of the same shape."""
    tokens = workload.grid.num_tokens
    random = random_inputs(tokens, workload.heads, workload.head_dim, config.source.seed)
    rounded = RoundedInputs.of(random, workload.dtype)
    return compare_masks(random.description, _references(workload, rounded, rows, progress))


def _call(
    query: jax.Array, key: jax.Array, value: jax.Array, plan: TilePlan, implementation: str
) -> Callable[[], jax.Array]:
    return lambda: attention(
        query, key, value, plan, implementation=implementation
    ).block_until_ready()


def _read_rows(
    output: jax.Array, rows: Int[np.ndarray, " rows"]
) -> Float[np.ndarray, "batch rows heads head_dim"]:
    return np.asarray(output[:, rows], np.float32)


def _references(
    workload: Workload, inputs: RoundedInputs, rows: Int[np.ndarray, " rows"], progress: Progress
) -> _SampledRows:
    references = {}
    for done, mode in enumerate(_REFERENCE_MODES):
        progress("checking against float64", mode, done, len(_REFERENCE_MODES))
        references[mode] = reference_output(inputs, workload.plan(mode), rows)
    progress("checking against float64", "", len(_REFERENCE_MODES), len(_REFERENCE_MODES))
    return references


def _times(timing: Timing, dense: Timing | None) -> dict[str, Any]:
    stated = _speedup(timing, dense)
    return {
        "ms_median": timing.median,
        "ms_min": timing.minimum,
        "ms_max": timing.maximum,
        "speedup_vs_dense": stated.value,
        "no_speedup_reason": stated.reason,
    }


def _speedup(timing: Timing, dense: Timing | None) -> Stated:
    if dense is None:
        return Stated(None, "dense attention was not measured")
    if timing is dense:
        return Stated(1.0)
    return speedup(dense.milliseconds, timing.milliseconds)


def _errors(
    output: Float[np.ndarray, "batch rows heads head_dim"], references: _SampledRows, mode: str
) -> dict[str, Any]:
    return {
        "max_abs_error": max_abs_error(output, references[mode]),
        "rel_error": relative_error(output, references[mode]),
        "rel_error_vs_exact": relative_error(output, references["split"]),
        "rel_error_vs_dense": relative_error(output, references["dense"]),
    }
