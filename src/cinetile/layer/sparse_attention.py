"""`SparseAttention`: the attention layer that a model calls in place of its own."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from cinetile import _checks
from cinetile.attention import attention
from cinetile.grid import TokenGrid
from cinetile.kernels.arguments import AnyArray, check_arrays, check_prompt_length, check_scale
from cinetile.layer.plans import PolicyPlans, policy_plans
from cinetile.layer.record import RoutingRecord
from cinetile.parallel.head_exchange import exchange_heads
from cinetile.parallel.layout import ArrayLayout, array_layout
from cinetile.parallel.spread import over_mesh
from cinetile.policy import SparsityPolicy
from cinetile.routing import route_heads
from cinetile.routing.route import AnyKey

Index = int | Int[AnyArray, ""]


class _Decision(NamedTuple):
    """What the policy says of one call.

    Attributes:
        step: an int if it is known, else a traced scalar.
        layer: likewise.
        level: index into `levels`.
        rng: key of this step and layer.
        levels: the levels of the policy that can occur here.
        plans: the plans that a head can be routed to at these.
    """

    step: Any
    layer: Any
    level: Int[Array, ""]
    rng: AnyKey
    levels: tuple[int, ...]
    plans: tuple[int, ...]


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
        num_layers: layers of the model, likewise.
        expert: "high_noise" or "low_noise" for the two models of Wan 2.2.
        dtype: of the arrays, by which tile sizes are chosen where the policy leaves them open.
        planned: the plans; made from the rest.
        layout: how the arrays lie on the mesh, likewise; None without one.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or the policy does not fit the grid.
        NotImplementedError: the named implementation cannot run here.
    """

    grid: TokenGrid
    policy: SparsityPolicy
    mesh: Mesh | None = field(default=None, kw_only=True)
    sharding: PartitionSpec | None = field(default=None, kw_only=True)
    implementation: str | Sequence[str] | None = field(default=None, kw_only=True)
    num_steps: int | None = field(default=None, kw_only=True)
    num_layers: int | None = field(default=None, kw_only=True)
    expert: str | None = field(default=None, kw_only=True)
    dtype: str = field(default="bfloat16", kw_only=True)
    planned: PolicyPlans = field(init=False, compare=False, repr=False)
    layout: ArrayLayout | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.mesh is None and self.sharding is not None:
            raise ValueError(f"sharding needs a mesh, got {self.sharding} and none")
        layout = None if self.mesh is None else array_layout(self.mesh, self.sharding)
        object.__setattr__(self, "layout", layout)
        if self.implementation is not None and not isinstance(self.implementation, str):
            object.__setattr__(self, "implementation", tuple(self.implementation))
        planned = policy_plans(
            self.policy,
            self.grid,
            num_steps=self.num_steps,
            num_layers=self.num_layers,
            expert=self.expert,
            dtype=_checks.choice("dtype", self.dtype, ("bfloat16", "float32")),
            implementation=self.implementation,
        )
        object.__setattr__(self, "planned", planned)

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
    ) -> tuple[Float[Array, "batch tokens heads head_dim"], RoutingRecord]: ...
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
        | tuple[Float[Array, "batch tokens heads head_dim"], RoutingRecord]
    ):
        """Attends as the policy says for this step and layer.

        Args:
            query: queries in frame-major order, as for `attention`.
            key: keys, likewise.
            value: values, likewise.
            step: index of the denoising step, from 0; may be traced, and is then clipped to the
                run.
            layer: index of the layer, likewise. A step or layer that is a plain int compiles
                only what can occur there.
            rng: key of the sampled rows. One for the whole run will do: step and layer are folded
                into it.
            scale: as for `attention`.
            prompt_length: as for `attention`.
            return_record: whether to return what was done as well.

        Returns:
            The output in frame-major order and the dtype of `query`; with `return_record` also
            a `RoutingRecord`.

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
    ) -> RoutingRecord:
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
    ) -> tuple[Any, RoutingRecord]:
        """Routes, and attends if asked to."""
        check_arrays(query, key, value, self.grid)
        scale = check_scale(scale, query.shape[-1])
        decision = self._decide(step, layer, rng)
        masks = [self.planned.plans[plan].mask for plan in decision.plans]
        valid_text = check_prompt_length(prompt_length, len(query), masks)
        static: tuple[Any, ...] = decision.levels, decision.plans, scale, attend
        arrays: tuple[Any, ...] = tuple(jnp.asarray(array) for array in (query, key, value))
        shared = valid_text, decision.level, decision.rng
        if self.layout is None:
            work = functools.partial(self._work, *static)
            output, per_head = work(*arrays, *shared)
        else:
            output, per_head = _work_over_mesh(self, static, arrays, *shared)
        routes, errors = per_head
        record = RoutingRecord(
            routes,
            errors,
            jnp.asarray(np.array(decision.levels) == 0)[decision.level],
            jnp.asarray(decision.step, jnp.int32),
            jnp.asarray(decision.layer, jnp.int32),
            self.planned.choices,
            self.policy.pattern_names,
        )
        return output, record

    def _decide(self, step: Any, layer: Any, rng: Any) -> _Decision:
        step = self._index("step", step, self.num_steps)
        layer = self._index("layer", layer, self.num_layers)
        level, levels = self._levels(step, layer)
        rng = jax.random.fold_in(jax.random.fold_in(rng, step), layer)
        # Plan 0, the dense one, is always there for heads whose errors are not finite.
        plans = {0, *(plan for one in levels for plan in self.planned.levels[one])}
        return _Decision(step, layer, level, rng, tuple(levels), tuple(sorted(plans)))

    def _work(
        self,
        levels: tuple[int, ...],
        plans: tuple[int, ...],
        scale: float,
        attend: bool,
        query: Float[Array, "batch tokens heads head_dim"],
        key: Float[Array, "batch tokens heads head_dim"],
        value: Float[Array, "batch tokens heads head_dim"],
        valid_text: Int[Array, " batch"] | None,
        level: Int[Array, ""],
        rng: AnyKey,
    ) -> tuple[Any, tuple[Array, Array]]:
        """The output, if asked for, and route and errors of each head; all that a device does."""
        branches = [self._router(query, key, value, rng, one, scale, valid_text) for one in levels]
        routes, errors = jax.lax.switch(level, branches)
        if not attend:
            return None, (routes, errors)
        output = attention(
            query,
            key,
            value,
            tuple(self.planned.plans[plan] for plan in plans),
            routes=jnp.searchsorted(jnp.asarray(plans), jnp.asarray(routes)),
            scale=scale,
            implementation=self.implementation,
            prompt_length=valid_text,
        )
        return output, (routes, errors)

    def _index(self, name: str, value: Any, count: int | None) -> Any:
        """An int if it is known, else a traced scalar within range."""
        is_array = isinstance(value, jax.Array | np.ndarray)
        if is_array and (value.ndim or not jnp.issubdtype(value.dtype, jnp.integer)):
            raise TypeError(f"{name} must be one integer, got {value.dtype}{list(value.shape)}")
        if not isinstance(value, jax.core.Tracer):
            value = value.item() if is_array else value
            return _checks.integer(
                name, value, minimum=0, maximum=None if count is None else count - 1
            )
        return jnp.clip(value, 0, None if count is None else count - 1)

    def _levels(self, step: Any, layer: Any) -> tuple[Int[Array, ""], list[int]]:
        """Index of the level among those that can occur here, and these."""
        table = self.planned.level_of
        known = [
            slice(None) if isinstance(index, jax.core.Tracer) else [min(index, size - 1)]
            for index, size in zip((step, layer), table.shape, strict=True)
        ]
        table = table[known[0]][:, known[1]]
        levels, local = np.unique(table, return_inverse=True)
        local = jnp.asarray(local.reshape(table.shape).astype(np.int32))
        here = (jnp.minimum(step, local.shape[0] - 1), jnp.minimum(layer, local.shape[1] - 1))
        return local[here], levels.tolist()

    def _router(
        self,
        query: Any,
        key: Any,
        value: Any,
        rng: Any,
        level: int,
        scale: float | None,
        prompt_length: Any,
    ) -> Callable[[], tuple[Array, Array]]:
        """Gives the plan of each head, and the errors that tell, for one level of the policy."""
        plans = self.planned.levels[level]
        batch, _, heads, _ = query.shape
        shape = batch, heads, len(self.policy.patterns)

        def dense() -> tuple[Array, Array]:
            return jnp.zeros(shape[:2], jnp.int32), jnp.full(shape, jnp.nan, jnp.float32)

        def sparse() -> tuple[Array, Array]:
            found = route_heads(
                query,
                key,
                value,
                self.planned.probes[level],
                num_samples=self.policy.num_samples,
                rng=rng,
                first_tokens=self.policy.first_tokens,
                scale=scale,
                prompt_length=prompt_length,
            )
            chosen = jnp.asarray(plans, jnp.int32)[found.routes]
            return jnp.where(found.are_known, chosen, 0), found.errors

        return sparse if plans else dense


@functools.partial(jax.jit, static_argnums=(0, 1))
def _work_over_mesh(
    layer: SparseAttention, static: tuple[Any, ...], arrays: Any, valid_text: Any, *common: Any
) -> Any:
    assert layer.layout is not None
    work = functools.partial(layer._work, *static)
    local = functools.partial(exchange_heads, work, layer.layout, layer.grid.num_tokens)
    return over_mesh(local, layer.layout, arrays, valid_text, *common)
