"""Attention masks in closed form."""

from cinetile.masks.mask import Mask, RowSegment
from cinetile.masks.upstream import svg_mask
from cinetile.masks.video import dense_mask, spatial_mask, temporal_mask
from cinetile.masks.widths import density_from_width, width_from_density

__all__ = [
    "Mask",
    "RowSegment",
    "dense_mask",
    "density_from_width",
    "spatial_mask",
    "svg_mask",
    "temporal_mask",
    "width_from_density",
]
