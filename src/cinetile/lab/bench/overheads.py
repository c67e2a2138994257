"""What a routed layer does besides attention: finding the routes and moving the tokens."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
from jaxtyping import Array, Float

from cinetile.kernels.base import Implementation
from cinetile.lab.bench.timing import Timing
from cinetile.lab.bench.workload import Workload
from cinetile.patterns import Pattern, name_of
from cinetile.placement import place, restore
from cinetile.policy import PRESETS, SparsityPolicy
from cinetile.routing import route_heads

ROUTING, PLACEMENT = "routing", "placement"


@dataclass(frozen=True)
class OverheadRow:
    """Measurements of one thing that comes on top of attention.

    Attributes:
        mode: "routing" or "placement".
        implementation: name of the kernel that it serves.
        path: its code path; the name again if it has only one.
        ms_median: median wall time of a call.
        ms_min: shortest.
        ms_max: longest.
        share_of_aligned: time over that of the aligned row; None without one.
        note: what was measured, in words.
    """

    mode: str
    implementation: str
    path: str
    ms_median: float
    ms_min: float
    ms_max: float
    share_of_aligned: float | None
    note: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def overhead_calls(
    workload: Workload,
    implementation: Implementation,
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch tokens heads head_dim"],
    value: Float[Array, "batch tokens heads head_dim"],
) -> dict[str, Callable[[], object]]:
    """Calls to time: routing of all heads between two patterns, and placement if any."""
    plans = [replace(workload, pattern=name).plan("aligned") for name in _routed(workload)]
    rng = jax.random.key(0)

    def route() -> object:
        return jax.block_until_ready(route_heads(query, key, value, plans, rng=rng))

    if not implementation.moves_tokens:
        return {ROUTING: route}
    mask, grid = plans[-1].mask, workload.grid

    @jax.jit
    def move(query: Array, key: Array, value: Array) -> tuple[Array, ...]:
        placed = place(query, mask.query_order, grid, axis=1)
        keys, values = (place(array, mask.key_order, grid, axis=1) for array in (key, value))
        # The barrier keeps XLA from seeing that the way back undoes the way there.
        placed = jax.lax.optimization_barrier(placed)
        return keys, values, restore(placed, mask.query_order, grid, axis=1)

    return {ROUTING: route, PLACEMENT: lambda: jax.block_until_ready(move(query, key, value))}


def overhead_rows(
    workload: Workload, implementation: Implementation, timings: dict[str, Timing]
) -> tuple[OverheadRow, ...]:
    """The rows of what `overhead_calls` gave to time."""
    aligned = timings.get("aligned")
    names = [name_of(pattern) for pattern in _routed(workload)]
    patterns = " and ".join(f"the {name}" for name in names)
    notes = {
        ROUTING: f"64 sampled rows against all keys, for {patterns} pattern",
        PLACEMENT: f"all heads {names[-1]}; a part of the kernel's own time",
    }
    timing_of = {name: timings[name] for name in notes if name in timings}
    if not implementation.moves_tokens:
        timing_of[PLACEMENT] = Timing((0.0,))
        notes[PLACEMENT] = "the kernel reads every order in place: no pass of its own"
    return tuple(
        OverheadRow(
            mode=name,
            implementation=implementation.name,
            path=implementation.path,
            ms_median=timing.median,
            ms_min=timing.minimum,
            ms_max=timing.maximum,
            share_of_aligned=None if aligned is None else timing.median / aligned.median,
            note=notes[name],
        )
        for name, timing in timing_of.items()
    )


def _routed(workload: Workload) -> tuple[str | Pattern, ...]:
    """The patterns between which a layer with the workload's pattern would route.

    Those of the first preset that has it; the first pattern of the default policy and the
    workload's own where no preset does.
    """
    default = SparsityPolicy().patterns
    for patterns in (default, *(SparsityPolicy.preset(name).patterns for name in PRESETS)):
        if workload.pattern in patterns:
            return patterns
    return default[0], workload.pattern
