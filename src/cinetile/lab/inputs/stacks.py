"""Saved query, key and value of several steps and layers: one file each, told by their names."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SUFFIXES: tuple[str, ...] = (".npz", ".safetensors")


@dataclass(frozen=True)
class SavedCall:
    """A file of one attention call.

    Attributes:
        path: the file; see `load_qkv`.
        step: index of the denoising step.
        layer: index of the layer.
    """

    path: Path
    step: int
    layer: int


def find_calls(paths: Sequence[str | os.PathLike[str]]) -> tuple[SavedCall, ...]:
    """Finds the files of attention calls, and which step and layer each is of.

    `step3_layer12.npz`, `run-step_3-layer_12.safetensors` and the like say it in their names. A
    name without a step is of step 0; names of which none has a layer count as layers in their
    order.

    Args:
        paths: files, and folders that hold such files.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: a folder has no such file, only some names have a layer, or two files are of
            the same step and layer.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        found = [path]
        if path.is_dir():
            found = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
            if not found:
                raise ValueError(f"{path} holds no {' or '.join(SUFFIXES)} file")
        elif not path.is_file():
            raise FileNotFoundError(f"there is no file or folder {str(path)!r}")
        files += found
    steps = [_number("step", file) for file in files]
    layers = [_number("layer", file) for file in files]
    if None in layers and any(layer is not None for layer in layers):
        nameless = files[layers.index(None)]
        raise ValueError(f"{nameless} says no layer in its name, though others do")
    calls = tuple(
        SavedCall(file, step or 0, index if layer is None else layer)
        for index, (file, step, layer) in enumerate(zip(files, steps, layers, strict=True))
    )
    seen: dict[tuple[int, int], Path] = {}
    for call in calls:
        first = seen.setdefault((call.step, call.layer), call.path)
        if first is not call.path:
            raise ValueError(
                f"{first} and {call.path} are both of step {call.step}, layer {call.layer}"
            )
    return calls


def _number(name: str, file: Path) -> int | None:
    match = re.search(rf"{name}[_-]?([0-9]{{1,9}})(?![0-9])", file.stem.lower())
    return None if match is None else int(match.group(1))
