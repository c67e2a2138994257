"""Pictures of tile plans, ladders and routes, as PNG files; needs matplotlib (extra `plot`)."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from cinetile.grid import TokenGrid, TokenOrder
from cinetile.lab.bench import LadderResult, LadderRow
from cinetile.lab.canvas import Canvas, require_matplotlib
from cinetile.layer.route_table import RouteTable
from cinetile.patterns import PATTERN_NAMES
from cinetile.plans import TilePlan
from cinetile.plans.picture import downsample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
# Wong's palette, whose colours stay apart for all common kinds of colour blindness and in grey.
_SKIPPED = "#eceff1"
_FULL = "#0072b2"
_MASKED = "#e69f00"
_RIVAL = "#9aa0a6"
_PATTERN_COLOURS = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"),
    *("#6a3d9a", "#8c564b", "#17becf", "#7f7f7f", "#000000"),
)
_EDGE_LINE = "#111111"
_FAINT = "#5f6368"

_MAX_CELLS = 400
_MAX_TILES_WITH_GAPS = 72
_MAX_FRAME_TICKS = 8
_EDGE_POINTS = 4096

# Inches.
_LEFT, _RIGHT, _GAP = 0.8, 0.25, 0.45
_ABOVE_MAPS, _BELOW_MAPS = 1.75, 1.15
_LEFT_OF_BARS, _BAR, _BELOW_BARS = 1.15, 0.42, 0.85
_LEAST_WIDTH = 7.6
_LEAST_ROUTES, _TALLEST_ROUTES, _WIDEST_ROUTES = 0.9, 8.0, 14.0
_BELOW_ROUTES, _RIGHT_OF_ROUTES = 0.85, 1.6

_MEANING = {
    "dense": "runs every tile",
    "naive": "skips empty tiles, masks all others",
    "split": "masks only the tiles on an edge",
    "aligned": "keeps or skips edge tiles whole",
}


def plan_picture(
    plans: Sequence[TilePlan], path: str | os.PathLike[str], *, title: str | None = None
) -> None:
    """Draws the tile maps of plans side by side, queries down and keys across.

    Args:
        plans: one to about six plans.
        path: the PNG file to write, whole or not at all.
        title: heading; by default the grid, the mask and the tile sizes of the first plan.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no plans.
    """
    require_matplotlib()
    if not plans:
        raise ValueError("plans must hold at least one plan, got none")
    canvas = Canvas(_map_width(len(plans)), _map_height(len(plans)))
    _draw_maps(canvas, plans, title or _heading(plans[0]))
    canvas.save(path)


def ladder_picture(
    result: LadderResult, plans: Mapping[str, TilePlan], path: str | os.PathLike[str]
) -> None:
    """Draws a ladder: tile maps above, measured times and speed-ups below.

    Args:
        result: what was measured.
        plans: the plan of each mode, as `LadderConfig.plans` gives them.
        path: the PNG file to write, whole or not at all.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    drawn = [plans[row.mode] for row in result.rows]
    bars_height = _BAR * (len(result.rows) + len(result.rivals))
    width, maps_height = _map_width(len(drawn)), _map_height(len(drawn))
    canvas = Canvas(width, maps_height + bars_height + _BELOW_BARS)
    _draw_maps(canvas, drawn, _heading(drawn[0]))
    bars_width = width - _LEFT_OF_BARS - _RIGHT
    _draw_times(canvas.axes(_LEFT_OF_BARS, maps_height, bars_width, bars_height), result)
    canvas.save(path)


