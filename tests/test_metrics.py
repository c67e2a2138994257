"""Metrics on videos."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cinetile as ct

METRICS = (ct.metrics.psnr, ct.metrics.ssim, ct.metrics.flip)


def noise(shape: tuple[int, ...] = (3, 16, 20, 3), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape, np.float32)


def constant(value: float) -> np.ndarray:
    return np.full((2, 16, 16, 3), value, np.float32)


class TestValues:
    @pytest.mark.parametrize(
        ("metric", "best"),
        [(ct.metrics.psnr, 100.0), (ct.metrics.ssim, 1.0), (ct.metrics.flip, 0.0)],
    )
    def test_equal_videos(self, metric: Callable[..., np.ndarray], best: float) -> None:
        np.testing.assert_allclose(metric(noise(), noise()), np.full(3, best), rtol=1e-6)

    def test_psnr_of_a_known_error(self) -> None:
        video = constant(0.5)
        video[1] += 0.1
        np.testing.assert_allclose(ct.metrics.psnr(video, constant(0.5))[1], 20.0, atol=1e-4)
        np.testing.assert_allclose(
            ct.metrics.psnr(constant(0.75), constant(0.25)), 20 * np.log10(2), atol=1e-5
        )

    def test_ssim_of_plain_frames(self) -> None:
        """Without variance the closed form is (2ab + c) / (a^2 + b^2 + c), c = 0.01^2."""
        found = ct.metrics.ssim(constant(0.2), constant(0.6))
        np.testing.assert_allclose(found, (0.24 + 1e-4) / (0.04 + 0.36 + 1e-4), rtol=1e-4)

    def test_flip_of_black_against_white_is_near_its_end(self) -> None:
        assert 0.9 < ct.metrics.flip(constant(0.0), constant(1.0)).min() <= 1

    @pytest.mark.parametrize(("metric", "sign"), list(zip(METRICS, (-1, -1, 1), strict=True)))
    def test_more_noise_is_worse(self, metric: Callable[..., np.ndarray], sign: int) -> None:
        plain, grain = constant(0.5), noise((2, 16, 16, 3)) - 0.5
        values = [float(metric(plain + strength * grain, plain).mean()) for strength in (0.1, 0.4)]
        assert sign * (values[1] - values[0]) > 0

    @pytest.mark.parametrize("metric", METRICS)
    def test_frames_are_taken_one_by_one(self, metric: Callable[..., np.ndarray]) -> None:
        first, second = noise(seed=1), noise(seed=2)
        alone = [float(metric(first[i : i + 1], second[i : i + 1])[0]) for i in range(3)]
        np.testing.assert_allclose(metric(first, second), alone, rtol=1e-6)


class TestBadInput:
    @pytest.mark.parametrize("metric", METRICS)
    @pytest.mark.parametrize(
        ("video", "message"),
        [
            (noise((3, 16, 16, 3)), "shapes"),
            (noise() + 0.5, r"video must have pixels in \[0, 1\]"),
            (noise() * np.nan, r"video must have pixels in \[0, 1\]"),
        ],
        ids=["shape", "range", "nan"],
    )
    def test_refused(self, metric: Callable[..., Any], video: np.ndarray, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            metric(video, noise())

    def test_no_frames(self) -> None:
        with pytest.raises(ValueError, match="shapes"):
            ct.metrics.psnr(noise()[:0], noise()[:0])

    def test_frames_below_the_window(self) -> None:
        with pytest.raises(ValueError, match="at least 11 pixels"):
            ct.metrics.ssim(noise((1, 8, 16, 3)), noise((1, 8, 16, 3)))

    def test_flip_needs_colors(self) -> None:
        with pytest.raises(ValueError, match="3 channels"):
            ct.metrics.flip(noise((1, 16, 16, 1)), noise((1, 16, 16, 1)))

    @pytest.mark.parametrize(
        ("metric", "module"),
        [(ct.metrics.ssim, "skimage.metrics"), (ct.metrics.flip, "flip_evaluator")],
    )
    def test_missing_package(
        self, metric: Callable[..., Any], module: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ImportError, match=r'run .*"\.\[metrics\]"'):
            metric(noise(), noise())
