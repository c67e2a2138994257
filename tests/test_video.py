"""Video files."""

from pathlib import Path

import numpy as np
import pytest

from cinetile.models import video
from cinetile.models.video import count_frames, read_frames, write_video


def moving_square(frames: int = 5, height: int = 32, width: int = 48) -> np.ndarray:
    pixels = np.full((frames, height, width, 3), 0.25, np.float32)
    for index in range(frames):
        pixels[index, 8:24, 4 + 4 * index : 20 + 4 * index] = (0.9, 0.2, 0.1)
    return pixels


@pytest.mark.parametrize("as_bytes", [False, True])
def test_what_is_written_can_be_read(tmp_path: Path, as_bytes: bool):
    frames, path = moving_square(), tmp_path / "square.mp4"
    write_video(path, (frames * 255).round().astype(np.uint8) if as_bytes else frames, fps=8)
    assert count_frames(path) == 5
    for index, pixels in read_frames(path, set(range(5)), 32, 48):
        # Colors are stored at half the resolution, so edges differ.
        assert np.abs(pixels / 255 - frames[index]).mean() < 0.03
    assert [file.name for file in tmp_path.iterdir()] == ["square.mp4"]


def test_frame_rate(tmp_path: Path):
    import av

    write_video(tmp_path / "square.mp4", moving_square(), fps=12)
    with av.open(str(tmp_path / "square.mp4")) as container:
        assert container.streams.video[0].average_rate == 12


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
):
    path = tmp_path / "square.mp4"
    path.write_bytes(b"before")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(video, "_encode", fail)
    with pytest.raises(error):
        write_video(path, moving_square())
    assert path.read_bytes() == b"before"
    assert [file.name for file in tmp_path.iterdir()] == ["square.mp4"]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (np.zeros((2, 5, 4, 3)), "even height and width"),
        (np.zeros((2, 4, 4, 4)), r"must be \[frames, height, width, 3\]"),
        (np.zeros((0, 4, 4, 3)), r"must be \[frames, height, width, 3\]"),
    ],
)
def test_frames(tmp_path: Path, frames: np.ndarray, message: str):
    with pytest.raises(ValueError, match=message):
        write_video(tmp_path / "bad.mp4", frames)


def test_fps(tmp_path: Path):
    with pytest.raises(ValueError, match="fps must be at least 1"):
        write_video(tmp_path / "bad.mp4", moving_square(), fps=0)
