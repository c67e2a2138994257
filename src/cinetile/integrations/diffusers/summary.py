"""What ran: one record for each attention call, and the words for many."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cinetile.layer.record import LayerRecord
from cinetile.layer.route_table import RouteTable


@dataclass(frozen=True)
class Summary:
    """What ran in the latest run, call by call; `print` it for an overview.

    Attributes:
        family: name of the model's family.
        calls: the attention calls in the order in which they ran.
    """

    family: str
    calls: tuple[LayerRecord, ...]

    @property
    def implementations(self) -> tuple[str, ...]:
        """Everything that computed a call."""
        return tuple(sorted({str(call.implementation) for call in self.calls}))

    @property
    def sparse_calls(self) -> int:
        return sum(not call.is_dense for call in self.calls)

    @property
    def visited(self) -> float:
        """Share of all pairs that were visited, over all calls; 1 if everything was dense."""
        return sum(call.visited for call in self.calls) / max(1, len(self.calls))

    def routes(self) -> RouteTable:
        """Returns where each head went, for files and `cinetile.lab.pictures.route_picture`.

        Raises:
            ValueError: nothing has run yet.
        """
        return RouteTable.from_records(self.calls)

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary for each call, for tables and JSON."""
        return [
            {
                "component": call.component,
                "step": call.step,
                "num_steps": call.num_steps,
                "forward": call.forward,
                "layer": call.layer,
                "grid": None
                if call.grid is None
                else [call.grid.frames, call.grid.height, call.grid.width],
                "text_tokens": None if call.grid is None else call.grid.text_tokens,
                "implementation": call.implementation,
                "heads": call.heads_by_choice,
                "visited": call.visited,
                "routing_ms": 1000 * (call.routing_seconds or 0.0),
                "attention_ms": 1000 * (call.attention_seconds or 0.0),
            }
            for call in self.calls
        ]

    def __str__(self) -> str:
        if not self.calls:
            return f"{self.family}: nothing has run yet"
        grids = sorted({str(call.grid) for call in self.calls})
        attention = sum(call.attention_seconds or 0.0 for call in self.calls)
        routing = sum(call.routing_seconds or 0.0 for call in self.calls)
        lines = [
            f"{self.family}, {'; '.join(grids)}: {self.sparse_calls} of {len(self.calls)} "
            f"self-attention calls sparse, {self.visited:.1%} of all pairs visited",
            f"by {', '.join(self.implementations)}; attention {attention:.2f} s, "
            f"routing {routing:.2f} s",
        ]
        by_step: dict[tuple[Any, ...], list[LayerRecord]] = {}
        for call in self.calls:
            by_step.setdefault((call.component, call.step, call.num_steps), []).append(call)
        for (component, step, num_steps), calls in by_step.items():
            lines.append(f"{component}, step {step} of {num_steps}: {_in_words(calls)}")
        return "\n".join(lines)


def _in_words(calls: list[LayerRecord]) -> str:
    parts = []
    for is_dense in (True, False):
        chosen = [call for call in calls if call.is_dense == is_dense]
        if not chosen:
            continue
        layers = _ranges(sorted({int(call.layer) for call in chosen}))
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
