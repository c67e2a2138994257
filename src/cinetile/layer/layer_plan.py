"""`LayerPlan`: a policy resolved on a grid for one implementation."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cinetile import _checks
from cinetile.attention import attend_checked
from cinetile.grid import TokenGrid, require_grid
from cinetile.kernels.base import AttentionRequest, Implementation, ImplementationChoice
from cinetile.kernels.registry import candidates, first_able, frozen_choice
from cinetile.layer.plans import (
    PlanChoice,
    coarse_tile_warnings,
    make_plan,
    plan_probes,
    visited_share,
)
from cinetile.masks import Mask
from cinetile.patterns import DENSE
from cinetile.plans import TilePlan
from cinetile.policy import EXPERTS, SparsityPolicy
from cinetile.policy.intervals import last_bound, require_countable
from cinetile.routing.route import AnyKey, route_checked, sample_rows


class CallShape(NamedTuple):
    """What is known of a call besides its plans; an implementation may refuse any of it.

    Attributes:
        batch: batch rows.
        heads: heads.
        head_dim: features per head.
        dtype: "float32" or "bfloat16".
        has_prompt_lengths: whether the call has a prompt length.
    """

    batch: int
    heads: int
    head_dim: int
    dtype: str
    has_prompt_lengths: bool

    def request(self, plans: tuple[TilePlan, ...]) -> AttentionRequest:
        """Returns the request that implementations are asked about."""
        return AttentionRequest(
            self.batch, self.heads, self.head_dim, self.dtype, plans, self.has_prompt_lengths
        )


class Decision(NamedTuple):
    """What a layer plan says of one step and layer.

    Attributes:
        step: an int if it is known, else a traced scalar.
        layer: an int if it is known, else a traced scalar.
        level: index into `levels`.
        rng: random key of this step and layer.
        levels: the levels of the layer plan that can occur here.
        plans: indices of the plans that a head can be routed to at these levels.
    """

    step: Any
    layer: Any
    level: Int[Array, ""]
    rng: AnyKey
    levels: tuple[int, ...]
    plans: tuple[int, ...]


@jax.tree_util.register_static
@dataclass(frozen=True)
class LayerPlan:
    """A policy resolved on a token grid: everything about a layer that is decided once.

    Made by `plan_layer`. Frozen, hashable, and a static value for `jax.jit`.

    Attributes:
        grid: the tokens.
        policy: what is sparse; None for dense attention in every step and layer.
        implementation: runs the plans. Block sizes are its own.
        candidates: the implementations that the caller allows, in order of preference.
        num_steps: denoising steps of a run; None if not given.
        num_layers: layers of the model; None if not given.
        expert: "high_noise" or "low_noise" for Wan 2.2; None for other models.
        dtype: dtype of the arrays for which block sizes were chosen.
        choices: what each plan is; the first is dense.
        plans: one plan per choice.
        levels: the sets of densities that occur: for each of them the plan of each of the policy's
            patterns. Level 0 is dense and has none.
        level_of: level of each step (first axis) and layer. If their number was not given, the
            last row or column stands for all later ones.
        probes: for each level, the candidates that heads are scored against.
    """

    grid: TokenGrid
    policy: SparsityPolicy | None
    implementation: Implementation
    candidates: tuple[Implementation, ...]
    num_steps: int | None
    num_layers: int | None
    expert: str | None
    dtype: str
    choices: tuple[PlanChoice, ...] = field(compare=False, repr=False)
    plans: tuple[TilePlan, ...] = field(repr=False)
    levels: tuple[tuple[int, ...], ...] = field(compare=False, repr=False)
    level_of: Int[np.ndarray, "steps layers"] = field(compare=False, repr=False)
    probes: tuple[tuple[Mask | TilePlan, ...], ...] = field(compare=False, repr=False)

    @property
    def pattern_names(self) -> tuple[str, ...]:
        """Names of the patterns between which heads are routed, in the order of the errors."""
        return () if self.policy is None else self.policy.pattern_names

    @functools.cached_property
    def shares(self) -> tuple[float, ...]:
        """Share of all pairs that each plan visits."""
        return tuple(visited_share(plan) for plan in self.plans)

    def for_call(self, call: CallShape) -> "LayerPlan":
        """Returns a layer plan whose implementation takes a call: this one if it does.

        The fallback's plans have the fallback's own block sizes.

        Raises:
            NotImplementedError: none of the candidates takes the call; the message says why.
        """
        if self.implementation.unsupported(call.request(self.plans)) is None:
            return self
        made: dict[Implementation, LayerPlan] = {self.implementation: self}

        def reason(candidate: Implementation) -> str | None:
            if candidate not in made:
                made[candidate] = _with_plans(self, candidate)
            return candidate.unsupported(call.request(made[candidate].plans))

        chosen = made[first_able(self.candidates, reason)]
        coarse_tile_warnings(chosen.plans[1:], chosen.choices[1:])
        return chosen

    def random_key(self, rng: AnyKey, step: Any, layer: Any) -> AnyKey:
        """Returns the random key of a step and layer from that of a whole run."""
        return jax.random.fold_in(jax.random.fold_in(rng, step), layer)

    def decide(self, step: Any, layer: Any, rng: AnyKey) -> Decision:
        """Returns level, plans and random key of a step and layer, which may be traced.

        Raises:
            TypeError: step or layer is no integer.
            ValueError: step or layer is known and out of range.
        """
        step = _index("step", step, self.num_steps)
        layer = _index("layer", layer, self.num_layers)
        level, levels = self._level(step, layer)
        plans = {plan for index in levels for plan in self.levels[index] or (0,)}
        # Routed heads whose errors are not finite attend densely.
        plans |= {0 for index in levels if self.is_routed(index)}
        key = self.random_key(rng, step, layer)
        return Decision(step, layer, level, key, tuple(levels), tuple(sorted(plans)))

    def is_routed(self, level: int) -> bool:
        """Whether heads are scored at a level: with one pattern or none there is no choice."""
        return len(self.levels[level]) > 1

    def route(
        self,
        level: int,
        query: Float[Array, "batch tokens heads head_dim"],
        key: Float[Array, "batch tokens heads head_dim"],
        value: Float[Array, "batch tokens heads head_dim"],
        rng: AnyKey,
        scale: float,
        prompt_lengths: Int[Array, " batch"] | None,
    ) -> tuple[Int[Array, "batch heads"], Float[Array, "batch heads patterns"]]:
        """Returns the plan of each head at one level, and the errors of the patterns.

        Errors are NaN if nothing was sampled. Arguments are checked already.
        """
        plans = self.levels[level]
        batch, _, heads, _ = query.shape
        if self.policy is None or not self.is_routed(level):
            shape = batch, heads, len(self.pattern_names)
            only = plans[0] if plans else 0
            return jnp.full(shape[:2], only, jnp.int32), jnp.full(shape, jnp.nan, jnp.float32)
        policy = self.policy
        rows = sample_rows(self.grid, policy.num_samples, rng, policy.first_tokens)
        found = route_checked(query, key, value, rows, prompt_lengths, self.probes[level], scale)
        chosen = jnp.asarray(plans, jnp.int32)[found.routes]
        return jnp.where(found.are_known, chosen, 0), found.errors

    def run(
        self,
        levels: tuple[int, ...],
        plans: tuple[int, ...],
        scale: float,
        attend: bool,
        query: Float[Array, "batch tokens heads head_dim"],
        key: Float[Array, "batch tokens heads head_dim"],
        value: Float[Array, "batch tokens heads head_dim"],
        prompt_lengths: Int[Array, " batch"] | None,
        level: Int[Array, ""],
        rng: AnyKey,
    ) -> tuple[Any, tuple[Array, Array]]:
        """Routes at `levels[level]`, and attends if asked to; all that one device does.

        Args:
            levels: of a `Decision`.
            plans: of a `Decision`.
            scale: factor on the logits.
            attend: whether to attend too; the output is None otherwise.
            query: queries in frame-major order, checked.
            key: keys in frame-major order, checked.
            value: values in frame-major order, checked.
            prompt_lengths: prompt length per batch row; None without padding.
            level: of a `Decision`.
            rng: of a `Decision`.

        Returns:
            The output, and the plan and the errors of each head.
        """
        call = query, key, value, rng, scale, prompt_lengths
        branches = [lambda index=index: self.route(index, *call) for index in levels]
        routes, errors = jax.lax.switch(level, branches)
        if not attend:
            return None, (routes, errors)
        local = None if len(plans) == 1 else jnp.searchsorted(jnp.asarray(plans), routes)
        output, _ = attend_checked(
            self.implementation,
            query,
            key,
            value,
            None if local is None else local.astype(jnp.int32),
            prompt_lengths,
            tuple(self.plans[plan] for plan in plans),
            scale,
        )
        return output, (routes, errors)

    def _level(self, step: Any, layer: Any) -> tuple[Int[Array, ""], list[int]]:
        """Index of the level among those that can occur here, and these."""
        table = self.level_of
        known = [
            slice(None) if isinstance(index, jax.core.Tracer) else [min(index, size - 1)]
            for index, size in zip((step, layer), table.shape, strict=True)
        ]
        table = table[known[0]][:, known[1]]
        levels, local = np.unique(table, return_inverse=True)
        local = jnp.asarray(local.reshape(table.shape).astype(np.int32))
        here = (jnp.minimum(step, local.shape[0] - 1), jnp.minimum(layer, local.shape[1] - 1))
        return local[here], levels.tolist()


def plan_layer(
    policy: SparsityPolicy | None,
    grid: TokenGrid,
    *,
    num_steps: int | None = None,
    num_layers: int | None = None,
    expert: str | None = None,
    dtype: str = "bfloat16",
    implementation: ImplementationChoice = None,
    call: CallShape | None = None,
) -> LayerPlan:
    """Resolves a policy on a grid: chooses the implementation, and plans all that can occur.

    Warns where the tiles are so coarse that a plan visits far more than its mask keeps.

    Args:
        policy: what is sparse; None for dense attention.
        grid: the tokens.
        num_steps: denoising steps of the run; needed where the policy has fractions of them.
        num_layers: layers of the model; needed where the policy has fractions of them.
        expert: "high_noise" or "low_noise" for Wan 2.2.
        dtype: dtype of the arrays, for the block sizes.
        implementation: as for `attention`.
        call: what is known of the calls; None to ask only what can run on this machine. See
            `LayerPlan.for_call`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or the policy does not fit the grid.
        NotImplementedError: no implementation that the caller allows can run.
    """
    require_grid(grid)
    if policy is not None and not isinstance(policy, SparsityPolicy):
        raise TypeError(f"policy must be a SparsityPolicy, got {type(policy).__name__}")
    if expert is not None:
        _checks.choice("expert", expert, EXPERTS)
    for name, count in (("num_steps", num_steps), ("num_layers", num_layers)):
        if count is not None:
            _checks.integer(name, count, minimum=1)
    allowed = candidates(frozen_choice(implementation))
    chosen = first_able(allowed, lambda _: None)
    settings = (num_steps, num_layers, expert)
    densities, level_of = _levels(policy, *settings)
    choices = [PlanChoice(DENSE, 1.0)]
    levels: list[tuple[int, ...]] = [()]
    names = () if policy is None else policy.pattern_names
    for level in densities[1:]:
        of_level = [PlanChoice(*pair) for pair in zip(names, level, strict=True)]
        choices += [choice for choice in of_level if choice not in choices]
        levels.append(tuple(choices.index(choice) for choice in of_level))
    empty = LayerPlan(
        *(grid, policy, chosen, allowed, *settings, dtype, tuple(choices), ()),
        levels=tuple(levels),
        level_of=level_of,
        probes=(),
    )
    planned = _with_plans(empty, chosen)
    if call is not None and chosen.unsupported(call.request(planned.plans)) is not None:
        return planned.for_call(call)
    coarse_tile_warnings(planned.plans[1:], planned.choices[1:])
    return planned


def _with_plans(planned: LayerPlan, chosen: Implementation) -> LayerPlan:
    """The same settings with another implementation, and plans in its block sizes."""
    grid, policy = planned.grid, planned.policy
    plans = tuple(
        make_plan(policy, grid, choice, chosen, planned.dtype) for choice in planned.choices
    )
    probes = tuple(plan_probes(policy, grid, level, plans) for level in planned.levels)
    return dataclasses.replace(planned, implementation=chosen, plans=plans, probes=probes)


def _levels(
    policy: SparsityPolicy | None,
    num_steps: int | None,
    num_layers: int | None,
    expert: str | None,
) -> tuple[Sequence[tuple[float, ...]], Int[np.ndarray, "steps layers"]]:
    """The sets of densities that occur, the first one dense, and which occurs where."""
    levels: list[tuple[float, ...]] = [()]
    if policy is None:
        return levels, np.zeros((1, 1), np.int32)
    steps, layers = _table_size(policy, num_steps, num_layers)
    require_countable(steps, layers)
    level_of = np.zeros((steps, layers), np.int32)
    for step, layer in np.ndindex(steps, layers):
        densities = policy.densities(
            step, layer, num_steps=num_steps, num_layers=num_layers, expert=expert
        )
        densities = () if densities is None else densities
        if densities not in levels:
            levels.append(densities)
        level_of[step, layer] = levels.index(densities)
    return levels, level_of


def _table_size(
    policy: SparsityPolicy, num_steps: int | None, num_layers: int | None
) -> tuple[int, int]:
    of_rules = [(rule.steps, rule.layers) for rule in policy.rules]
    steps = (*policy.dense_steps, *(bound for bound, _ in of_rules if bound is not None))
    layers = (*policy.dense_layers, *(bound for _, bound in of_rules if bound is not None))
    return num_steps or 1 + last_bound(steps), num_layers or 1 + last_bound(layers)


def _index(name: str, value: Any, count: int | None) -> Any:
    """An int if it is known, else a traced scalar within range."""
    is_array = isinstance(value, jax.Array | np.ndarray)
    if is_array and (value.ndim or not jnp.issubdtype(value.dtype, jnp.integer)):
        raise TypeError(f"{name} must be one integer, got {value.dtype}{list(value.shape)}")
    if not isinstance(value, jax.core.Tracer):
        value = value.item() if is_array else value
        return _checks.integer(name, value, minimum=0, maximum=None if count is None else count - 1)
    return jnp.clip(value, 0, None if count is None else count - 1)
