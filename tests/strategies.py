"""Hypothesis strategies for grids, orders, and masks with the matrix that they must equal."""

from dataclasses import dataclass
from typing import Literal

import brute_force
import numpy as np
from hypothesis import strategies as st

import cinetile as ct

Model = Literal["wan", "hunyuan", "cogvideox"]
PATTERNS: tuple[brute_force.Pattern, ...] = ("spatial", "temporal")
MODELS: tuple[Model, ...] = ("wan", "hunyuan", "cogvideox")


@st.composite
def grids(draw: st.DrawFn, max_text: int = 6) -> ct.TokenGrid:
    """Grids of up to about 90 tokens; one frame, one token and no text are among them."""
    return ct.TokenGrid(
        draw(st.integers(1, 5)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        text_tokens=draw(st.integers(0, max_text)),
        text_first=draw(st.booleans()),
    )


@st.composite
def grids_with_orders(draw: st.DrawFn) -> tuple[ct.TokenGrid, ct.TokenOrder]:
    grid = draw(grids())
    order = ct.TokenOrder(
        draw(st.sampled_from(["frame_major", "token_major"])),
        leading_frames=draw(st.integers(0, grid.frames)),
        text_first=draw(st.booleans()),
        padded_text=draw(st.integers(0, grid.text_tokens)),
    )
    return grid, order


@dataclass(frozen=True)
class Example:
    """A mask and its matrix by definition, in frame-major order."""

    mask: ct.Mask
    kept: np.ndarray

    @property
    def placed(self) -> np.ndarray:
        """The matrix with queries and keys in the mask's own orders."""
        grid = self.mask.grid
        queries, keys = self.mask.query_order.indices(grid), self.mask.key_order.indices(grid)
        return self.kept[np.ix_(queries, keys)]


@st.composite
def band_examples(draw: st.DrawFn) -> Example:
    grid = draw(grids())
    pattern: brute_force.Pattern = draw(st.sampled_from(PATTERNS))
    build = {"spatial": ct.spatial_mask, "temporal": ct.temporal_mask}[pattern]
    width = draw(st.integers(0, grid.num_tokens + 2))
    sink_frames = draw(st.integers(0, grid.frames))
    mask = build(grid, width=width, sink_frames=sink_frames)
    return Example(mask, brute_force.band_mask(grid, pattern, width, sink_frames))


@st.composite
def upstream_examples(draw: st.DrawFn) -> Example:
    model: Model = draw(st.sampled_from(MODELS))
    shape = draw(grids(max_text=0 if model == "wan" else 6))
    grid = ct.TokenGrid(
        shape.frames,
        shape.height,
        shape.width,
        text_tokens=shape.text_tokens,
        text_first=model == "cogvideox",
    )
    pattern: brute_force.Pattern = draw(st.sampled_from(PATTERNS))
    prompt_length = sink = None
    if model == "hunyuan":
        prompt_length = draw(st.none() | st.integers(0, grid.text_tokens))
    if model == "cogvideox":
        sink = draw(st.booleans())
    # A width of 0 keeps nothing where the comparison is <, unless text or sink is left.
    width = draw(st.integers(int(model != "wan"), grid.num_tokens + 2))
    return Example(
        ct.svg_mask(
            grid, pattern, width=width, model=model, prompt_length=prompt_length, sink=sink
        ),
        brute_force.upstream_mask(
            grid, pattern, model, width, prompt_length=prompt_length, sink=bool(sink)
        ),
    )


@st.composite
def dense_examples(draw: st.DrawFn) -> Example:
    grid = draw(grids())
    return Example(ct.dense_mask(grid), np.ones((grid.num_tokens, grid.num_tokens), bool))


examples = st.one_of(band_examples(), upstream_examples(), dense_examples())


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Example, int, int]:
    """A mask and tile sizes, some of them larger than the sequence."""
    example = draw(examples)
    size = st.integers(1, min(24, example.mask.num_tokens + 2))
    return example, draw(size), draw(size)