def route_picture(table: RouteTable, path: str | os.PathLike[str]) -> None:
    """Draws where the heads went, layer by step, and below it what each pattern would cost.

    In the upper map every step is as wide as it has heads, one column each. The maps below show
    the median over heads of each pattern's error, on one logarithmic scale.

    Args:
        table: what was recorded.
        path: the PNG file to write, whole or not at all.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    steps, layers = table.steps, table.layers
    width = min(_WIDEST_ROUTES, max(_LEAST_WIDTH, 0.3 * len(steps)))
    height = min(_TALLEST_ROUTES, max(_LEAST_ROUTES, 0.16 * len(layers)))
    maps = 1 + len(table.patterns)
    canvas = Canvas(_LEFT + width + _RIGHT_OF_ROUTES, 0.4 + maps * (height + _BELOW_ROUTES))

    def axes(index: int, title: str) -> "Axes":
        top = 0.4 + index * (height + _BELOW_ROUTES)
        panel = canvas.axes(_LEFT, top, width, height)
        panel.set_title(title, fontsize=10, loc="left")
        panel.set_ylabel("layer", fontsize=9)
        ticks = np.unique(np.linspace(0, len(layers) - 1, 8, dtype=int))
        panel.set_yticks(ticks, [str(layers[tick]) for tick in ticks], fontsize=8)
        panel.set_xlabel("step", fontsize=9)
        return panel

    _draw_routes(axes(0, "routes: one column a head"), table)
    errors = _median_errors(table)
    known = errors[np.isfinite(errors) & (errors > 0)]
    limits = (known.min(), known.max()) if known.size else (1e-6, 1.0)
    for index, pattern in enumerate(table.patterns):
        panel = axes(1 + index, f"error of {pattern}, median over heads (grey: dense or none)")
        _draw_errors(panel, errors[..., index], limits, table)
    canvas.save(path)


def pattern_colours(names: Sequence[str]) -> list[str]:
    """Returns a colour for each pattern: the same one in every picture for those of `PATTERNS`.

    Args:
        names: names of patterns; those of other patterns get the colours that are left over.
    """
    others = [name for name in names if name not in PATTERN_NAMES]
    order = [*PATTERN_NAMES, *others]
    return [_PATTERN_COLOURS[order.index(name) % len(_PATTERN_COLOURS)] for name in names]


def _draw_routes(axes: "Axes", table: RouteTable) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    names = ["dense", *table.patterns]
    calls = table.calls()
    heads = max(len(entries) for entries in calls.values())
    colours = [_SKIPPED, *pattern_colours(table.patterns)]
    drawn = np.full((len(table.layers), len(table.steps) * heads), np.nan)
    for (step, layer), entries in calls.items():
        column = table.steps.index(step) * heads
        for offset, entry in enumerate(entries):
            drawn[table.layers.index(layer), column + offset] = names.index(entry["pattern"])
    axes.imshow(
        drawn,
        cmap=ListedColormap(colours),
        vmin=-0.5,
        vmax=len(names) - 0.5,
        aspect="auto",
        interpolation="nearest",
    )
    ticks = np.unique(np.linspace(0, len(table.steps) - 1, 12, dtype=int))
    places = ticks * heads + (heads - 1) / 2
    axes.set_xticks(places, [str(table.steps[tick]) for tick in ticks], fontsize=8)
    for edge in range(1, len(table.steps)):
        axes.axvline(edge * heads - 0.5, color="white", linewidth=0.8)
    handles = [Patch(color=colour, label=name) for colour, name in zip(colours, names, strict=True)]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8)


def _median_errors(table: RouteTable) -> Float[np.ndarray, "layers steps patterns"]:
    errors = np.full((len(table.layers), len(table.steps), len(table.patterns)), np.nan)
    for (step, layer), entries in table.calls().items():
        place = table.layers.index(layer), table.steps.index(step)
        errors[place] = table.median_errors(entries)
    return errors


def _draw_errors(
    axes: "Axes",
    errors: Float[np.ndarray, "layers steps"],
    limits: tuple[float, float],
    table: RouteTable,
) -> None:
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import NullFormatter

    low, high = limits
    axes.set_facecolor(_SKIPPED)
    image = axes.imshow(
        np.where(np.isnan(errors), np.nan, np.maximum(errors, low)),
        norm=LogNorm(low, max(high, low * 1.001)),
        aspect="auto",
        interpolation="nearest",
    )
    ticks = np.unique(np.linspace(0, len(table.steps) - 1, 12, dtype=int))
    axes.set_xticks(ticks, [str(table.steps[tick]) for tick in ticks], fontsize=8)
    bar = axes.figure.colorbar(image, ax=axes, cax=axes.inset_axes((1.02, 0.0, 0.02, 1.0)))
    bar.ax.tick_params(labelsize=8)
    bar.ax.yaxis.set_minor_formatter(NullFormatter())


def _panel(num_panels: int) -> float:
    """Side of a tile map."""
    return 3.55 if num_panels > 2 else 4.9


def _map_width(num_panels: int) -> float:
    panels = num_panels * _panel(num_panels) + (num_panels - 1) * _GAP
    return max(_LEFT + panels + _RIGHT, _LEAST_WIDTH)


def _map_height(num_panels: int) -> float:
    return _ABOVE_MAPS + _panel(num_panels) + _BELOW_MAPS


def _heading(plan: TilePlan) -> str:
    mask, geometry = plan.mask, plan.geometry
    crowded = max(geometry.num_q_tiles, geometry.num_kv_tiles) > _MAX_CELLS
    cells = (
        "one cell is several tiles, masked if one of them is; tiles"
        if crowded
        else "one cell is one tile"
    )
    return (
        f"{mask.name} attention on {plan.grid}; the exact mask keeps {mask.density:.1%} "
        f"of all pairs\n"
        f"{cells} of {plan.block_q:,} queries x {plan.block_kv:,} keys"
    )


def _draw_maps(canvas: Canvas, plans: Sequence[TilePlan], title: str) -> None:
    side = _panel(len(plans))
    for index, plan in enumerate(plans):
        axes = canvas.axes(_LEFT + index * (side + _GAP), _ABOVE_MAPS, side, side)
        _draw_tiles(axes, plan, first=index == 0)
    canvas.figure.text(
        *canvas.point(_LEFT, 0.18),
        title,
        va="top",
        linespacing=1.35,
        fontsize=12 if len(plans) > 1 else 10.5,
    )
    _add_legend(canvas, plans)


def _draw_tiles(axes: "Axes", plan: TilePlan, *, first: bool) -> None:
    rgb, row_edges, column_edges = _tile_colours(plan)
    few = max(rgb.shape[:2]) <= _MAX_TILES_WITH_GAPS
    axes.pcolormesh(
        column_edges, row_edges, rgb, edgecolors="white" if few else "none", linewidth=0.4
    )
    _draw_mask_edges(axes, plan)
    num_tokens = plan.grid.num_tokens
    axes.set(xlim=(0, num_tokens), ylim=(num_tokens, 0))
    for axis, order in ((axes.xaxis, plan.mask.key_order), (axes.yaxis, plan.mask.query_order)):
        positions, labels, name = _ticks(order, plan.grid)
        what = "keys" if axis is axes.xaxis else "queries"
        axis.set_ticks(positions, labels)
        if axis is axes.xaxis or first:
            axis.set_label_text(f"{what}, {name}", fontsize=9)
    axes.tick_params(labelsize=8, length=3, color=_FAINT, labelcolor=_FAINT)
    for spine in axes.spines.values():
        spine.set_visible(False)

    stats = plan.stats
    masked = f"{stats.tiles_masked:,} masked" if stats.tiles_masked else "none masked"
    axes.annotate(
        f"{_MEANING[plan.mode]}\n"
        f"{stats.tiles_visited:,} of {stats.tiles_total:,} tiles run, {masked}\n"
        f"{stats.kept_fraction:.1%} of the pairs",
        (0, 1),
        xytext=(0, 6),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=9.5,
        color=_FAINT,
        linespacing=1.3,
    )
    axes.set_title(plan.mode, fontsize=15, fontweight="bold", loc="left", pad=50)


def _tile_colours(
    plan: TilePlan,
) -> tuple[
    Float[np.ndarray, "rows columns 3"],
    Float[np.ndarray, " rows_plus_1"],
    Float[np.ndarray, " columns_plus_1"],
]:
    """Colour of each cell, masked if any of its tiles is, and the cells' edges."""
    from matplotlib.colors import to_rgb

    tile_map = plan.tile_map()
    visited, masked = (share[..., None] for share in downsample(tile_map, _MAX_CELLS, _MAX_CELLS))
    skipped_rgb, full_rgb, masked_rgb = (
        np.asarray(to_rgb(colour)) for colour in (_SKIPPED, _FULL, _MASKED)
    )
    # A mixture would hide the few masked tiles of a large plan.
    visited_rgb = np.where(masked > 0, masked_rgb, full_rgb)
    rgb = (1 - visited) * skipped_rgb + visited * visited_rgb
    edges = []
    for count, cells, block in zip(
        tile_map.shape, rgb.shape[:2], (plan.block_q, plan.block_kv), strict=True
    ):
        starts = np.arange(cells + 1) * count // cells
        edges.append(np.minimum(starts * block, plan.grid.num_tokens).astype(float))
    return rgb, edges[0], edges[1]


