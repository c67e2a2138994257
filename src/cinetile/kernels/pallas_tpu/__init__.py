"""The TPU kernel.

- config.py: chunks, groups and spans of a tile; tables.py: a plan as tables for the kernel.
- guard.py: when the softmax needs no running maximum.
- routing.py: head and tile of each grid step; kernel.py: the kernel; call.py: running it.
- placement.py: token orders; implementation.py: the implementation behind `ct.attention`.
"""

from cinetile.kernels.pallas_tpu.implementation import PallasTpuImplementation, PallasTpuTwoKernels

__all__ = ["PallasTpuImplementation", "PallasTpuTwoKernels"]
