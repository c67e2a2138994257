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
    """

    step: int
    num_steps: int
    schedule: Any


StepFinder = Callable[[Any, Mapping[str, Any]], StepInRun]
"""Takes the pipeline and the arguments of a model's `forward`; gives the step."""


def step_by_timestep(pipe: Any, arguments: Mapping[str, Any]) -> StepInRun:
    """Finds a call's `timestep` in the schedule of the pipeline's scheduler.

    So the calls of a guidance pair share a step, and a run over part of a schedule (video to
    video, a callback that stops) has the steps of that part. Where timesteps are given
    token by token, as with an image for the first frame, the noisiest one counts.

    Raises:
        ValueError: there is no timestep, or the schedule has none like it.
    """
    schedule = getattr(getattr(pipe, "scheduler", None), "timesteps", None)
    given = arguments.get("timestep")
    if schedule is None or given is None:
        raise ValueError(
            f"the step of a call is known by its timestep and the scheduler of "
            f"{type(pipe).__name__}, but one of them is missing"
        )
    times = torch.as_tensor(schedule).detach().to("cpu", torch.float64).reshape(-1)
    time = float(torch.as_tensor(given).detach().to("cpu", torch.float64).max())
    # What the pipeline says is exact, but left over where a run was stopped by an exception.
    exact = getattr(pipe, "_current_timestep", None)
    if exact is not None and abs(float(exact) - time) <= _RELATIVE_ERROR * abs(time):
        time = float(exact)
    distances = (times - time).abs()
    nearest = distances.min()
    if not float(nearest) <= _RELATIVE_ERROR * abs(time):
        raise ValueError(
            f"timestep {time:g} is not in the scheduler's schedule of {times.numel()} steps, "
            f"{float(times.max()):g} to {float(times.min()):g}"
        )
    steps = torch.nonzero(distances == nearest).reshape(-1).tolist()
    # Whole timesteps may occur twice; then the scheduler tells which of them is meant.
    told: Any = getattr(pipe.scheduler, "step_index", None)
    return StepInRun(told if told in steps else steps[0], times.numel(), schedule)
