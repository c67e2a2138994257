"""What the transformer asks of its self-attention, and the dense one."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int, PRNGKeyArray

from cinetile.attention import attention
from cinetile.grid import TokenGrid
from cinetile.kernels import default_blocks
from cinetile.masks import dense_mask
from cinetile.parallel.head_exchange import exchange_heads
from cinetile.parallel.layout import ArrayLayout
from cinetile.parallel.spread import over_mesh
from cinetile.plans import TilePlan, plan_tiles


@runtime_checkable
class SelfAttention(Protocol):
    """Self-attention of the layers of a model; `ct.SparseAttention` is one.

    It is called as `attend(query, key, value, step=step, layer=layer, rng=rng,
    return_record=False)` with arrays `[batch, tokens, heads, head_dim]` in frame-major order,
    indices that may be traced, and the same key throughout a run. It returns the output; with
    `return_record` also a pytree of arrays that says what was done. It must be hashable: it
    is a static argument of compiled functions.
    """

    def __call__(self, *arrays: Any, **call: Any) -> Any:
        """Attends."""


@dataclass(frozen=True)
class DenseAttention:
    """Every query attends to every key, with memory that does not grow with their product.

    Attributes:
        plan: a plan of mode "dense" on the video's token grid.
        implementation: as in `ct.attention`.
        layout: how the arrays lie on a mesh; None for one device.
    """

    plan: TilePlan
    implementation: str | Sequence[str] | None = None
    layout: ArrayLayout | None = None

    @classmethod
    def on(
        cls,
        grid: TokenGrid,
        dtype: str,
        implementation: str | Sequence[str] | None = None,
        layout: ArrayLayout | None = None,
    ) -> "DenseAttention":
        """Dense attention on a grid, with the tiles that suit the implementation."""
        if implementation is not None and not isinstance(implementation, str):
            implementation = tuple(implementation)
        block_q, block_kv = default_blocks(grid.num_tokens, dtype, implementation)
        plan = plan_tiles(dense_mask(grid), block_q, block_kv, "dense")
        return cls(plan, implementation, layout)

    def __call__(
        self,
        query: Float[Array, "batch tokens heads head_dim"],
        key: Float[Array, "batch tokens heads head_dim"],
        value: Float[Array, "batch tokens heads head_dim"],
        *,
        step: Int[Array, ""],
        layer: Int[Array, ""],
        rng: PRNGKeyArray,
        return_record: bool = False,
    ) -> Any:
        """See `SelfAttention`; the record is None."""
        del step, layer, rng
        if self.layout is None:
            output, _ = self._work(query, key, value, None)
        else:
            tokens = self.plan.grid.num_tokens
            local = functools.partial(exchange_heads, self._work, self.layout, tokens)
            output, _ = over_mesh(local, self.layout, (query, key, value))
        return (output, None) if return_record else output

    def _work(self, query: Array, key: Array, value: Array, valid_text: None) -> Any:
        del valid_text
        output = attention(query, key, value, self.plan, implementation=self.implementation)
        return output, ()
