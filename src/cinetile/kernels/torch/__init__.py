"""Attention on PyTorch tensors, on the device where they are: one table of engines.

Data flows one way: windows (a mask as what dense kernels compute) and the plan's tiles -> engines
(window_pair, flex, sdpa) -> registry (the choice, with reasons) -> call (checks and groups of
heads). Nothing of the package imports this but what needs PyTorch anyway.
"""

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"cinetile.kernels.torch needs PyTorch ({error}): pip install torch"
    ) from error

from cinetile.kernels.torch.call import TensorResult, attention, run_attention
from cinetile.kernels.torch.merge import merge
from cinetile.kernels.torch.registry import EngineStatus, engines, select_engine

__all__ = [
    "EngineStatus",
    "TensorResult",
    "attention",
    "engines",
    "merge",
    "run_attention",
    "select_engine",
]
