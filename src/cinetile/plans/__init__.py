"""Tile plans: which tiles a kernel visits, and which of those it masks."""

from cinetile.plans.classify import TileGeometry, TileKind
from cinetile.plans.plan import MODES, PlanStats, TilePlan, plan_tiles
from cinetile.plans.rounding import ROUNDINGS

__all__ = [
    "MODES",
    "ROUNDINGS",
    "PlanStats",
    "TileGeometry",
    "TileKind",
    "TilePlan",
    "plan_tiles",
]
