"""The TPU kernel.

- config.py: how a tile is cut; tables.py: what the kernel is told of a plan.
- guard.py: when the softmax needs no running maximum.
- routing.py: which head and tile a grid step has; kernel.py: what it computes; call.py: its runs.
- placement.py: token orders; implementation.py: all of it behind `ct.attention`.
"""

from cinetile.kernels.pallas_tpu.implementation import PallasTpuImplementation, PallasTpuTwoKernels

__all__ = ["PallasTpuImplementation", "PallasTpuTwoKernels"]
