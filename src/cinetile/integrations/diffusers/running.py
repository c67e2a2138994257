"""Which pipeline runs a model, what it has done so far, and in which process."""

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from cinetile.layer.record import LayerRecord

# What the arguments are called that hold a pipeline where its methods or blocks call the model.
_HOLDERS = ("self", "components")
_NAMED: ContextVar[Any] = ContextVar("cinetile_named_pipeline", default=None)
_processes: set[int] = set()


def unwrapped(model: Any) -> Any:
    """A model without the wrappers of torch.compile and PEFT."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        get_base_model = getattr(model, "get_base_model", None)
        if inner is None and callable(get_base_model):
            inner = get_base_model()
        if inner is None or inner is model:
            return model
        model = inner


def component(pipe: Any, name: str) -> Any:
    """One of a pipeline's models without its wrappers; None if missing."""
    return unwrapped(getattr(pipe, name, None))


@contextlib.contextmanager
def named(pipe: Any) -> Iterator[None]:
    """Names the pipeline that runs in this context, whatever calls the model."""
    token = _NAMED.set(pipe)
    try:
        yield
    finally:
        _NAMED.reset(token)


def running_pipeline(module: Any, names: tuple[str, ...], default: Any) -> Any:
    """The pipeline that calls a model right now.

    That is the one named in this context, or else the innermost object on the call stack of this
    thread that has the model and a scheduler, or else the default.

    Args:
        module: the model.
        names: attributes under which a pipeline may hold it.
        default: the pipeline if none is found, as in a denoising loop of the caller's own.
    """
    pipe = _NAMED.get()
    if pipe is not None:
        return pipe
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        for holder in _HOLDERS:
            if holder in code.co_varnames[: code.co_argcount]:
                found = frame.f_locals.get(holder)
                if _runs(found, module, names):
                    return found
        frame = frame.f_back
    return default


def _runs(pipe: Any, module: Any, names: tuple[str, ...]) -> bool:
    return getattr(pipe, "scheduler", None) is not None and any(
        component(pipe, name) is module for name in names
    )


def check_process() -> None:
    """Raises RuntimeError in a process that was forked after sparse attention had been enabled.

    The threads of JAX and of the native kernel do not survive a fork, so calls would hang.
    """
    process = os.getpid()
    if _processes and process not in _processes:
        raise RuntimeError(
            f"sparse attention was enabled in process {min(_processes)} before this one, "
            f"{process}, was forked from it, and its threads are not here; start workers with "
            'multiprocessing.get_context("spawn"), or fork before anything of cinetile is used'
        )
    _processes.add(process)


@dataclass
class Run:
    """What has been called in one run over a schedule.

    Attributes:
        pipe: gives the pipeline, or None once it is gone.
        schedule: gives the schedule, or None once it is gone.
        num_forwards: calls of models that have begun.
        calls: attention calls in the order in which they ran.
    """

    pipe: Callable[[], Any]
    schedule: Callable[[], Any]
    num_forwards: int = 0
    calls: list[LayerRecord] = field(default_factory=list)


class Runs:
    """The runs of a handle: those whose schedules still exist, and the latest one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[int, Run] = {}
        self._latest: Run | None = None

    def begin_forward(self, schedule: Any, pipe: Any) -> tuple[Run, int]:
        """The run over a schedule, and the number of the model's call that begins in it."""
        with self._lock:
            run = self._runs.get(id(schedule))
            if run is None or run.schedule() is not schedule:
                alive = {key: run for key, run in self._runs.items() if run.schedule() is not None}
                run = self._latest = Run(_reference(pipe), _reference(schedule))
                alive.pop(id(schedule), None)
                self._runs = {**alive, id(schedule): run}
            number = run.num_forwards
            run.num_forwards += 1
            return run, number

    def calls(self, pipe: Any = None) -> tuple[LayerRecord, ...]:
        """What the run did that began last, of any pipeline or of the given one."""
        with self._lock:
            run = self._latest
            if pipe is not None:
                of_pipe = [run for run in self._runs.values() if run.pipe() is pipe]
                run = of_pipe[-1] if of_pipe else None
            return () if run is None else tuple(run.calls)


def _reference(thing: Any) -> Callable[[], Any]:
    """Gives the thing while it exists; holds on to what cannot be referenced weakly."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing
