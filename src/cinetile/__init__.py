"""Structured spatio-temporal sparse attention for video diffusion, in JAX."""

from importlib.metadata import version

from cinetile.attention import attention
from cinetile.grid import TokenGrid, TokenOrder
from cinetile.kernels import ImplementationStatus, default_blocks, implementations, reference_rows
from cinetile.lab import metrics
from cinetile.layer.expected_work import ExpectedWork, expected_work
from cinetile.layer.plans import PlanChoice
from cinetile.layer.record import LayerRecord
from cinetile.layer.route_table import RouteTable
from cinetile.layer.sparse_attention import SparseAttention
from cinetile.masks import (
    Mask,
    dense_mask,
    density_from_width,
    spatial_mask,
    svg_mask,
    temporal_mask,
    width_from_density,
)
from cinetile.patterns import PATTERNS, Pattern
from cinetile.plans import PlanStats, TileKind, TilePlan, plan_tiles
from cinetile.policy import DensityRule, SparsityPolicy
from cinetile.routing import HeadRoutes, route_heads, svg_probe_masks

__version__ = version("cinetile")

__all__ = [
    "PATTERNS",
    "DensityRule",
    "ExpectedWork",
    "HeadRoutes",
    "ImplementationStatus",
    "LayerRecord",
    "Mask",
    "Pattern",
    "PlanChoice",
    "PlanStats",
    "RouteTable",
    "SparseAttention",
    "SparsityPolicy",
    "TileKind",
    "TilePlan",
    "TokenGrid",
    "TokenOrder",
    "attention",
    "default_blocks",
    "dense_mask",
    "density_from_width",
    "expected_work",
    "implementations",
    "metrics",
    "plan_tiles",
    "reference_rows",
    "route_heads",
    "spatial_mask",
    "svg_mask",
    "svg_probe_masks",
    "temporal_mask",
    "width_from_density",
]
