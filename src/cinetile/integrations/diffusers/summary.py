"""What ran: one record for each attention call, and the words for many."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from cinetile.grid import TokenGrid
from cinetile.layer.plans import PlanChoice


@dataclass(frozen=True, eq=False)
class LayerCall:
    """What one call of one self-attention layer did.

    Attributes:
        component: attribute of the pipeline that holds the model.
        step: index of the denoising step.
        num_steps: steps of the schedule.
        forward: which of the model's calls in this run it belongs to; those of a guidance pair
            that runs one after the other share the step.
        layer: index of the layer.
        grid: the tokens.
        implementation: what computed it, such as "cpu (avx512)".
        routes: index into `choices` of each head.
        errors: mean squared error of each pattern on the sampled rows; None where nothing was
            sampled, which is so if the policy asks for dense attention or has one pattern.
        choices: what a head can be routed to; the first one is dense.
        visited: share of all pairs that the call visited.
        routing_seconds: time that the choice took.
        attention_seconds: time that attention took.
    """

    component: str
    step: int
    num_steps: int
    forward: int
    layer: int
    grid: TokenGrid
    implementation: str
    routes: Int[np.ndarray, "batch heads"]
    errors: Float[np.ndarray, "batch heads patterns"] | None
    choices: tuple[PlanChoice, ...]
    visited: float
    routing_seconds: float
    attention_seconds: float

    @property
    def is_dense(self) -> bool:
        return not self.routes.any()

    @property
    def heads_by_choice(self) -> dict[str, int]:
        """How many heads, over the rows of the batch, went where."""
        counts = Counter(self.routes.reshape(-1).tolist())
        return {str(self.choices[route]): count for route, count in sorted(counts.items())}


@dataclass(frozen=True)
class Summary:
    """What ran in the latest run, call by call; `print` it for an overview.

    Attributes:
        family: name of the model's family.
        calls: the attention calls in the order in which they ran.
    """

    family: str
    calls: tuple[LayerCall, ...]

    @property
    def implementations(self) -> tuple[str, ...]:
        """Everything that computed a call."""
        return tuple(sorted({call.implementation for call in self.calls}))

    @property
    def sparse_calls(self) -> int:
        return sum(not call.is_dense for call in self.calls)

    @property
    def visited(self) -> float:
        """Share of all pairs that were visited, over all calls; 1 if everything was dense."""
        return sum(call.visited for call in self.calls) / max(1, len(self.calls))

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary for each call, for tables and JSON."""
        return [
            {
                "component": call.component,
                "step": call.step,
                "num_steps": call.num_steps,
                "forward": call.forward,
                "layer": call.layer,
                "grid": [call.grid.frames, call.grid.height, call.grid.width],
                "text_tokens": call.grid.text_tokens,
                "implementation": call.implementation,
                "heads": call.heads_by_choice,
                "visited": call.visited,
                "routing_ms": 1000 * call.routing_seconds,
                "attention_ms": 1000 * call.attention_seconds,
            }
            for call in self.calls
        ]

    def __str__(self) -> str:
        if not self.calls:
            return f"{self.family}: nothing has run yet"
        grids = sorted({str(call.grid) for call in self.calls})
        attention = sum(call.attention_seconds for call in self.calls)
        routing = sum(call.routing_seconds for call in self.calls)
        lines = [
            f"{self.family}, {'; '.join(grids)}: {self.sparse_calls} of {len(self.calls)} "
            f"self-attention calls sparse, {self.visited:.1%} of all pairs visited",
            f"by {', '.join(self.implementations)}; attention {attention:.2f} s, "
            f"routing {routing:.2f} s",
        ]
        by_step: dict[tuple[str, int, int], list[LayerCall]] = {}
        for call in self.calls:
            by_step.setdefault((call.component, call.step, call.num_steps), []).append(call)
        for (component, step, num_steps), calls in by_step.items():
            lines.append(f"{component}, step {step} of {num_steps}: {_in_words(calls)}")
        return "\n".join(lines)


def _in_words(calls: list[LayerCall]) -> str:
    parts = []
    for is_dense in (True, False):
        chosen = [call for call in calls if call.is_dense == is_dense]
        if not chosen:
            continue
        layers = _ranges(sorted({call.layer for call in chosen}))
        if is_dense:
            parts.append(f"layers {layers} dense")
            continue
        heads = sum((Counter(call.heads_by_choice) for call in chosen), Counter())
        shares = ", ".join(
            f"{name} for {count / heads.total():.0%} of the heads"
            for name, count in sorted(heads.items())
        )
        parts.append(f"layers {layers} {shares}")
    return "; ".join(parts)


def _ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers with runs shortened: "0, 2-5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
