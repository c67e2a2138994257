"""The masks of Sparse VideoGen as published, bit for bit, to compare with and to stay in parity."""

import math
from typing import Literal

from cinetile import _checks
from cinetile.grid import Layout, TokenGrid, TokenOrder, require_grid
from cinetile.masks.edges import Edge
from cinetile.masks.mask import Mask, RowSegment
from cinetile.masks.video import first_video_row, video_and_text_rows
from cinetile.masks.widths import WIDTH_MULTIPLE, exact_width

Model = Literal["wan", "hunyuan", "cogvideox"]
MODELS: tuple[str, ...] = ("wan", "hunyuan", "cogvideox")
_LAYOUT_OF_PATTERN: dict[str, Layout] = {"spatial": "frame_major", "temporal": "token_major"}


def svg_mask(
    grid: TokenGrid,
    pattern: Literal["spatial", "temporal"],
    density: float | None = None,
    width: int | None = None,
    *,
    model: Model = "wan",
    prompt_length: int | None = None,
    sink: bool | None = None,
) -> Mask:
    """The mask of Sparse VideoGen (arXiv:2502.01776) for one of the models that it supports.

    One band serves both patterns, each in its own token order, and the sink prefix is taken in
    that order: for "temporal" it is *not* the video's first frame (use `temporal_mask` for that).

    - wan: no text; `|q - k| <= width`, width rounded up to a multiple of 128; the first
      `tokens_per_frame` keys as sink.
    - hunyuan: text last; `|q - k| < width`, rounded down; text rows and columns dense; padded
      text attends only to padded text; no sink.
    - cogvideox: text first; `|q - k| < width`, rounded down; text rows and columns dense;
      the first `tokens_per_frame` keys behind the text as an optional sink.

    Args:
        grid: the tokens; its text must stand where the model has it.
        pattern: "spatial" (frame-major order) or "temporal" (token-major order).
        density: fraction of pairs that the band and the text keep, in (0, 1]; upstream's
            rounding to a multiple of 128 applies. Either this or `width`.
        width: the band's width in tokens as upstream compares with it, already rounded.
        model: "wan", "hunyuan" or "cogvideox".
        prompt_length: text tokens that are not padding; all of them by default. hunyuan only.
        sink: whether the sink prefix is kept; by default as upstream ships it (wan only).

    Raises:
        ValueError: an argument is out of range, does not fit the model, or would leave query
            rows without any key.
    """
    require_grid(grid)
    _checks.choice("pattern", pattern, tuple(_LAYOUT_OF_PATTERN))
    _checks.choice("model", model, MODELS)
    _check_text(grid, model, prompt_length)
    padded_text = 0 if prompt_length is None else grid.text_tokens - prompt_length
    sink = model == "wan" if sink is None else _checks.boolean("sink", sink)
    if sink and model == "hunyuan":
        raise ValueError("sink must be False for model 'hunyuan', which has none")
    width = _width(grid, density, width, rounded_up=model == "wan")
    farthest = width if model == "wan" else width - 1

    real_text = grid.text_tokens - padded_text
    prefix = real_text + (grid.tokens_per_frame if sink else 0)
    if farthest < 0 and prefix == 0:
        raise ValueError(f"width must be above 0 where no key is kept otherwise, got {width}")
    low, high = (
        Edge(real_text, offset - first_video_row(grid), grid.num_video_tokens)
        for offset in (-max(farthest, 0), farthest + 1)
    )
    layout = _LAYOUT_OF_PATTERN[pattern]
    segments = video_and_text_rows(grid, prefix, low, high)
    if padded_text:
        segments = _with_padding(grid, segments, padded_text)
    return Mask(
        name=f"svg-{model}-{pattern}",
        grid=grid,
        query_order=TokenOrder(layout, text_first=grid.text_first, padded_text=padded_text),
        key_order=TokenOrder(layout, text_first=True, padded_text=padded_text),
        segments=segments,
        width=max(farthest, 0),
    )


def _check_text(grid: TokenGrid, model: str, prompt_length: int | None) -> None:
    if model == "wan" and grid.text_tokens:
        raise ValueError(f"model 'wan' attends only to video, got {grid.text_tokens=}")
    if grid.text_tokens and grid.text_first != (model == "cogvideox"):
        place = "before" if model == "cogvideox" else "after"
        raise ValueError(f"model {model!r} has its text {place} the video, got {grid.text_first=}")
    if prompt_length is None:
        return
    if model != "hunyuan":
        raise ValueError(f"prompt_length is for model 'hunyuan' only, got model {model!r}")
    _checks.integer("prompt_length", prompt_length, minimum=0, maximum=grid.text_tokens)


def _width(grid: TokenGrid, density: float | None, width: int | None, *, rounded_up: bool) -> int:
    if (density is None) == (width is None):
        raise ValueError(f"give exactly one of density and width, got {density=} and {width=}")
    if width is not None:
        return min(_checks.integer("width", width, minimum=0), grid.num_tokens)
    density = _checks.fraction("density", density)
    # Upstream carries the width in frames and rounds what comes back from that.
    in_frames = exact_width(grid.num_tokens, density, grid.text_tokens) / grid.tokens_per_frame
    blocks = in_frames * grid.tokens_per_frame / WIDTH_MULTIPLE
    return (math.ceil(blocks) if rounded_up else math.floor(blocks)) * WIDTH_MULTIPLE


def _with_padding(
    grid: TokenGrid, segments: tuple[RowSegment, ...], padded_text: int
) -> tuple[RowSegment, ...]:
    """Cuts the padded text off the last rows; it keeps the padded keys, which stand last."""
    video, _ = segments
    first_padded = grid.num_tokens - padded_text
    real_end, all_end = Edge(first_padded), Edge(grid.num_tokens)
    padding = RowSegment(first_padded, grid.num_tokens, 0, real_end, all_end)
    if first_padded == video.stop:
        return (video, padding)
    text = RowSegment(video.stop, first_padded, first_padded, real_end, real_end)
    return (video, text, padding)
