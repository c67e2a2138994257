"""The library's own masks: spatial, temporal and dense, with the video's first frames as sink."""

from cinetile import _checks
from cinetile.grid import TokenGrid, TokenOrder, require_grid
from cinetile.masks.edges import Edge
from cinetile.masks.mask import Mask, RowSegment
from cinetile.masks.widths import WIDTH_MULTIPLE, width_from_density


def spatial_mask(
    grid: TokenGrid,
    density: float | None = None,
    width: int | None = None,
    sink_frames: int = 1,
    *,
    multiple: int = WIDTH_MULTIPLE,
) -> Mask:
    """Mask of heads that look at near frames: a band in frame-major order.

    Video queries keep the video keys with `|q - k| <= width` in frame-major positions, the
    first `sink_frames` frames and all text; text queries keep everything.

    Args:
        grid: the tokens.
        density: fraction of pairs that the band keeps, in (0, 1]; the sink comes on top.
            Either this or `width`.
        width: largest distance in tokens, from 0.
        sink_frames: first frames of the video that every query keeps; 0 for no sink.
        multiple: a width that follows from `density` is rounded up to a multiple of this.

    Raises:
        ValueError: an argument is out of range, or not exactly one of density and width is given.
    """
    width, sink_frames = _band(grid, density, width, sink_frames, multiple)
    prefix = grid.text_tokens + sink_frames * grid.tokens_per_frame
    low, high = (
        Edge(grid.text_tokens, offset - first_video_row(grid), grid.num_video_tokens)
        for offset in (-width, width + 1)
    )
    return Mask(
        name="spatial",
        grid=grid,
        query_order=TokenOrder(text_first=grid.text_first),
        key_order=TokenOrder(text_first=True),
        segments=video_and_text_rows(grid, prefix, low, high),
        width=width,
    )


def temporal_mask(
    grid: TokenGrid,
    density: float | None = None,
    width: int | None = None,
    sink_frames: int = 1,
    *,
    multiple: int = WIDTH_MULTIPLE,
) -> Mask:
    """Mask of heads that look at the same place in other frames: a band in token-major order.

    Video queries keep the video keys with `|q - k| <= width` in token-major positions
    (`p * F + f`), the real first `sink_frames` frames of the video and all text; text queries
    keep everything. Keys stand with the sink frames first, so that every row is one prefix and
    one band although the sink frame is scattered in token-major order.

    Args:
        grid: the tokens.
        density: fraction of pairs that the band keeps, in (0, 1]; the sink comes on top.
            Either this or `width`.
        width: largest distance in token-major positions, from 0.
        sink_frames: first frames of the video that every query keeps; 0 for no sink.
        multiple: a width that follows from `density` is rounded up to a multiple of this.

    Raises:
        ValueError: an argument is out of range, or not exactly one of density and width is given.
    """
    width, sink_frames = _band(grid, density, width, sink_frames, multiple)
    prefix = grid.text_tokens + sink_frames * grid.tokens_per_frame
    if sink_frames == grid.frames:
        low = high = Edge(prefix)
    else:
        low, high = (
            Edge(
                prefix,
                offset - first_video_row(grid),
                grid.num_video_tokens,
                grid.frames,
                sink_frames,
            )
            for offset in (-width, width + 1)
        )
    return Mask(
        name="temporal",
        grid=grid,
        query_order=TokenOrder("token_major", text_first=grid.text_first),
        key_order=TokenOrder("token_major", leading_frames=sink_frames, text_first=True),
        segments=video_and_text_rows(grid, prefix, low, high),
        width=width,
    )


def dense_mask(grid: TokenGrid) -> Mask:
    """Mask that keeps every pair, in frame-major order."""
    require_grid(grid)
    order = TokenOrder(text_first=grid.text_first)
    everything = Edge(grid.num_tokens)
    rows = RowSegment(0, grid.num_tokens, grid.num_tokens, everything, everything)
    return Mask("dense", grid, order, order, (rows,))


def _band(
    grid: TokenGrid, density: float | None, width: int | None, sink_frames: int, multiple: int
) -> tuple[int, int]:
    require_grid(grid)
    sink_frames = _checks.integer("sink_frames", sink_frames, minimum=0, maximum=grid.frames)
    if (density is None) == (width is None):
        raise ValueError(f"give exactly one of density and width, got {density=} and {width=}")
    if width is not None:
        return min(_checks.integer("width", width, minimum=0), grid.num_tokens), sink_frames
    width = width_from_density(
        grid.num_tokens,
        density,  # pyright: ignore[reportArgumentType]
        text_tokens=grid.text_tokens,
        multiple=multiple,
    )
    return width, sink_frames


def first_video_row(grid: TokenGrid) -> int:
    """Query position of the first video token where the text stands as in the grid."""
    return grid.text_tokens if grid.text_first else 0


def video_and_text_rows(
    grid: TokenGrid, prefix: int, low: Edge, high: Edge
) -> tuple[RowSegment, ...]:
    """Segments of video rows with the given prefix and band, and of text rows that keep all."""
    first = first_video_row(grid)
    video = RowSegment(first, first + grid.num_video_tokens, prefix, low, high)
    if not grid.text_tokens:
        return (video,)
    start = 0 if grid.text_first else grid.num_video_tokens
    everything = Edge(grid.num_tokens)
    text = RowSegment(start, start + grid.text_tokens, grid.num_tokens, everything, everything)
    return (text, video) if grid.text_first else (video, text)
