"""The interface of attention implementations."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Array, Float, Int

from cinetile.plans import TilePlan


@dataclass(frozen=True)
class AttentionRequest:
    """Static facts of one call; an implementation decides from them whether it can run the call.

    Attributes:
        batch: rows of the batch.
        heads: attention heads.
        head_dim: features of a head.
        dtype: name of the arrays' dtype, "float32", "bfloat16" or "float16".
        plans: plans that a head can be routed to; all on one token grid.
        has_prompt_lengths: whether part of the text may be padding, by lengths known at run time.
    """

    batch: int
    heads: int
    head_dim: int
    dtype: str
    plans: tuple[TilePlan, ...]
    has_prompt_lengths: bool = False


class Implementation(abc.ABC):
    """One way to run attention over tile plans.

    Subclasses take and return arrays in frame-major order. They move tokens to the orders of a
    plan's mask and back themselves, since some can do it while they load tiles.
    """

    name: ClassVar[str]
    requirements: ClassVar[str]
    """What it needs, in words, for tables and errors."""
    automatic: ClassVar[bool] = True
    """Whether it may be chosen where the caller names none."""

    finest_blocks: ClassVar[tuple[int, int]] = (32, 32)
    """The smallest `block_q` and `block_kv` that it is asked for unless a caller wishes so."""

    moves_tokens: ClassVar[bool] = True
    """Whether it moves tokens to a plan's orders and back in passes of their own."""

    @property
    def path(self) -> str:
        """The code path that runs here; the implementation's name if it has only one."""
        return self.name

    @abc.abstractmethod
    def unavailable(self) -> str | None:
        """Why it cannot run on this machine at all; None if it can.

        Raises:
            ValueError: a setting that only this implementation has is wrong.
        """

    def unsupported(self, request: AttentionRequest) -> str | None:
        """Why it cannot take this call; None if it can."""
        del request
        return None

    @abc.abstractmethod
    def default_blocks(self, num_tokens: int, dtype: str) -> tuple[int, int]:
        """The default `block_q` and `block_kv`."""

    @abc.abstractmethod
    def attend(
        self,
        query: Float[Array, "batch tokens heads head_dim"],
        key: Float[Array, "batch tokens heads head_dim"],
        value: Float[Array, "batch tokens heads head_dim"],
        routes: Int[Array, "batch heads"] | None,
        *,
        plans: tuple[TilePlan, ...],
        scale: float,
        prompt_lengths: Int[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch tokens heads head_dim"], Float[Array, "batch tokens heads"]]:
        """Runs attention; arguments are checked already.

        Args:
            query: queries in frame-major order.
            key: keys in frame-major order.
            value: values in frame-major order.
            routes: index into `plans` for each head, possibly traced; None with a single plan.
            plans: what each route visits.
            scale: factor on the logits.
            prompt_lengths: number of text tokens in each batch row that are not padding, possibly
                traced. No query attends to padding; output rows of padding are finite but
                unspecified. In a plan's key order, padding is the end of
                `key_order.text_range`. None without padding.

        Returns:
            The output in the dtype of `query` and the natural log-sum-exp of each row's scaled
            and kept logits in float32; zeros and minus infinity for a row without keys.
        """


ImplementationChoice = str | Implementation | Sequence[str | Implementation] | None
"""None for the best that can run, a name, an `Implementation`, or a sequence of these."""
