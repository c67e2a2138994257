"""The engines for PyTorch tensors, and the choice among them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cinetile.kernels.torch.base import Engine, TensorRequest
from cinetile.kernels.torch.flex import FlexEngine
from cinetile.kernels.torch.sdpa import SdpaEngine
from cinetile.kernels.torch.window_pair import WindowPairEngine

# In order of preference: the first that can run the heads of a plan runs them.
ENGINES: tuple[Engine, ...] = (SdpaEngine(), WindowPairEngine(), FlexEngine())


@dataclass(frozen=True)
class EngineStatus:
    """One row of `engines()`.

    Attributes:
        name: what `attention(..., implementation=name)` takes.
        requirements: what it needs.
        reason: why it cannot run on the device; None if it can.
        path: its name with what runs below it; None if it cannot run.
    """

    name: str
    requirements: str
    reason: str | None
    path: str | None

    def __str__(self) -> str:
        state = f"not available: {self.reason}" if self.reason else f"available ({self.path})"
        return f"{self.name}: {state} (needs {self.requirements})"


def engines(device: torch.device | str) -> tuple[EngineStatus, ...]:
    """Lists the engines in order of preference, and why some cannot run on a device."""
    device = torch.device(device)
    statuses = []
    for engine in ENGINES:
        reason = engine.unavailable(device)
        path = None if reason else engine.path
        statuses.append(EngineStatus(engine.name, engine.requirements, reason, path))
    return tuple(statuses)


def named_engines(choice: str | Sequence[str] | None) -> tuple[Engine, ...]:
    """The engines that a caller allows.

    Args:
        choice: None for all, a name, or a sequence of names in order of preference.

    Raises:
        TypeError: `choice` is neither a name nor a sequence.
        ValueError: a name is unknown or there is none.
    """
    if choice is None:
        return ENGINES
    if not isinstance(choice, Sequence):
        raise TypeError(
            f"implementation must be None, a name or a sequence of names, got {choice!r}"
        )
    known = {engine.name: engine for engine in ENGINES}
    names = [choice] if isinstance(choice, str) else list(choice)
    if not names or any(name not in known for name in names):
        raise ValueError(
            f"implementation must be None, one of {', '.join(map(repr, known))} or a sequence "
            f"of these for PyTorch tensors, got {choice!r}"
        )
    return tuple(known[name] for name in names)


def select_engine(choice: str | Sequence[str] | None, request: TensorRequest) -> Engine:
    """Picks the engine for the heads of one plan.

    Args:
        choice: as for `named_engines`.
        request: what is to run.

    Raises:
        TypeError: `choice` is neither a name nor a sequence.
        ValueError: a name is unknown or there is none.
        NotImplementedError: no allowed engine can run it; says why for each.
    """
    reasons = []
    for engine in named_engines(choice):
        reason = engine.unavailable(request.device) or engine.unsupported(request)
        if reason is None:
            return engine
        reasons.append(f"{engine.name}: {reason}")
    raise NotImplementedError(
        f"no engine can run {request.plan!r} on {request.device}: " + "; ".join(reasons)
    )
