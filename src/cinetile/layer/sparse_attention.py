"""`SparseAttention`: the attention layer that a model calls in place of its own."""

import functools
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from cinetile import _checks
from cinetile.grid import TokenGrid
from cinetile.kernels.arguments import AnyArray, check_arrays, check_prompt_length, check_scale
from cinetile.kernels.base import ImplementationChoice
from cinetile.kernels.registry import frozen_choice
from cinetile.layer.layer_plan import CallShape, LayerPlan, plan_layer
from cinetile.layer.record import LayerRecord
from cinetile.parallel.head_exchange import exchange_heads
from cinetile.parallel.layout import ArrayLayout, array_layout
from cinetile.parallel.spread import over_mesh
from cinetile.policy import SparsityPolicy
from cinetile.routing.route import AnyKey

Index = int | Int[AnyArray, ""]


@jax.tree_util.register_static
@dataclass(frozen=True)
class SparseAttention:
    """Self-attention under a sparsity policy: routes every head, attends, and restores the order.

    A head for which no pattern has a finite error attends densely: inf or NaN outside of the
    padding then shows in the output as it would without sparsity.

    The plans of everything that the policy can ask for are made once, on construction. Calls
    may then be traced: step, layer, routes and densities change without recompilation. Instances
    are frozen, compare and hash by their settings, and pass through `jax.jit` as static values.

    Attributes:
        grid: the tokens that self-attention sees.
        policy: what is sparse, when and how.
        mesh: the devices of a call; None for the one that the arrays are on. Tokens that are
            spread over devices are exchanged for heads inside and back again.
        sharding: which mesh axes the axes `[batch, tokens, heads, head_dim]` of query, key,
            value and output are spread over; by default the mesh axes named "data", "sequence"
            and "heads", as far as there are such. Tokens and heads that do not divide by their
            devices are padded inside.
        implementation: as for `attention`.
        num_steps: denoising steps of a run; needed where the policy has fractions of them.
        num_layers: layers of the model, needed for fractions of layers.
        expert: "high_noise" or "low_noise" for the two models of Wan 2.2.
        dtype: of the arrays, by which tile sizes are chosen where the policy leaves them open.
        planned: the plans; made from the rest.
        layout: how the arrays are sharded over the mesh; None without a mesh.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or the policy does not fit the grid.
        NotImplementedError: the named implementation cannot run here.
    """

    grid: TokenGrid
    policy: SparsityPolicy
    mesh: Mesh | None = field(default=None, kw_only=True)
    sharding: PartitionSpec | None = field(default=None, kw_only=True)
    implementation: ImplementationChoice = field(default=None, kw_only=True)
    num_steps: int | None = field(default=None, kw_only=True)
    num_layers: int | None = field(default=None, kw_only=True)
    expert: str | None = field(default=None, kw_only=True)
    dtype: str = field(default="bfloat16", kw_only=True)
    planned: LayerPlan = field(init=False, compare=False, repr=False)
    layout: ArrayLayout | None = field(init=False, compare=False, repr=False)
    _plan_of: dict[CallShape, LayerPlan] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.mesh is None and self.sharding is not None:
            raise ValueError(f"sharding needs a mesh, got {self.sharding} and none")
        layout = None if self.mesh is None else array_layout(self.mesh, self.sharding)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "implementation", frozen_choice(self.implementation))
        if not isinstance(self.policy, SparsityPolicy):
            raise TypeError(f"policy must be a SparsityPolicy, got {type(self.policy).__name__}")
        planned = plan_layer(
            self.policy,
            self.grid,
            num_steps=self.num_steps,
            num_layers=self.num_layers,
            expert=self.expert,
            dtype=_checks.choice("dtype", self.dtype, ("bfloat16", "float32", "float16")),
            implementation=self.implementation,
        )
        object.__setattr__(self, "planned", planned)
        object.__setattr__(self, "_plan_of", {})

    @overload
    def __call__(
        self,
        query: Float[AnyArray, "batch tokens heads head_dim"],
        key: Float[AnyArray, "batch tokens heads head_dim"],
        value: Float[AnyArray, "batch tokens heads head_dim"],
        *,
        step: Index,
        layer: Index,
        rng: AnyKey,
        scale: float | None = ...,
        prompt_length: int | Int[AnyArray, "*batch"] | None = ...,
        return_record: Literal[False] = ...,
    ) -> Float[Array, "batch tokens heads head_dim"]: ...
    @overload
    def __call__(
        self,
        query: Float[AnyArray, "batch tokens heads head_dim"],
        key: Float[AnyArray, "batch tokens heads head_dim"],
        value: Float[AnyArray, "batch tokens heads head_dim"],
        *,
        step: Index,
        layer: Index,
        rng: AnyKey,
        scale: float | None = ...,
        prompt_length: int | Int[AnyArray, "*batch"] | None = ...,
        return_record: Literal[True],
    ) -> tuple[Float[Array, "batch tokens heads head_dim"], LayerRecord]: ...
    def __call__(
        self,
        query: Float[AnyArray, "batch tokens heads head_dim"],
        key: Float[AnyArray, "batch tokens heads head_dim"],
        value: Float[AnyArray, "batch tokens heads head_dim"],
        *,
        step: Index,
        layer: Index,
        rng: AnyKey,
        scale: float | None = None,
        prompt_length: int | Int[AnyArray, "*batch"] | None = None,
        return_record: bool = False,
    ) -> (
        Float[Array, "batch tokens heads head_dim"]
        | tuple[Float[Array, "batch tokens heads head_dim"], LayerRecord]
    ):
        """Attends as the policy says for this step and layer.

        Args:
            query: queries in frame-major order, as for `attention`.
            key: keys, of the same shape.
            value: values, of the same shape.
            step: index of the denoising step, from 0; may be traced, and is then clipped to the
                run.
            layer: index of the layer. A step or layer that is a plain int compiles
                only what can occur there.
            rng: key of the sampled rows. One for the whole run will do: step and layer are folded
                into it.
            scale: as for `attention`.
            prompt_length: as for `attention`.
            return_record: whether to return what was done as well.

        Returns:
            The output in frame-major order and the dtype of `query`; with `return_record` also
            a `LayerRecord`.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: shapes do not fit each other or the grid, or a value is out of range.
            NotImplementedError: no implementation that was named can run this call.
        """
        call = (query, key, value, step, layer, rng, scale, prompt_length)
        output, record = self._call(*call, attend=True)
        return (output, record) if return_record else output

    attend = __call__

    def route(
        self,
        query: Float[AnyArray, "batch tokens heads head_dim"],
        key: Float[AnyArray, "batch tokens heads head_dim"],
        value: Float[AnyArray, "batch tokens heads head_dim"],
        *,
        step: Index,
        layer: Index,
        rng: AnyKey,
        scale: float | None = None,
        prompt_length: int | Int[AnyArray, "*batch"] | None = None,
    ) -> LayerRecord:
        """What a call would do, without doing it; arguments and errors as for a call."""
        call = (query, key, value, step, layer, rng, scale, prompt_length)
        return self._call(*call, attend=False)[1]

    def _call(
        self,
        query: Any,
        key: Any,
        value: Any,
        step: Any,
        layer: Any,
        rng: Any,
        scale: float | None,
        prompt_length: Any,
        *,
        attend: bool,
    ) -> tuple[Any, LayerRecord]:
        """Routes, and attends if asked to; the only place where arguments are checked."""
        check_arrays(query, key, value, self.grid)
        batch, _, heads, head_dim = query.shape
        scale = check_scale(scale, head_dim)
        masks = [plan.mask for plan in self.planned.plans]
        prompt_lengths = check_prompt_length(prompt_length, batch, masks)
        shape = CallShape(batch, heads, head_dim, str(query.dtype), prompt_lengths is not None)
        planned = self._plan_for(shape)
        decision = planned.decide(step, layer, rng)
        static = decision.levels, decision.plans, scale, attend
        arrays = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
        shared = prompt_lengths, decision.level, decision.rng
        if self.layout is None:
            output, per_head = planned.run(*static, *arrays, *shared)
        else:
            output, per_head = _run_over_mesh(planned, self.layout, static, arrays, *shared)
        routes, errors = per_head
        record = LayerRecord(
            routes,
            errors,
            jnp.asarray(np.array(decision.levels) == 0)[decision.level],
            jnp.asarray(decision.step, jnp.int32),
            jnp.asarray(decision.layer, jnp.int32),
            planned.choices,
            planned.pattern_names,
            planned.shares,
            self.grid,
            planned.implementation.name if attend else None,
        )
        return output, record

    def _plan_for(self, shape: CallShape) -> LayerPlan:
        """The layer plan whose implementation takes a call; kept, since planning takes time."""
        if shape not in self._plan_of:
            self._plan_of[shape] = self.planned.for_call(shape)
        return self._plan_of[shape]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run_over_mesh(
    planned: LayerPlan,
    layout: ArrayLayout,
    static: tuple[Any, ...],
    arrays: Any,
    prompt_lengths: Any,
    *common: Any,
) -> Any:
    work = functools.partial(planned.run, *static)
    local = functools.partial(exchange_heads, work, layout, planned.grid.num_tokens)
    return over_mesh(local, layout, arrays, prompt_lengths, *common)
