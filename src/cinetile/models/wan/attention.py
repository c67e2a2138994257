"""What the transformer asks of its self-attention, and the dense one."""

import functools
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int, PRNGKeyArray

from cinetile.attention import attend_checked
from cinetile.grid import TokenGrid
from cinetile.kernels.arguments import check_arrays
from cinetile.kernels.base import ImplementationChoice
from cinetile.layer.layer_plan import CallShape, LayerPlan, plan_layer
from cinetile.parallel.head_exchange import exchange_heads
from cinetile.parallel.layout import ArrayLayout
from cinetile.parallel.spread import over_mesh
from cinetile.plans import TilePlan


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
        planned: a layer plan without a policy, on the video's token grid.
        layout: how the arrays lie on a mesh; None for one device.
    """

    planned: LayerPlan
    layout: ArrayLayout | None = None

    @classmethod
    def on(
        cls,
        grid: TokenGrid,
        dtype: str,
        implementation: ImplementationChoice = None,
        layout: ArrayLayout | None = None,
    ) -> "DenseAttention":
        """Plans dense attention on a grid, with the tiles that suit the implementation."""
        return cls(plan_layer(None, grid, dtype=dtype, implementation=implementation), layout)

    @property
    def plan(self) -> TilePlan:
        """The plan, of mode "dense"."""
        return self.planned.plans[0]

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
        """Attends; see `SelfAttention`. The record is None."""
        del step, layer, rng
        planned = self.planned
        check_arrays(query, key, value, planned.grid)
        batch, _, heads, head_dim = query.shape
        shape = CallShape(batch, heads, head_dim, str(query.dtype), has_prompt_lengths=False)
        planned = planned.for_call(shape)

        def work(query: Array, key: Array, value: Array, prompt_lengths: None) -> Any:
            scale = head_dim**-0.5
            arguments = None, prompt_lengths, planned.plans, scale
            return attend_checked(planned.implementation, query, key, value, *arguments)[0], ()

        if self.layout is None:
            output, _ = work(query, key, value, None)
        else:
            tokens = planned.grid.num_tokens
            local = functools.partial(exchange_heads, work, self.layout, tokens)
            output, _ = over_mesh(local, self.layout, (query, key, value))
        return (output, None) if return_record else output
