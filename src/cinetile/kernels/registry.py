"""The implementations that callers can choose from, and the choice itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from cinetile.kernels.base import AttentionRequest, Implementation
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
        automatic: whether it may be chosen where the caller names none.
        requirements: what it needs.
        reason: why it is not available; None if it is.
        variant: which of its code paths runs here; None if it is not available.
    """

    name: str
    available: bool
    automatic: bool
    requirements: str
    reason: str | None
    variant: str | None

    def __str__(self) -> str:
        variant = "" if self.variant in (None, self.name) else f" ({self.variant})"
        state = f"available{variant}" if self.available else f"not available: {self.reason}"
        return f"{self.name}: {state} (needs {self.requirements})"


def implementations() -> tuple[ImplementationStatus, ...]:
    """Lists all implementations in order of preference, and why some cannot run here."""
    statuses = []
    for implementation in _IMPLEMENTATIONS:
        try:
            reason = implementation.unavailable()
        except ValueError as error:
            reason = str(error)
        statuses.append(
            ImplementationStatus(
                implementation.name,
                reason is None,
                implementation.automatic,
                implementation.requirements,
                reason,
                implementation.variant if reason is None else None,
            )
        )
    return tuple(statuses)


def default_blocks(
    num_tokens: int,
    dtype: str,
    implementation: str | Sequence[str] | None = None,
    *,
    sparse: bool = False,
) -> tuple[int, int]:
    """The `block_q` and `block_kv` that suit an implementation where the caller has no wish.

    Args:
        num_tokens: tokens of the sequence.
        dtype: "float32", "bfloat16" or "float16".
        implementation: a name, or a sequence of names of which the first that can run counts;
            by default the one that `attention` would choose here.
        sparse: whether the tiles have to follow a sparse mask: on a short sequence they are then
            at most a 16th of it, if the implementation has such small ones.

    Raises:
        ValueError: the name is unknown.
        NotImplementedError: the implementation cannot run on this machine.
    """
    chosen = select_implementation(implementation, None)
    block_q, block_kv = chosen.default_blocks(num_tokens, dtype)
    if sparse and num_tokens < _SHORT_SEQUENCE:
        largest = 1 << max(0, (num_tokens // _TILES_A_SIDE).bit_length() - 1)
        finest_q, finest_kv = chosen.finest_blocks
        block_q = min(block_q, max(finest_q, largest))
        block_kv = min(block_kv, max(finest_kv, largest))
    return block_q, block_kv


def select_implementation(
    choice: str | Sequence[str] | None, request: AttentionRequest | None
) -> Implementation:
    """Picks the implementation that runs a call.

    Args:
        choice: None for the first automatic one that can run, a name for exactly that one, or
            a sequence of names for the first of them that can run.
        request: what is to be run; None to ask only what can run on this machine.

    Raises:
        TypeError: `choice` is neither a name nor a sequence.
        ValueError: a name is unknown or the sequence is empty.
        NotImplementedError: none of the named ones can run; says why for each.
    """
    known = {implementation.name: implementation for implementation in _IMPLEMENTATIONS}
    if choice is None:
        candidates = [one for one in _IMPLEMENTATIONS if one.automatic]
    elif not isinstance(choice, Sequence):
        raise TypeError(
            f"implementation must be None, a name or a sequence of names, got {choice!r}"
        )
    else:
        names = [choice] if isinstance(choice, str) else list(choice)
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise ValueError(
                f"implementation must be None, one of {', '.join(map(repr, known))} or a "
                f"sequence of these, got {choice!r}"
            )
        candidates = [known[name] for name in names]

    reasons = []
    for candidate in candidates:
        reason = candidate.unavailable()
        if reason is None and request is not None:
            reason = candidate.unsupported(request)
        if reason is None:
            return candidate
        reasons.append(f"{candidate.name}: {reason}")
    raise NotImplementedError("no implementation can run this call: " + "; ".join(reasons))
