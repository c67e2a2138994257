"""The tile plan of each choice of a policy, and how much of the attention it visits."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cinetile.grid import TokenGrid
from cinetile.kernels.base import Implementation
from cinetile.kernels.registry import blocks_of
from cinetile.masks import Mask, dense_mask
from cinetile.patterns import DENSE, as_pattern, width_multiple
from cinetile.plans import TilePlan, plan_tiles
from cinetile.policy import SparsityPolicy

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


def layer_blocks(
    implementation: Implementation, grid: TokenGrid, dtype: str, *, is_dense: bool = False
) -> tuple[int, int]:
    """Returns the `block_q` and `block_kv` that a layer uses on a grid if its policy names none.

    Args:
        implementation: runs the plans.
        grid: the tokens.
        dtype: "float32" or "bfloat16".
        is_dense: whether no plan of the layer is sparse, so that tiles need not follow a mask.
    """
    return blocks_of(implementation, grid.num_tokens, dtype, sparse=not is_dense)


def make_plan(
    policy: SparsityPolicy | None,
    grid: TokenGrid,
    choice: PlanChoice,
    implementation: Implementation,
    dtype: str,
) -> TilePlan:
    """Plans one choice of a policy with the block sizes that suit an implementation."""
    blocks = layer_blocks(implementation, grid, dtype, is_dense=policy is None)
    if policy is None:
        return plan_tiles(dense_mask(grid), *blocks, "dense")
    block_q, block_kv = policy.block_q or blocks[0], policy.block_kv or blocks[1]
    if choice.pattern == DENSE:
        return plan_tiles(dense_mask(grid), block_q, block_kv, "dense")
    pattern = as_pattern("patterns", policy.patterns[policy.pattern_names.index(choice.pattern)])
    mask = pattern.mask(
        grid,
        choice.density,
        sink_frames=policy.sink_frames,
        multiple=policy.width_multiple or width_multiple(grid),
    )
    mode: Any = policy.mode
    rounding: Any = policy.rounding if mode == "aligned" else None
    return plan_tiles(mask, block_q, block_kv, mode, rounding=rounding)


def plan_probes(
    policy: SparsityPolicy | None,
    grid: TokenGrid,
    level: tuple[int, ...],
    plans: tuple[TilePlan, ...],
) -> tuple[Mask | TilePlan, ...]:
    """Returns what heads are scored against at a level: its plans, or the patterns' probes."""
    if policy is None or policy.probe == "plan" or not level:
        return tuple(plans[plan] for plan in level)
    probes = [as_pattern("patterns", pattern).probe for pattern in policy.patterns]
    return tuple(probe(grid) for probe in probes if probe is not None)


def visited_share(plan: TilePlan) -> float:
    """Returns the pairs of the tiles that a plan visits, as a fraction of all pairs."""
    query_start, query_stop = plan.geometry.query_range(plan.tile_q.astype(np.int64))
    key_start, key_stop = plan.geometry.key_range(plan.tile_kv.astype(np.int64))
    pairs = int(((query_stop - query_start) * (key_stop - key_start)).sum())
    return pairs / plan.mask.num_tokens**2


def coarse_tile_warnings(plans: Sequence[TilePlan], choices: Sequence[PlanChoice]) -> None:
    """Warns of plans whose tiles are too coarse for their masks."""
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
