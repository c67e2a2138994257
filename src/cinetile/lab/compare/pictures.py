"""Two videos in one: abreast as a video, and a few frames with their difference as a picture."""

import math
import os

import numpy as np
from jaxtyping import Float

from cinetile.lab.canvas import Canvas, require_matplotlib
from cinetile.lab.compare.videos import VideoComparison

Frames = Float[np.ndarray, "frames height width 3"]

DIFFERENCE_GAIN = 4
_SMALLEST_PANEL = 256  # pixels; smaller videos are magnified by a whole number
_GAP = 8
_MOST_FRAMES = 6
_LABEL_ROWS = 28  # pixels above the panels of a video
_SHORTEST_SECONDS = 3.0  # a shorter video is played again
_LEAST_PSNR_RANGE, _LEAST_SSIM_RANGE = 6.0, 0.1  # so that an axis does not magnify noise
# Inches.
_PANEL, _LEFT, _TOP, _CHART, _MARGIN = 1.5, 1.1, 0.75, 1.3, 0.8


def difference(first: Frames, second: Frames, gain: float = DIFFERENCE_GAIN) -> Frames:
    """The absolute difference of two videos, `gain` times as bright, at most white."""
    return np.minimum(np.abs(first - second) * gain, 1.0)


def side_by_side(dense: Frames, sparse: Frames) -> Float[np.ndarray, "frames rows columns 3"]:
    """Dense, sparse and their magnified difference abreast, named, with white gaps.

    Small videos are magnified by a whole number, and sizes are made even, as MP4 needs.
    """
    times = max(1, _SMALLEST_PANEL // max(dense.shape[1:3]))
    panels = [
        video.repeat(times, axis=1).repeat(times, axis=2)
        for video in (dense, sparse, difference(dense, sparse))
    ]
    gap = np.ones((*panels[0].shape[:2], _GAP, 3), np.float32)
    abreast = np.concatenate([panels[0], gap, panels[1], gap, panels[2]], axis=2)
    labels = _label_strip(abreast.shape[2], panels[0].shape[2] + _GAP)
    abreast = np.concatenate([np.broadcast_to(labels, (len(abreast), *labels.shape)), abreast], 1)
    odd_rows, odd_columns = abreast.shape[1] % 2, abreast.shape[2] % 2
    return np.pad(abreast, ((0, 0), (0, odd_rows), (0, odd_columns), (0, 0)), constant_values=1.0)


def played_again(video: Frames, fps: int) -> Float[np.ndarray, "longest height width 3"]:
    """The video, repeated until it lasts three seconds: whole repetitions only."""
    times = max(1, math.ceil(_SHORTEST_SECONDS * fps / len(video)))
    return np.tile(video, (times, 1, 1, 1))


def _label_strip(width: int, stride: int) -> Float[np.ndarray, "label_rows width 3"]:
    """Black names of the three panels on white, at the left edge of each."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width, _LABEL_ROWS), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(18)
    for index, name in enumerate(("dense", "sparse", f"difference x {DIFFERENCE_GAIN}")):
        draw.text((index * stride + 4, 3), name, fill="black", font=font)
    return np.asarray(image, np.float32) / 255


def comparison_picture(
    result: VideoComparison, path: str | os.PathLike[str], *, title: str, subtitle: str = ""
) -> None:
    """Draws frames of both videos, their difference, and the quality of every frame.

    Args:
        result: what was compared.
        path: the PNG file to write, whole or not at all.
        title: heading, such as the prompt.
        subtitle: a line below it, such as the policy and the times.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    frames, height, width, _ = result.dense.frames.shape
    shown = np.unique(np.linspace(0, frames - 1, _MOST_FRAMES).round().astype(int))
    panel = _PANEL * height / width
    figure_width = _LEFT + len(shown) * _PANEL + _MARGIN
    chart_top = _TOP + 3 * panel + 0.35
    canvas = Canvas(figure_width, chart_top + _CHART + 0.6)
    canvas.figure.text(*canvas.point(0.15, 0.3), title, fontsize=12, fontweight="bold")
    canvas.figure.text(*canvas.point(0.15, 0.5), subtitle, fontsize=8, color="#555555")
    rows = (
        ("dense", result.dense.frames),
        ("sparse", result.sparse.frames),
        (f"difference\nx {DIFFERENCE_GAIN}", difference(result.dense.frames, result.sparse.frames)),
    )
    for row, (name, video) in enumerate(rows):
        top = _TOP + row * panel
        canvas.figure.text(*canvas.point(0.15, top + panel / 2), name, fontsize=10, va="center")
        for column, frame in enumerate(shown):
            axes = canvas.axes(_LEFT + column * _PANEL, top, _PANEL - 0.05, panel - 0.05)
            axes.imshow(video[frame], interpolation="nearest")
            axes.set_axis_off()
            if row == 0:
                axes.set_title(f"frame {frame}", fontsize=8)
    chart = canvas.axes(_LEFT, chart_top, len(shown) * _PANEL - 0.05, _CHART)
    chart.plot(np.arange(frames), result.psnr, color="#0072b2", marker="o", markersize=3)
    chart.set_ylabel("PSNR, dB", color="#0072b2", fontsize=9)
    chart.set_ylim(_limits(result.psnr, _LEAST_PSNR_RANGE))
    chart.set_xlabel("frame", fontsize=9)
    similarity = chart.twinx()
    similarity.plot(np.arange(frames), result.ssim, color="#e69f00", marker="s", markersize=3)
    similarity.set_ylabel("SSIM", color="#a66f00", fontsize=9)
    similarity.set_ylim(_limits(result.ssim, _LEAST_SSIM_RANGE))
    for axes in (chart, similarity):
        axes.tick_params(labelsize=8)
    canvas.save(path)


def _limits(values: Float[np.ndarray, " frames"], least_range: float) -> tuple[float, float]:
    """Limits of an axis around all finite values, at least `least_range` apart."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0, least_range
    low, high = float(finite.min()), float(finite.max())
    margin = max(0.1 * (high - low), (least_range - (high - low)) / 2)
    return low - margin, high + margin
