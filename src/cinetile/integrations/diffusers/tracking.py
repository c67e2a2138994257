"""Where in a run a call of a model stands."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Callers round timesteps to the model's dtype; some widen them again.
_ROUNDED_TO = (torch.bfloat16, torch.float16)
# A timestep that a caller computed in float32 instead of taking the schedule's.
_RELATIVE_ERROR = 2.0**-22


@dataclass(frozen=True)
class StepInRun:
    """A denoising step.

    Attributes:
        step: index into the scheduler's whole schedule, from 0.
        num_steps: length of that schedule.
        schedule: what the run goes through; every run has an object of its own.

    Raises:
        ValueError: the schedule has no such step.
    """

    step: int
    num_steps: int
    schedule: Any

    def __post_init__(self) -> None:
        if not 0 <= self.step < self.num_steps:
            raise ValueError(f"step must lie in [0, {self.num_steps}), got {self.step}")


StepFinder = Callable[[Any, Mapping[str, Any]], StepInRun]
"""Takes the pipeline and the arguments of a model's `forward`; gives the step."""


def step_by_timestep(pipe: Any, arguments: Mapping[str, Any]) -> StepInRun:
    """Finds the step of a call by its `timestep`, exactly, or raises.

    A step fits if the schedule's timestep, rounded to the dtype of the given one, equals it. Where
    several fit, as in bfloat16 or with schedulers of second order, the scheduler's own count tells;
    so it does whether the schedule is the one that runs. The calls of a guidance pair share a step,
    and a run over part of a schedule (video to video, a callback that stops) has the steps of that
    part. Where timesteps are given token by token, as with an image for the first frame, the
    noisiest one counts.

    Args:
        pipe: the pipeline that runs, or anything with its `scheduler`.
        arguments: arguments of the model's `forward`, by name.

    Raises:
        ValueError: there is no timestep or no schedule yet, no step or more than one step fits, or
            the scheduler stands at another step.
    """
    scheduler = getattr(pipe, "scheduler", None)
    schedule = getattr(scheduler, "timesteps", None)
    given = arguments.get("timestep")
    owner = type(pipe).__name__
    if schedule is None or given is None:
        raise ValueError(
            f"the step of a call is known by its timestep and the scheduler of {owner}, but one "
            "of them is missing"
        )
    times = _on_cpu(schedule).reshape(-1)
    # Until then schedulers hold all the steps that they were trained with.
    trained = getattr(getattr(scheduler, "config", None), "num_train_timesteps", None)
    if getattr(scheduler, "num_inference_steps", None) is None and times.numel() == trained:
        raise ValueError(
            f"the scheduler of {owner} has no schedule yet, so the step of a call is not known: "
            "call its set_timesteps(), or run the pipeline that sparse attention was enabled in; "
            "in a denoising loop of your own around another scheduler, name the pipeline with "
            "handle.running(pipe)"
        )
    time = _on_cpu(given).max()
    fitting, possible = _fitting_steps(times, time)
    if not fitting:
        raise ValueError(
            f"timestep {float(time):g} is not in the schedule of {times.numel()} steps, "
            f"{float(times.max()):g} to {float(times.min()):g}, that the scheduler of {owner} has; "
            "is another scheduler in use? In a denoising loop of your own name its pipeline with "
            "handle.running(pipe)"
        )
    exact = getattr(pipe, "_current_timestep", None)
    running = [] if exact is None else _fitting_steps(times, exact)[0]
    step = _step_of(scheduler, fitting, possible, running)
    if step is None:
        raise ValueError(
            f"timestep {float(time):g} in {time.dtype} is that of the steps "
            f"{', '.join(map(str, fitting))} of {times.numel()}, and "
            f"{type(scheduler).__name__} does not tell which of them runs: give the model "
            "timesteps in float32, and where a run starts within a schedule call set_begin_index()"
        )
    return StepInRun(step, times.numel(), schedule)


def _on_cpu(values: Any) -> torch.Tensor:
    if not isinstance(values, torch.Tensor):
        values = torch.as_tensor(values, device="cpu")
    return values.detach().to("cpu")


def _fitting_steps(times: torch.Tensor, given: Any) -> tuple[list[int], list[int]]:
    """Steps whose timesteps are the given one, rounded as a caller may have rounded them.

    Returns:
        Those of the first rounding that gives any: to the dtype of the given timestep, then to
        smaller ones. And those of all roundings.
    """
    time = _on_cpu(given).max()
    wanted = time.to(torch.float64)
    near = (times.to(torch.float64) - wanted).abs() <= _RELATIVE_ERROR * wanted.abs()
    roundings = [
        times.to(dtype).to(torch.float64) == wanted for dtype in (time.dtype, *_ROUNDED_TO)
    ]
    found = [torch.nonzero(fits).reshape(-1).tolist() for fits in (*roundings, near)]
    return next((steps for steps in found if steps), []), sorted(
        {step for steps in found for step in steps}
    )


def _step_of(
    scheduler: Any, fitting: list[int], possible: list[int], running: list[int]
) -> int | None:
    """The one of several steps that runs; None if nobody tells.

    Args:
        scheduler: counts the steps, unless it is one without state.
        fitting: steps that the call's timestep fits, in ascending order.
        possible: steps that it fits if it was rounded and widened again.
        running: steps with the timestep that the pipeline says it runs.

    Raises:
        ValueError: the scheduler stands at none of them.
    """
    told = getattr(scheduler, "step_index", None)
    if told is not None:
        if int(told) not in possible:
            raise ValueError(
                f"{type(scheduler).__name__} stands at step {int(told)}, but the model was called "
                f"with the timestep of step {fitting[0]}: another scheduler is in use, or "
                "set_timesteps() was not called before this run. In a denoising loop of your own "
                "name the pipeline with handle.running(pipe)"
            )
        return int(told)
    counted = getattr(scheduler, "counter", None)  # of PNDM, from where its run started
    if counted in fitting:
        return counted
    both = [step for step in fitting if step in running]
    if len(both) == 1:
        return both[0]
    if len(fitting) == 1:
        return fitting[0]
    if not hasattr(scheduler, "step_index"):
        return None
    # Nothing was stepped yet, so that this is the first step of its run.
    begin = getattr(scheduler, "begin_index", None) or 0
    return begin if begin in fitting else None
