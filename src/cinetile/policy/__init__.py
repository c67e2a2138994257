"""Which steps and layers of a model attend sparsely, how sparsely, and with which plans."""

from cinetile.policy.plans import PlanChoice, PolicyPlans, policy_plans
from cinetile.policy.policy import EXPERTS, DensityRule, SparsityPolicy
from cinetile.policy.presets import PRESETS
from cinetile.policy.work import ExpectedWork

__all__ = [
    "EXPERTS",
    "PRESETS",
    "DensityRule",
    "ExpectedWork",
    "PlanChoice",
    "PolicyPlans",
    "SparsityPolicy",
    "policy_plans",
]
