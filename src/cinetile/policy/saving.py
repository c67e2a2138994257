"""Counting the attention work of a whole run under a policy."""

import numpy as np

from cinetile import _checks
from cinetile.grid import TokenGrid
from cinetile.policy.plans import policy_plans, visited_share
from cinetile.policy.policy import SparsityPolicy
from cinetile.policy.work import ExpectedWork


def expected_work(
    policy: SparsityPolicy,
    grid: TokenGrid,
    num_steps: int,
    num_layers: int,
    high_noise_steps: int | None,
    implementation: str | None,
) -> ExpectedWork:
    """See `SparsityPolicy.expected_work`."""
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
        planned = policy_plans(
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
