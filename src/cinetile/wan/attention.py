"""What the transformer asks of its self-attention, and the dense one."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int, PRNGKeyArray

from cinetile.attention import attention
from cinetile.grid import TokenGrid
from cinetile.kernels import default_blocks
from cinetile.masks import dense_mask
from cinetile.plans import TilePlan, plan_tiles


@runtime_checkable
class SelfAttention(Protocol):
    """Self-attention of one layer at one denoising step; `ct.SparseAttention` is one.

    Attributes of its class must not change, and it must be hashable or a pytree, since it is an
    argument of compiled functions.
    """

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
        """Attends in frame-major order.

        Returns:
            The output; with `return_record` also a pytree of arrays that says what was done.
        """


@dataclass(frozen=True)
class DenseAttention:
    """Every query attends to every key, with memory that does not grow with their product.

    Attributes:
        plan: a plan of mode "dense" on the video's token grid.
        implementation: as in `ct.attention`.
    """

    plan: TilePlan
    implementation: str | None = None

    @classmethod
    def on(cls, grid: TokenGrid, dtype: str, implementation: str | None = None) -> "DenseAttention":
        """Dense attention on a grid, with the tiles that suit the implementation."""
        block_q, block_kv = default_blocks(grid.num_tokens, dtype, implementation)
        return cls(plan_tiles(dense_mask(grid), block_q, block_kv, "dense"), implementation)

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
        output = attention(query, key, value, self.plan, implementation=self.implementation)
        return (output, None) if return_record else output
