"""Structured spatio-temporal sparse attention for video diffusion, in JAX."""

from importlib.metadata import version

from cinetile import metrics
from cinetile.attention import attention
from cinetile.grid import TokenGrid, TokenOrder
from cinetile.kernels import ImplementationStatus, default_blocks, implementations, reference_rows
from cinetile.masks import (
    Mask,
    dense_mask,
    density_from_width,
    spatial_mask,
    svg_mask,
    temporal_mask,
    width_from_density,
)
from cinetile.module import SparseAttention
from cinetile.plans import PlanStats, TileKind, TilePlan, plan_tiles
from cinetile.policy import DensityRule, ExpectedWork, PlanChoice, SparsityPolicy
from cinetile.record import RoutingRecord
from cinetile.route_table import RouteEntry, RouteTable
from cinetile.routing import HeadRoutes, route_heads, svg_probe_masks

__version__ = version("cinetile")

__all__ = [
    "DensityRule",
    "ExpectedWork",
    "HeadRoutes",
    "ImplementationStatus",
    "Mask",
    "PlanChoice",
    "PlanStats",
    "RouteEntry",
    "RouteTable",
    "RoutingRecord",
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
