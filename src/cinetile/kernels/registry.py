"""The implementations that callers can choose from, and the choice itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cinetile.kernels.base import AttentionRequest, Implementation, ImplementationChoice
from cinetile.kernels.cpu import CpuImplementation
from cinetile.kernels.pallas_tpu import PallasTpuImplementation, PallasTpuTwoKernels
from cinetile.kernels.reference import ReferenceImplementation
from cinetile.kernels.xla import XlaImplementation

# A sparse plan on fewer tokens than this gets at least so many tiles along either side.
_SHORT_SEQUENCE, _TILES_A_SIDE = 8192, 16

# In order of preference: the first one that can run is taken where the caller names none.
_IMPLEMENTATIONS: tuple[Implementation, ...] = (
    PallasTpuImplementation(),
    PallasTpuTwoKernels(),
    CpuImplementation(),
    XlaImplementation(),
    ReferenceImplementation(),
)


@dataclass(frozen=True)
class ImplementationStatus:
    """One row of `implementations()`.

    Attributes:
        name: what `attention(..., implementation=name)` takes.
        available: whether it can run on this machine.
        automatic: whether it can be chosen if the caller names no implementation.
        requirements: what it needs.
        reason: why it is not available; None if it is.
        path: the code path that runs here; None if it is not available.
    """

    name: str
    available: bool
    automatic: bool
    requirements: str
    reason: str | None
    path: str | None

    def __str__(self) -> str:
        path = "" if self.path in (None, self.name) else f" ({self.path})"
        state = f"available{path}" if self.available else f"not available: {self.reason}"
        return f"{self.name}: {state} (needs {self.requirements})"


def implementations() -> tuple[ImplementationStatus, ...]:
    """Lists all implementations in order of preference, and why some cannot run here."""
    return tuple(status_of(implementation) for implementation in _IMPLEMENTATIONS)


def status_of(implementation: Implementation) -> ImplementationStatus:
    """Returns what one implementation needs, and why it cannot run here if it cannot."""
    try:
        reason = implementation.unavailable()
    except ValueError as error:
        reason = str(error)
    return ImplementationStatus(
        implementation.name,
        reason is None,
        implementation.automatic,
        implementation.requirements,
        reason,
        implementation.path if reason is None else None,
    )


def default_blocks(
    num_tokens: int,
    dtype: str,
    implementation: ImplementationChoice = None,
    *,
    sparse: bool = False,
) -> tuple[int, int]:
    """Returns the `block_q` and `block_kv` that suit an implementation by default.

    Args:
        num_tokens: tokens of the sequence.
        dtype: "float32", "bfloat16" or "float16".
        implementation: as for `attention`; the first that can run on this machine is used.
        sparse: whether the tiles must follow a sparse mask. On short sequences they are then at
            most 1/16 of the sequence, if the implementation has tiles that small.

    Raises:
        ValueError: the name is unknown.
        NotImplementedError: the implementation cannot run on this machine.
    """
    chosen = select_implementation(implementation, None)
    return blocks_of(chosen, num_tokens, dtype, sparse=sparse)


def blocks_of(
    implementation: Implementation, num_tokens: int, dtype: str, *, sparse: bool
) -> tuple[int, int]:
    """Returns the `block_q` and `block_kv` of an implementation; see `default_blocks`."""
    block_q, block_kv = implementation.default_blocks(num_tokens, dtype)
    if sparse and num_tokens < _SHORT_SEQUENCE:
        largest = 1 << max(0, (num_tokens // _TILES_A_SIDE).bit_length() - 1)
        finest_q, finest_kv = implementation.finest_blocks
        block_q = min(block_q, max(finest_q, largest))
        block_kv = min(block_kv, max(finest_kv, largest))
    return block_q, block_kv


def select_implementation(
    choice: ImplementationChoice, request: AttentionRequest | None
) -> Implementation:
    """Picks the implementation that runs a call.

    Args:
        choice: None for the first automatic one that can run; a name or an `Implementation` for
            exactly that one; a sequence of these for the first of them that can run.
        request: the call; None to check only what can run on this machine.

    Raises:
        TypeError: `choice` is of another type.
        ValueError: a name is unknown or the sequence is empty.
        NotImplementedError: no allowed implementation can run the call; the message says why.
    """

    def reason(candidate: Implementation) -> str | None:
        return None if request is None else candidate.unsupported(request)

    return first_able(candidates(choice), reason)


def first_able(
    candidates: Sequence[Implementation], reason: Callable[[Implementation], str | None]
) -> Implementation:
    """Returns the first implementation that can run here and that `reason` does not refuse.

    Args:
        candidates: implementations in order of preference.
        reason: returns why an implementation cannot take a call; None if it can. It is asked only
            of those that can run on this machine.

    Raises:
        NotImplementedError: there is none; the message gives each reason.
    """
    reasons = []
    for candidate in candidates:
        why_not = candidate.unavailable()
        if why_not is None:
            why_not = reason(candidate)
        if why_not is None:
            return candidate
        reasons.append(f"{candidate.name}: {why_not}")
    raise NotImplementedError("no implementation can run this call: " + "; ".join(reasons))


def candidates(choice: ImplementationChoice) -> tuple[Implementation, ...]:
    """Returns the implementations that a choice allows, in order of preference.

    Raises:
        TypeError: `choice` is of a type that `select_implementation` does not take.
        ValueError: a name is unknown or the sequence is empty.
    """
    if choice is None:
        return tuple(known for known in _IMPLEMENTATIONS if known.automatic)
    if isinstance(choice, str | Implementation):
        choice = (choice,)
    elif not isinstance(choice, Sequence):
        raise TypeError(
            f"implementation must be None, a name, an Implementation or a sequence of these, "
            f"got {choice!r}"
        )
    by_name = {known.name: known for known in _IMPLEMENTATIONS}
    found = [entry if isinstance(entry, Implementation) else by_name.get(entry) for entry in choice]
    if not found or None in found:
        shown = choice[0] if len(choice) == 1 else choice
        raise ValueError(
            f"implementation must be None, one of {', '.join(map(repr, by_name))} or a "
            f"sequence of these, got {shown!r}"
        )
    return tuple(known for known in found if known is not None)


def frozen_choice(choice: ImplementationChoice) -> ImplementationChoice:
    """Returns the choice in hashable form: a sequence becomes a tuple."""
    if isinstance(choice, Sequence) and not isinstance(choice, str):
        return tuple(choice)
    return choice
