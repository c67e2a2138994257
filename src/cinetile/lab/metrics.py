"""How far a video is from another one, frame by frame.

Videos are `[frames, height, width, channels]` with pixels in [0, 1]. `psnr` needs only numpy;
`ssim` and `flip` need the extra `metrics`.
"""

from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from cinetile import _extras

AnyArray = Array | np.ndarray
Video = Float[AnyArray, "frames height width channels"]
# Of the same shape, which is told in our own words where it is not.
Reference = Float[AnyArray, "..."]

# The window of the original paper has 11 x 11 pixels.
_SSIM_WINDOW = 11
# No frames differ by less than this; it keeps the mean over frames finite.
_LEAST_ERROR = 1e-10


def psnr(video: Video, reference: Reference) -> Float[np.ndarray, " frames"]:
    """Peak signal-to-noise ratio of each frame in decibels: -10 log10 of the mean squared error.

    Equal frames have 100 dB rather than infinity.

    Args:
        video: the video in question.
        reference: what it should be.

    Raises:
        ValueError: the shapes differ, or a pixel is not in [0, 1].
    """
    first, second = _checked(video, reference)
    errors = np.square(first - second).mean(axis=(1, 2, 3))
    return -10 * np.log10(np.maximum(errors, _LEAST_ERROR))


def ssim(video: Video, reference: Reference) -> Float[np.ndarray, " frames"]:
    """Structural similarity of each frame, 1 for equal ones, at most.

    Computed by scikit-image with the settings of Wang et al., "Image quality assessment: from error
    visibility to structural similarity" (2004): Gaussian windows of 11 x 11, sigma 1.5.

    Args:
        video: the video in question.
        reference: what it should be.

    Raises:
        ImportError: scikit-image is not installed.
        ValueError: the shapes differ, a frame is smaller than the window, or a pixel is not in
            [0, 1].
    """
    compare: Any = _require("skimage.metrics", "scikit-image").structural_similarity
    first, second = _checked(video, reference)
    if min(first.shape[1:3]) < _SSIM_WINDOW:
        raise ValueError(
            f"video must have at least {_SSIM_WINDOW} pixels a side, got {first.shape[1:3]}"
        )
    settings: dict[str, Any] = {
        "data_range": 1.0,
        "channel_axis": -1,
        "gaussian_weights": True,
        "sigma": 1.5,
        "use_sample_covariance": False,
    }
    return np.array([compare(a, b, **settings) for a, b in zip(second, first, strict=True)])


def flip(video: Video, reference: Reference) -> Float[np.ndarray, " frames"]:
    """Perceived difference of each frame when one flips between both, 0 for equal ones, at most 1.

    The mean of the map of Andersson et al., "FLIP: A difference evaluator for alternating images"
    (2020), as NVIDIA's `flip-evaluator` computes it, at its standard distance (67 pixels a degree).
    It models vision, and unlike learned metrics it needs no downloaded weights.

    Args:
        video: the video in question; RGB.
        reference: what it should be.

    Raises:
        ImportError: flip-evaluator is not installed.
        ValueError: the shapes differ, there are not three channels, or a pixel is not in [0, 1].
    """
    evaluate: Any = _require("flip_evaluator", "flip-evaluator").evaluate
    first, second = _checked(video, reference)
    if first.shape[-1] != 3:
        raise ValueError(f"video must have 3 channels, got shape {first.shape}")
    return np.array([evaluate(b, a, "LDR")[1] for a, b in zip(first, second, strict=True)])


def require_metrics() -> None:
    """Raises where `ssim` or `flip` cannot be computed.

    Raises:
        ImportError: a package is not installed.
    """
    _require("skimage.metrics", "scikit-image")
    _require("flip_evaluator", "flip-evaluator")


def _require(module: str, package: str) -> ModuleType:
    feature = "measuring how far videos differ"
    return _extras.require(module, extra="metrics", feature=feature, package=package)


def _checked(video: Video, reference: Reference) -> tuple[np.ndarray, np.ndarray]:
    """Both as float32 on the host."""
    if video.shape != reference.shape or video.ndim != 4 or not video.shape[0]:
        raise ValueError(
            "video and reference must both be [frames, height, width, channels], "
            f"got shapes {video.shape} and {reference.shape}"
        )
    arrays = []
    for name, array in (("video", video), ("reference", reference)):
        pixels = np.asarray(array, np.float32)
        low, high = float(pixels.min()), float(pixels.max())
        if not (low >= 0 and high <= 1):
            raise ValueError(f"{name} must have pixels in [0, 1], got {low:g} to {high:g}")
        arrays.append(pixels)
    return arrays[0], arrays[1]
