"""The plans that a policy can ask for, and which of them in which step and layer."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from cinetile import _checks
from cinetile.grid import TokenGrid, require_grid
from cinetile.kernels import default_blocks
from cinetile.masks import Mask, dense_mask
from cinetile.patterns import DENSE, as_pattern, width_multiple
from cinetile.plans import TilePlan, plan_tiles
from cinetile.policy.intervals import last_bound, require_countable
from cinetile.policy.policy import EXPERTS, SparsityPolicy

# A plan that visits this many times the pairs of its mask has lost what the mask is for.
_MOST_WASTE = 2.0
# A plan that visits this share of the pairs saves nothing worth the name.
_DENSE_IN_ALL_BUT_NAME = 0.95


@dataclass(frozen=True)
class PlanChoice:
    """What a plan is, in the policy's words.

    Attributes:
        pattern: name of the pattern, or "dense".
        density: density of its band; 1 for dense.
    """

    pattern: str
    density: float

    def __str__(self) -> str:
        return self.pattern if self.pattern == DENSE else f"{self.pattern} {self.density:g}"


@dataclass(frozen=True, eq=False)
class PolicyPlans:
    """Everything that a policy can ask for on one grid.

    Attributes:
        choices: what each plan is; the first one is dense.
        plans: one for each choice.
        levels: for each set of densities that occurs, the plan of each of the policy's patterns;
            level 0 is dense and has none.
        level_of: level in each step (first axis) and layer. Where their number was not given,
            the last row or column stands for all later ones.
        probes: for each level, what stands for its patterns when heads are routed.
    """

    choices: tuple[PlanChoice, ...]
    plans: tuple[TilePlan, ...]
    levels: tuple[tuple[int, ...], ...]
    level_of: Int[np.ndarray, "steps layers"]
    probes: tuple[tuple[Mask | TilePlan, ...], ...]


def policy_plans(
    policy: SparsityPolicy,
    grid: TokenGrid,
    *,
    num_steps: int | None = None,
    num_layers: int | None = None,
    expert: str | None = None,
    dtype: str = "bfloat16",
    implementation: str | Sequence[str] | None = None,
) -> PolicyPlans:
    """Plans all that a policy can ask for.

    Warns where the tiles are so coarse that a plan visits far more than its mask keeps.

    Args:
        policy: the choices.
        grid: the tokens.
        num_steps: denoising steps of the run; needed where the policy has fractions of them.
        num_layers: layers of the model, likewise.
        expert: "high_noise" or "low_noise" for Wan 2.2.
        dtype: of the arrays, where the tiles are to suit an implementation.
        implementation: the one that they are to suit; by default the best that can run here.
    """
    require_grid(grid)
    if not isinstance(policy, SparsityPolicy):
        raise TypeError(f"policy must be a SparsityPolicy, got {type(policy).__name__}")
    if expert is not None:
        _checks.choice("expert", expert, EXPERTS)
    for name, count in (("num_steps", num_steps), ("num_layers", num_layers)):
        if count is not None:
            _checks.integer(name, count, minimum=1)
    levels: list[tuple[float, ...]] = [()]
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

    choices = [PlanChoice(DENSE, 1.0)]
    plans_of_level: list[tuple[int, ...]] = [()]
    for densities in levels[1:]:
        of_level = [PlanChoice(*pair) for pair in zip(policy.pattern_names, densities, strict=True)]
        choices += [choice for choice in of_level if choice not in choices]
        plans_of_level.append(tuple(choices.index(choice) for choice in of_level))
    block_q, block_kv = default_blocks(grid.num_tokens, dtype, implementation, sparse=True)
    block_q, block_kv = policy.block_q or block_q, policy.block_kv or block_kv
    plans = tuple(_plan(policy, grid, choice, block_q, block_kv) for choice in choices)
    _warn_of_coarse_tiles(plans[1:], choices[1:])
    upstream = probe_masks(policy, grid) if policy.probe == "svg" else ()

    def probes(level: tuple[int, ...]) -> tuple[Mask | TilePlan, ...]:
        return upstream if level and upstream else tuple(plans[plan] for plan in level)

    return PolicyPlans(
        choices=tuple(choices),
        plans=plans,
        levels=tuple(plans_of_level),
        level_of=level_of,
        probes=tuple(probes(level) for level in plans_of_level),
    )


def _table_size(
    policy: SparsityPolicy, num_steps: int | None, num_layers: int | None
) -> tuple[int, int]:
    of_rules = [(rule.steps, rule.layers) for rule in policy.rules]
    steps = (*policy.dense_steps, *(one for one, _ in of_rules if one is not None))
    layers = (*policy.dense_layers, *(one for _, one in of_rules if one is not None))
    return num_steps or 1 + last_bound(steps), num_layers or 1 + last_bound(layers)


def _plan(
    policy: SparsityPolicy, grid: TokenGrid, choice: PlanChoice, block_q: int, block_kv: int
) -> TilePlan:
    if choice.pattern == DENSE:
        return plan_tiles(dense_mask(grid), block_q, block_kv, "dense")
    mode: Any = policy.mode
    rounding: Any = policy.rounding if mode == "aligned" else None
    return plan_tiles(_mask(policy, grid, choice), block_q, block_kv, mode, rounding=rounding)


def visited_share(plan: TilePlan) -> float:
    """Pairs of the tiles that a plan visits, as a fraction of all pairs."""
    query_start, query_stop = plan.geometry.query_range(plan.tile_q.astype(np.int64))
    key_start, key_stop = plan.geometry.key_range(plan.tile_kv.astype(np.int64))
    pairs = int(((query_stop - query_start) * (key_stop - key_start)).sum())
    return pairs / plan.mask.num_tokens**2


def _warn_of_coarse_tiles(plans: tuple[TilePlan, ...], choices: list[PlanChoice]) -> None:
    for plan, choice in zip(plans, choices, strict=True):
        visited = visited_share(plan)
        if visited > _MOST_WASTE * plan.mask.density:
            warnings.warn(
                f"tiles of {plan.block_q} x {plan.block_kv} are too coarse for {plan.grid}: the "
                f"{plan.mask.name} mask keeps {plan.mask.density:.1%} of the pairs, its plan "
                f"visits {visited:.1%}; set block_q and block_kv in the policy",
                stacklevel=5,
            )
        elif choice.density < _DENSE_IN_ALL_BUT_NAME <= visited:
            warnings.warn(
                f"density {choice.density} is lost on {plan.grid}: the {plan.mask.name} plan "
                f"visits {visited:.1%} of the pairs; set block_q, block_kv and width_multiple in "
                "the policy to less",
                stacklevel=5,
            )


def probe_masks(policy: SparsityPolicy, grid: TokenGrid) -> tuple[Mask, ...]:
    """Returns the probe of each of the policy's patterns."""
    probes = [as_pattern("patterns", pattern).probe for pattern in policy.patterns]
    return tuple(probe(grid) for probe in probes if probe is not None)


def _mask(policy: SparsityPolicy, grid: TokenGrid, choice: PlanChoice) -> Mask:
    pattern = policy.patterns[policy.pattern_names.index(choice.pattern)]
    return as_pattern("patterns", pattern).mask(
        grid,
        choice.density,
        sink_frames=policy.sink_frames,
        multiple=policy.width_multiple or width_multiple(grid),
    )
