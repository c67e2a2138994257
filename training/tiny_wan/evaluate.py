"""Scores the held-out captions: `python -m training.tiny_wan.evaluate STATE [--sheet PNG]`."""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from training.tiny_wan import caption_check, export, flow, scenes

SHEET_FRAMES = (0, 2, 4, 6, 8)


def contact_sheet(videos: np.ndarray, path: Path, *, columns: int = 2) -> None:
    """Writes a picture with one video a row and time to the right, `columns` videos abreast."""
    margin = 2
    strips = []
    for video in videos:
        frames = [
            np.pad(video[index], ((margin,) * 2, (margin,) * 2, (0, 0)), constant_values=1)
            for index in SHEET_FRAMES
        ]
        strips.append(
            np.pad(np.concatenate(frames, 1), ((0, 0), (4, 4), (0, 0)), constant_values=1)
        )
    rows = [
        np.concatenate(strips[first : first + columns], 1)
        for first in range(0, len(strips) - columns + 1, columns)
    ]
    picture = Image.fromarray((np.concatenate(rows) * 255).round().astype(np.uint8))
    picture.quantize(128).save(path, optimize=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state", type=Path, help="state.pt of a training run")
    parser.add_argument("--captions", type=int, default=48, help="how many held-out captions")
    parser.add_argument("--steps", type=int, default=export.STEPS)
    parser.add_argument("--guidance", type=float, default=export.GUIDANCE)
    parser.add_argument("--shift", type=float, default=export.FLOW_SHIFT)
    parser.add_argument("--frames", type=int, default=scenes.FRAMES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--post", action="store_true", help="put a post into every scene")
    parser.add_argument("--sheet", type=Path, help="write a contact sheet of 24 videos here")
    parser.add_argument("--verbose", action="store_true", help="print every reading")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    state = torch.load(arguments.state)
    chosen = scenes.held_out_scenes()[:: 48 // arguments.captions]
    if arguments.post:
        chosen = [scenes.with_post(scene) for scene in chosen]
    videos = flow.sample(
        flow.make_system(),
        state["average"],
        [scenes.caption(scene) for scene in chosen],
        frames=arguments.frames,
        steps=arguments.steps,
        guidance=arguments.guidance,
        shift=arguments.shift,
        seed=arguments.seed,
    )
    if arguments.sheet:
        contact_sheet(videos[:: max(1, len(videos) // 24)], arguments.sheet)
    if arguments.verbose:
        for scene, video in zip(chosen, videos, strict=True):
            print(scenes.caption(scene), "->", caption_check.read(video))
    shares = caption_check.score(videos, chosen)
    match = float(np.mean([caption_check.read(video).match for video in videos]))
    rounded = {name: round(share, 3) for name, share in (shares | {"match": match}).items()}
    print(json.dumps({"step": state["step"]} | rounded))


if __name__ == "__main__":
    main()
