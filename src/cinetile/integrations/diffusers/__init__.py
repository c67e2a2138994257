"""Sparse attention in diffusers pipelines: `enable_sparse_attention` and what it returns.

Data flows one way: families (what a model is like) -> tracking (where in a run a call stands) ->
tensors (attention on PyTorch's tensors) -> processors (in place of a model's own) -> handle.
"""

from cinetile import _extras

for _module, _package in (("torch", "PyTorch"), ("diffusers", "diffusers")):
    _extras.require(
        _module,
        extra="diffusers",
        feature="cinetile.integrations.diffusers",
        package=_package,
    )

from cinetile.integrations.diffusers.families import FAMILIES, Call, Family, family_table
from cinetile.integrations.diffusers.handle import SparseHandle, enable_sparse_attention
from cinetile.integrations.diffusers.summary import Summary
from cinetile.integrations.diffusers.tracking import StepInRun, step_by_timestep

__all__ = [
    "FAMILIES",
    "Call",
    "Family",
    "SparseHandle",
    "StepInRun",
    "Summary",
    "enable_sparse_attention",
    "family_table",
    "step_by_timestep",
]
