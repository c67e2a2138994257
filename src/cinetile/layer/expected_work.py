"""How much attention work a policy saves over a whole run."""

from dataclasses import dataclass

import numpy as np

from cinetile import _checks
from cinetile.grid import TokenGrid
from cinetile.layer.layer_plan import plan_layer
from cinetile.layer.plans import visited_share
from cinetile.policy.policy import SparsityPolicy


@dataclass(frozen=True)
class ExpectedWork:
    """Attention work of a run, counted in query-key pairs of the tiles that kernels visit.

    Pairs that a visited tile masks out count, since they are computed; where heads go is not
    known beforehand, so patterns count alike. Routing, placement and everything that is not
    self-attention are left out, so a whole model gains less.

    Attributes:
        saved: share of the pairs of an all-dense run that is not computed.
        sparse_calls: share of the attention calls (steps x layers) that run sparsely.
        visited: share of all pairs that sparse calls visit, on average; None without any.
    """

    saved: float
    sparse_calls: float
    visited: float | None

    def __str__(self) -> str:
        if self.visited is None:
            return "all attention is dense"
        return (
            f"{self.sparse_calls:.1%} of the attention calls are sparse and visit "
            f"{self.visited:.1%} of the pairs: {self.saved:.1%} of the attention work is saved"
        )


def expected_work(
    policy: SparsityPolicy,
    grid: TokenGrid,
    *,
    num_steps: int,
    num_layers: int,
    high_noise_steps: int | None = None,
    implementation: str | None = None,
) -> ExpectedWork:
    """Counts the share of a run's attention work that a policy saves; see `ExpectedWork`.

    Args:
        policy: which steps and layers are sparse, and how.
        grid: the tokens.
        num_steps: denoising steps of the run.
        num_layers: layers of the model.
        high_noise_steps: first steps that the high-noise expert takes, for Wan 2.2; None for
            models without experts.
        implementation: the tiles are those that suit it; see `attention`.
    """
    num_steps = _checks.integer("num_steps", num_steps, minimum=1)
    experts: list[tuple[str | None, range]] = [(None, range(num_steps))]
    if high_noise_steps is not None:
        _checks.integer("high_noise_steps", high_noise_steps, minimum=0, maximum=num_steps)
        experts = [
            ("high_noise", range(high_noise_steps)),
            ("low_noise", range(high_noise_steps, num_steps)),
        ]
    visited: list[float] = []
    for expert, steps in experts:
        planned = plan_layer(
            policy,
            grid,
            num_steps=num_steps,
            num_layers=num_layers,
            expert=expert,
            implementation=implementation,
        )
        shares = [visited_share(plan) for plan in planned.plans]
        of_level = [np.mean([shares[plan] for plan in level]) for level in planned.levels[1:]]
        for level in planned.level_of[list(steps)].flat:
            if level:
                visited.append(float(of_level[level - 1]))
    calls = num_steps * num_layers
    if not visited:
        return ExpectedWork(0.0, 0.0, None)
    return ExpectedWork(
        saved=(len(visited) - sum(visited)) / calls,
        sparse_calls=len(visited) / calls,
        visited=sum(visited) / len(visited),
    )
