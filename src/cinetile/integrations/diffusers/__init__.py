"""Sparse attention in diffusers pipelines: `enable_sparse_attention` and what it returns.

Data flows one way: families (what a model is like) -> tracking (where in a run a call stands) ->
tensors (attention on PyTorch's tensors) -> processors (in place of a model's own) -> handle.
"""

try:
    import diffusers  # noqa: F401
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"cinetile.integrations.diffusers needs PyTorch and diffusers ({error}): "
        "pip install 'cinetile[diffusers]'"
    ) from error

from cinetile.integrations.diffusers.families import FAMILIES, Call, Family, family_table
from cinetile.integrations.diffusers.handle import SparseHandle, enable_sparse_attention
from cinetile.integrations.diffusers.summary import LayerCall, Summary
from cinetile.integrations.diffusers.tracking import StepInRun, step_by_timestep

__all__ = [
    "FAMILIES",
    "Call",
    "Family",
    "LayerCall",
    "SparseHandle",
    "StepInRun",
    "Summary",
    "enable_sparse_attention",
    "family_table",
    "step_by_timestep",
]
