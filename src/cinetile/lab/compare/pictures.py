"""Two videos in one: abreast as a video, and a few frames with their difference as a picture."""

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
# Inches.
_PANEL, _LEFT, _TOP, _CHART, _MARGIN = 1.5, 1.1, 0.75, 1.3, 0.8


def difference(first: Frames, second: Frames, gain: float = DIFFERENCE_GAIN) -> Frames:
    """The absolute difference of two videos, `gain` times as bright, at most white."""
    return np.minimum(np.abs(first - second) * gain, 1.0)


def side_by_side(dense: Frames, sparse: Frames) -> Float[np.ndarray, "frames rows columns 3"]:
    """Dense, sparse and their magnified difference abreast, with white gaps.

    Small videos are magnified by a whole number, and sizes are made even, as MP4 needs.
    """
    times = max(1, _SMALLEST_PANEL // max(dense.shape[1:3]))
    panels = [
        video.repeat(times, axis=1).repeat(times, axis=2)
        for video in (dense, sparse, difference(dense, sparse))
    ]
    gap = np.ones((*panels[0].shape[:2], _GAP, 3), np.float32)
    abreast = np.concatenate([panels[0], gap, panels[1], gap, panels[2]], axis=2)
    odd_rows, odd_columns = abreast.shape[1] % 2, abreast.shape[2] % 2
    return np.pad(abreast, ((0, 0), (0, odd_rows), (0, odd_columns), (0, 0)), constant_values=1.0)


def comparison_picture(
    result: VideoComparison, path: str | os.PathLike[str], *, title: str
) -> None:
    """Draws frames of both videos, their difference, and the quality of every frame.

    Args:
        result: what was compared.
        path: the PNG file to write, whole or not at all.
        title: heading, such as the prompt.

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
    chart.set_xlabel("frame", fontsize=9)
    similarity = chart.twinx()
    similarity.plot(np.arange(frames), result.ssim, color="#e69f00", marker="s", markersize=3)
    similarity.set_ylabel("SSIM", color="#a66f00", fontsize=9)
    for axes in (chart, similarity):
        axes.tick_params(labelsize=8)
    canvas.save(path)