def _draw_mask_edges(axes: "Axes", plan: TilePlan) -> None:
    """Outlines what the mask keeps, so that one sees where tiles stick out or fall short."""
    num_tokens = plan.grid.num_tokens
    rows = np.unique(np.linspace(0, num_tokens - 1, _EDGE_POINTS).astype(np.int64))
    prefix, low, high = plan.mask.row_edges(rows)
    has_band = high > np.maximum(prefix, low)
    inside = (prefix > 0) & (prefix < num_tokens)
    lines = (
        np.where(inside & ~(has_band & (low <= prefix)), prefix, np.nan),
        np.where(has_band & (low > prefix), low, np.nan),
        np.where(has_band & (high < num_tokens), high, np.nan),
    )
    for keys in lines:
        axes.plot(keys, rows + 0.5, color=_EDGE_LINE, linewidth=0.5, solid_capstyle="butt")


def _ticks(order: TokenOrder, grid: TokenGrid) -> tuple[list[int], list[str], str]:
    """Positions and labels along an axis, and what the labels count."""
    start = grid.text_tokens - order.padded_text if order.text_first else 0
    per_frame = grid.tokens_per_frame
    if order.layout == "frame_major":
        step = -(-grid.frames // _MAX_FRAME_TICKS)
        frames = range(0, grid.frames, step)
        positions = [start + frame * per_frame for frame in frames]
        return positions, [str(frame) for frame in frames], "frame after frame (latent frame)"
    others = grid.frames - order.leading_frames
    start += order.leading_frames * per_frame
    step = -(-grid.height // _MAX_FRAME_TICKS)
    places = range(0, grid.height if others else 0, step)
    positions = [start + place * grid.width * others for place in places]
    name = "place after place (picture row)"
    return positions, [str(place) for place in places], name


def _add_legend(canvas: Canvas, plans: Sequence[TilePlan]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(color=_SKIPPED, label="skipped: costs nothing"),
        Patch(color=_FULL, label="full: runs without a mask"),
        Patch(color=_MASKED, label="masked: runs with a mask, the slow way"),
    ]
    if any(plan.mask.width is not None for plan in plans):
        handles.append(Line2D([], [], color=_EDGE_LINE, linewidth=0.5, label="edge of the mask"))
    canvas.figure.legend(
        handles=handles,
        loc="center",
        bbox_to_anchor=canvas.point(canvas.width / 2, _map_height(len(plans)) - 0.36),
        ncols=2 if len(plans) == 1 else len(handles),
        fontsize=9,
        frameon=False,
    )


def _draw_times(axes: "Axes", result: LadderResult) -> None:
    rows = [*result.rows, *result.rivals]
    names = [row.mode if isinstance(row, LadderRow) else row.name for row in rows]
    times = np.array([row.ms_median for row in rows])
    spread = np.array([[row.ms_median - row.ms_min, row.ms_max - row.ms_median] for row in rows])
    colours = [_FULL if isinstance(row, LadderRow) else _RIVAL for row in rows]
    positions = np.arange(len(rows))
    axes.barh(positions, times, height=0.66, color=colours)
    axes.errorbar(times, positions, xerr=spread.T, fmt="none", ecolor=_EDGE_LINE, capsize=3, lw=1)
    longest = float((times + spread[:, 1]).max())
    for position, row in enumerate(rows):
        speedup = (
            "   no speed-up stated"
            if row.speedup_vs_dense is None
            else f"   {row.speedup_vs_dense:.2f}x"
        )
        axes.text(
            row.ms_max + 0.012 * longest,
            position,
            f"{_time(row.ms_median)}{speedup}",
            va="center",
            fontsize=11,
            fontweight="bold" if isinstance(row, LadderRow) else "normal",
        )
    axes.set_yticks(positions, names, fontsize=11)
    axes.set(xlim=(0, 1.3 * longest), ylim=(len(rows) - 0.5, -0.5))
    axes.set_xlabel(_caption(result), fontsize=9, color=_FAINT)
    axes.tick_params(axis="x", labelsize=8, color=_FAINT, labelcolor=_FAINT)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _time(milliseconds: float) -> str:
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:#.3g} ms"


def _caption(result: LadderResult) -> str:
    workload, machine = result.workload, result.machine
    heads = "1 head" if workload.heads == 1 else f"{workload.heads} heads"
    return (
        f"milliseconds a call, median of {result.repeats} interleaved rounds with shortest and "
        f"longest; speed-up against dense\n"
        f"{heads} x {workload.head_dim}, {workload.dtype}; kernel {result.rows[0].implementation} "
        f"on {machine.cpu}, {machine.threads} threads; input: {result.input}"
    )
