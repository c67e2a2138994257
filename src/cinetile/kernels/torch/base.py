"""What every engine for PyTorch tensors is and does."""

import abc
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int

from cinetile.plans import TilePlan

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""Dtypes that attention takes, and their names."""


@dataclass(frozen=True)
class TensorRequest:
    """The facts of the heads that share a plan, by which an engine says whether it can run them.

    Attributes:
        plan: what these heads visit.
        device: where the tensors are.
        dtype: of query, key and value.
        head_dim: features per head.
        has_prompt_lengths: whether some of the text is padding.
        return_lse: whether the log-sum-exp is needed.
    """

    plan: TilePlan
    device: torch.device
    dtype: torch.dtype
    head_dim: int
    has_prompt_lengths: bool = False
    return_lse: bool = False


@dataclass(frozen=True, eq=False)
class HeadGroup:
    """The heads of a call that share a plan and a prompt length, and where their rows go.

    Attributes:
        query: `[batch, tokens, heads, head_dim]`, all heads, frame-major.
        key: as `query`.
        value: as `query`.
        rows: batch row of each head of the group.
        heads: index of each head of the group.
        output: takes the group's output; as `query`, zeros before.
        lse: takes the group's log-sum-exp, `[batch, tokens, heads]`, minus infinity before; None
            if it is not needed.
        plan: what the heads visit.
        scale: factor on the logits.
        absent: text tokens at the end of the text that are padding.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rows: Int[np.ndarray, " group"]
    heads: Int[np.ndarray, " group"]
    output: torch.Tensor
    lse: torch.Tensor | None
    plan: TilePlan
    scale: float
    absent: int = 0

    @property
    def size(self) -> int:
        """Heads in the group, over all batch rows."""
        return len(self.heads)


class Engine(abc.ABC):
    """One way to run attention over a plan on PyTorch tensors."""

    name: ClassVar[str]
    requirements: ClassVar[str]
    """What it needs, in words, for tables and errors."""

    @property
    def path(self) -> str:
        """Name of the engine, with what runs below it where that can differ."""
        return self.name

    @abc.abstractmethod
    def unavailable(self, device: torch.device) -> str | None:
        """Why it cannot run on a device at all; None if it can."""

    @abc.abstractmethod
    def unsupported(self, request: TensorRequest) -> str | None:
        """Why it cannot take these heads; None if it can."""

    @abc.abstractmethod
    def attend(self, group: HeadGroup) -> None:
        """Writes output and log-sum-exp of a group; arguments are checked already.

        Rows of padding keep what `output` and `lse` hold, or take anything finite.
        """
