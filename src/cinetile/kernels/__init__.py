"""Attention kernels behind one interface."""

from cinetile.kernels.reference import reference_rows
from cinetile.kernels.registry import ImplementationStatus, implementations

__all__ = ["ImplementationStatus", "implementations", "reference_rows"]
