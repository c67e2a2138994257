"""Timing several candidates fairly on a machine whose speed drifts."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from cinetile import _checks

Output = TypeVar("Output")
Progress = Callable[[str, str, int, int], object]
"""Told the stage, what it is at, the steps of it that are done, and how many there are."""


def no_progress(stage: str, current: str, done: int, total: int) -> None:
    """The progress callback of callers who do not want one."""
    del stage, current, done, total


@dataclass(frozen=True)
class Timing:
    """Wall times of one candidate.

    Attributes:
        milliseconds: one entry for each round.
    """

    milliseconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    @property
    def minimum(self) -> float:
        return min(self.milliseconds)

    @property
    def maximum(self) -> float:
        return max(self.milliseconds)


def time_interleaved(
    candidates: Mapping[str, Callable[[], Output]],
    repeats: int,
    *,
    examine: Callable[[str, Output], object] | None = None,
    progress: Progress = no_progress,
) -> dict[str, Timing]:
    """Times every candidate once a round, round after round.

    A machine that slows down or speeds up during the measurement thus does so for all of them,
    and their ratios hold. A first round, in which things compile, is not counted.

    Args:
        candidates: what to call, by name. A call must return only when its work is done.
        repeats: rounds that count.
        examine: told each candidate's name and output of the uncounted round, untimed.
        progress: told of each call before it starts, and of the end.

    Returns:
        The times of each candidate.
    """
    repeats = _checks.integer("repeats", repeats, minimum=1)
    for done, (name, call) in enumerate(candidates.items()):
        progress("warming up", name, done, len(candidates))
        output = call()
        if examine is not None:
            examine(name, output)
        del output

    total = repeats * len(candidates)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for done in range(total):
        name = list(candidates)[done % len(candidates)]
        progress("timing", name, done, total)
        start = time.perf_counter()
        output = candidates[name]()
        times[name].append((time.perf_counter() - start) * 1e3)
        del output
    progress("timing", "", total, total)
    return {name: Timing(tuple(milliseconds)) for name, milliseconds in times.items()}
