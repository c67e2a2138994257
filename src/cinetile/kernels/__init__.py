"""Attention kernels behind one interface."""

from cinetile.kernels.reference import reference_rows
from cinetile.kernels.registry import ImplementationStatus, default_blocks, implementations

__all__ = ["ImplementationStatus", "default_blocks", "implementations", "reference_rows"]
