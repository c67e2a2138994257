"""The stages of a pipeline call: how long each takes, and telling a caller how far it is."""

import contextlib
import time
from collections.abc import Callable, Iterator

Progress = Callable[[str, str, int, int], object]
"""Called with the name of a stage, "", the finished units of work and all units of work."""


class StageClock:
    """Measures the wall time of the stages of one call and reports progress.

    Args:
        progress: called when a stage starts, advances or ends; None to report nothing.

    Attributes:
        seconds: wall time of each finished stage, by its name.
    """

    def __init__(self, progress: Progress | None) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    def show(self, stage: str, done: int, total: int) -> None:
        """Reports that `done` of `total` units of a stage are finished."""
        if self._progress is not None:
            self._progress(stage, "", done, total)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measures a stage that reports only its start and its end."""
        self.show(name, 0, 1)
        with self.measured(name):
            yield
        self.show(name, 1, 1)

    @contextlib.contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Measures a stage that reports its own progress."""
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started
