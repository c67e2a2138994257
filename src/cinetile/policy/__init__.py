"""Which steps and layers of a model attend sparsely, how sparsely, and with which plans."""

from cinetile.policy.policy import EXPERTS, DensityRule, SparsityPolicy
from cinetile.policy.presets import PRESETS

__all__ = [
    "EXPERTS",
    "PRESETS",
    "DensityRule",
    "SparsityPolicy",
]
