"""The patterns of Sparse VideoGen as published, for the model that has its text as the grid."""

from typing import Literal

from cinetile.grid import TokenGrid
from cinetile.masks import Mask, svg_mask
from cinetile.patterns.pattern import Pattern
from cinetile.routing.probes import svg_probe_masks

Kind = Literal["spatial", "temporal"]


def upstream_model(grid: TokenGrid) -> Literal["wan", "hunyuan", "cogvideox"]:
    """Returns the model of Sparse VideoGen that has its text where the grid has it."""
    if not grid.text_tokens:
        return "wan"
    return "cogvideox" if grid.text_first else "hunyuan"


def spatial_probe(grid: TokenGrid) -> Mask:
    """Returns the mask with which upstream probes heads for its spatial pattern."""
    return svg_probe_masks(grid, upstream_model(grid))[0]


def temporal_probe(grid: TokenGrid) -> Mask:
    """Returns the mask with which upstream probes heads for its temporal pattern."""
    return svg_probe_masks(grid, upstream_model(grid))[1]


def _mask(
    grid: TokenGrid, kind: Kind, density: float | None, width: int | None, sink_frames: int
) -> Mask:
    model = upstream_model(grid)
    # Only Wan's sink is a choice; the other models keep what upstream ships.
    sink = bool(sink_frames) if model == "wan" else None
    return svg_mask(grid, kind, density, width, model=model, sink=sink)


def _spatial(
    grid: TokenGrid,
    density: float | None = None,
    width: int | None = None,
    sink_frames: int = 1,
    *,
    multiple: int = 128,
) -> Mask:
    del multiple  # upstream's rounding to 128 tokens is a part of its masks
    return _mask(grid, "spatial", density, width, sink_frames)


def _temporal(
    grid: TokenGrid,
    density: float | None = None,
    width: int | None = None,
    sink_frames: int = 1,
    *,
    multiple: int = 128,
) -> Mask:
    del multiple  # as in _spatial
    return _mask(grid, "temporal", density, width, sink_frames)


SVG_SPATIAL = Pattern("svg-spatial", _spatial, spatial_probe, max_sink_frames=1)
SVG_TEMPORAL = Pattern("svg-temporal", _temporal, temporal_probe, max_sink_frames=1)
