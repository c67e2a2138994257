"""What every attention implementation is and does."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Array, Float, Int

from cinetile.plans import TilePlan


@dataclass(frozen=True)
class AttentionRequest:
    """The static facts of one call, by which an implementation says whether it can take it.

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

    Subclasses take and return arrays in frame-major order; moving tokens to the orders that a
    plan's mask prefers, and back, is their work, since some can do it on the fly.
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
        """Which of its code paths runs here; its name where there is but one."""
        return self.name

    @abc.abstractmethod
    def unavailable(self) -> str | None:
        """Why it cannot run on this machine at all; None if it can.

        Raises:
            ValueError: a setting that is its own alone is wrong.
        """

    def unsupported(self, request: AttentionRequest) -> str | None:
        """Why it cannot take this call; None if it can."""
        del request
        return None

    @abc.abstractmethod
    def default_blocks(self, num_tokens: int, dtype: str) -> tuple[int, int]:
        """The `block_q` and `block_kv` that suit it where the caller has no wish."""

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
            routes: index into `plans` for each head, possibly traced; None where there is one.
            plans: what each route visits.
            scale: factor on the logits.
            prompt_lengths: text tokens of each batch row that exist, possibly traced: no query
                attends to those behind, and their own rows may give anything finite. In a
                plan's key order they are the end of `key_order.text_range`. None where the
                whole text exists.

        Returns:
            The output in the dtype of `query` and the natural log-sum-exp of each row's scaled
            and kept logits in float32; zeros and minus infinity where a row has no key left.
        """


ImplementationChoice = str | Implementation | Sequence[str | Implementation] | None
"""None for the best that can run, a name, an `Implementation`, or a sequence of these."""
