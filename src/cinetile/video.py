"""Writing videos to files."""

import io
import os
from fractions import Fraction

import numpy as np
from jaxtyping import Float, UInt8

from cinetile import _checks
from cinetile._files import replace_file
from cinetile.inputs.video import require_av

# x264's scale of loss, where 0 is none, 23 its default, and 17 or 18 looks like none.
_QUALITY = "17"


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
    av = require_av()
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
