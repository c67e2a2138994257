"""Where in a run a call of a model stands."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Models are given timesteps in their own dtype; bfloat16 keeps eight bits.
_RELATIVE_ERROR = 2.0**-7


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
    """Finds a call's `timestep` in the schedule of the pipeline's scheduler.

    So the calls of a guidance pair share a step, and a run over part of a schedule (video to
    video, a callback that stops) has the steps of that part. Where timesteps are given
    token by token, as with an image for the first frame, the noisiest one counts.

    Raises:
        ValueError: there is no timestep or no schedule yet, or the schedule has none like it.
    """
    scheduler = getattr(pipe, "scheduler", None)
    schedule = getattr(scheduler, "timesteps", None)
    given = arguments.get("timestep")
    if schedule is None or given is None:
        raise ValueError(
            f"the step of a call is known by its timestep and the scheduler of "
            f"{type(pipe).__name__}, but one of them is missing"
        )
    times = torch.as_tensor(schedule).detach().to("cpu", torch.float64).reshape(-1)
    # Until then schedulers hold all the steps that they were trained with.
    trained = getattr(getattr(scheduler, "config", None), "num_train_timesteps", None)
    if getattr(scheduler, "num_inference_steps", None) is None and times.numel() == trained:
        raise ValueError(
            f"the scheduler of {type(pipe).__name__} has no schedule yet, so the step of a call "
            "is not known: call its set_timesteps(), or run the pipeline that sparse attention "
            "was enabled in and not another one with the same transformer"
        )
    time = float(torch.as_tensor(given).detach().to("cpu", torch.float64).max())
    # What the pipeline says is exact, but left over where a run was stopped by an exception.
    exact = getattr(pipe, "_current_timestep", None)
    if exact is not None and abs(float(exact) - time) <= _RELATIVE_ERROR * abs(time):
        time = float(exact)
    distances = (times - time).abs()
    nearest = distances.min()
    if not float(nearest) <= _RELATIVE_ERROR * abs(time):
        raise ValueError(
            f"timestep {time:g} is not in the schedule of {times.numel()} steps, "
            f"{float(times.max()):g} to {float(times.min()):g}, that the scheduler of "
            f"{type(pipe).__name__} has; was another pipeline run than the one that sparse "
            "attention was enabled in?"
        )
    steps = torch.nonzero(distances == nearest).reshape(-1).tolist()
    # Whole timesteps may occur twice; then the scheduler tells which of them is meant.
    told: Any = getattr(scheduler, "step_index", None)
    return StepInRun(told if told in steps else steps[0], times.numel(), schedule)
