"""Attention calls that every implementation is tested on; benchmarks take the huge ones."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

import cinetile as ct

Mode = Literal["dense", "naive", "split", "aligned"]
MODES: tuple[Mode, ...] = ("dense", "naive", "split", "aligned")
MaskBuilder = Callable[[ct.TokenGrid], ct.Mask]


@dataclass(frozen=True)
class KernelCase:
    """One call of `ct.attention`, by sizes; arrays are drawn when asked for.

    Attributes:
        name: what is special about it; the id of its tests.
        grid: the tokens.
        build_mask: gives the mask of a grid.
        block_q: queries in a tile.
        block_kv: keys in a tile.
        mode: mode of the plan.
        rounding: rounding policy of an aligned plan.
        batch: rows of the batch.
        heads: attention heads.
        head_dim: features of a head.
        dtype: of query, key and value.
    """

    name: str
    grid: ct.TokenGrid
    build_mask: MaskBuilder
    block_q: int = 16
    block_kv: int = 16
    mode: Mode = "split"
    rounding: Literal["balanced", "row", "nearest", "keep"] | None = None
    batch: int = 1
    heads: int = 1
    head_dim: int = 16
    dtype: str = "float32"

    def __str__(self) -> str:
        return self.name

    @functools.cached_property
    def mask(self) -> ct.Mask:
        return self.build_mask(self.grid)

    @functools.cached_property
    def plan(self) -> ct.TilePlan:
        return ct.plan_tiles(
            self.mask, self.block_q, self.block_kv, self.mode, rounding=self.rounding
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.grid.num_tokens, self.heads, self.head_dim

    def arrays(self, seed: int = 0) -> tuple[Any, Any, Any]:
        """Query, key and value as numpy arrays of normal numbers in the case's dtype."""
        generator = np.random.default_rng(seed)
        query, key, value = (
            generator.standard_normal(self.shape, np.float32).astype(jnp.dtype(self.dtype))
            for _ in range(3)
        )
        return query, key, value


# 70 tokens, which no block size below divides but 5, 7, 10 and 14.
SMALL = ct.TokenGrid(5, 2, 7)
TEXT_LAST = ct.TokenGrid(5, 2, 7, text_tokens=9)
TEXT_FIRST = ct.TokenGrid(5, 2, 7, text_tokens=9, text_first=True)


def spatial(width: int | None = 9, **options: Any) -> MaskBuilder:
    return functools.partial(ct.spatial_mask, width=width, **options)


def temporal(width: int | None = 9, **options: Any) -> MaskBuilder:
    return functools.partial(ct.temporal_mask, width=width, **options)


def upstream(**options: Any) -> MaskBuilder:
    return functools.partial(ct.svg_mask, **options)


_SIZES = [
    KernelCase("ragged", SMALL, spatial(), 16, 24),
    KernelCase("ragged-q-alone", SMALL, spatial(), 16, 10),
    KernelCase("ragged-kv-alone", SMALL, spatial(), 14, 16),
    KernelCase("blocks-divide", SMALL, spatial(), 14, 10),
    KernelCase("one-frame", ct.TokenGrid(1, 5, 7), spatial(4, sink_frames=0)),
    KernelCase("one-frame-temporal", ct.TokenGrid(1, 5, 7), temporal(4, sink_frames=0)),
    KernelCase("one-token", ct.TokenGrid(1, 1, 1), spatial(0), 4, 4),
    KernelCase("one-token-in-one-sized-tiles", ct.TokenGrid(1, 1, 1), spatial(0), 1, 1),
    KernelCase("one-token-a-frame", ct.TokenGrid(37, 1, 1), spatial(3), 8, 8),
    KernelCase("one-token-a-frame-temporal", ct.TokenGrid(37, 1, 1), temporal(3), 8, 8),
    KernelCase("one-sized-tiles", ct.TokenGrid(3, 2, 2), spatial(2), 1, 1),
    KernelCase("one-query-a-tile", SMALL, spatial(), 1, 16),
    KernelCase("one-key-a-tile", SMALL, spatial(), 16, 1),
    KernelCase("blocks-beyond-the-sequence", SMALL, spatial(), 128, 256),
    KernelCase("a-single-tile-that-fits", SMALL, spatial(), 70, 70),
    KernelCase("rows-of-a-single-tile", SMALL, spatial(0, sink_frames=0), 10, 10),
    KernelCase("rows-of-a-single-tile-ragged", SMALL, spatial(0, sink_frames=0), 16, 16),
]
_WIDTHS = [
    KernelCase("width-0", SMALL, spatial(0, sink_frames=0), 8, 4),
    KernelCase("width-0-and-sink", SMALL, spatial(0), 8, 4),
    KernelCase("width-0-temporal", SMALL, temporal(0), 8, 4),
    KernelCase("width-N", SMALL, spatial(70)),
    KernelCase("width-N-less-1", SMALL, spatial(69, sink_frames=0)),
    KernelCase("width-N-less-2", SMALL, spatial(68, sink_frames=0)),
    KernelCase("density-1", SMALL, spatial(None, density=1.0)),
    KernelCase("density-1-temporal", SMALL, temporal(None, density=1.0)),
    KernelCase("dense-mask", SMALL, ct.dense_mask),
]
_TEMPORAL = [
    KernelCase("temporal-no-sink", SMALL, temporal(4, sink_frames=0)),
    KernelCase("temporal-sink-1", SMALL, temporal(4, sink_frames=1)),
    KernelCase("temporal-sink-2", SMALL, temporal(4, sink_frames=2), 16, 24),
    KernelCase("temporal-sink-all", SMALL, temporal(4, sink_frames=5)),
]
_TEXT = [
    KernelCase("text-last", TEXT_LAST, spatial()),
    KernelCase("text-first", TEXT_FIRST, spatial()),
    KernelCase("text-last-temporal", TEXT_LAST, temporal(), 16, 24),
    KernelCase("text-first-temporal", TEXT_FIRST, temporal(), 24, 16),
    KernelCase("text-aligned", TEXT_FIRST, temporal(), mode="aligned"),
]
_UPSTREAM = [
    KernelCase("wan-temporal", SMALL, upstream(pattern="temporal", width=9)),
    KernelCase(
        "hunyuan-padded-text",
        TEXT_LAST,
        upstream(pattern="spatial", width=9, model="hunyuan", prompt_length=4),
    ),
    KernelCase(
        "hunyuan-padded-text-temporal",
        TEXT_LAST,
        upstream(pattern="temporal", width=9, model="hunyuan", prompt_length=4),
        24,
        8,
    ),
    KernelCase(
        "hunyuan-padded-text-naive",
        TEXT_LAST,
        upstream(pattern="spatial", width=9, model="hunyuan", prompt_length=0),
        mode="naive",
    ),
    KernelCase(
        "cogvideox", TEXT_FIRST, upstream(pattern="spatial", width=9, model="cogvideox", sink=True)
    ),
    KernelCase(
        "cogvideox-temporal", TEXT_FIRST, upstream(pattern="temporal", width=9, model="cogvideox")
    ),
]
_MODES = [
    KernelCase("mode-dense", SMALL, spatial(), mode="dense"),
    KernelCase("mode-dense-temporal", SMALL, temporal(), 16, 24, mode="dense"),
    KernelCase("mode-naive", SMALL, spatial(), mode="naive"),
    KernelCase("mode-naive-temporal", SMALL, temporal(), 16, 24, mode="naive"),
    KernelCase("aligned-balanced", SMALL, spatial(), mode="aligned", rounding="balanced"),
    KernelCase("aligned-row", SMALL, spatial(), mode="aligned", rounding="row"),
    KernelCase("aligned-nearest", SMALL, temporal(), mode="aligned", rounding="nearest"),
    KernelCase("aligned-keep", SMALL, temporal(), 16, 24, mode="aligned", rounding="keep"),
    KernelCase("aligned-no-tail", SMALL, temporal(), 14, 10, mode="aligned"),
]
_HEADS = [
    KernelCase("head-dim-1", SMALL, spatial(), head_dim=1),
    KernelCase("head-dim-8", SMALL, spatial(), head_dim=8),
    KernelCase("head-dim-64", SMALL, temporal(), head_dim=64),
    KernelCase("head-dim-80", SMALL, spatial(), head_dim=80),
    KernelCase("head-dim-128", SMALL, temporal(), head_dim=128),
    KernelCase("batch-2", SMALL, spatial(), batch=2),
    KernelCase("batch-2-heads-3", SMALL, temporal(), 16, 24, batch=2, heads=3),
]
_HALVES = [
    replace(case, name=f"{case.name}-{suffix}", dtype=dtype)
    for suffix, dtype in (("bf16", "bfloat16"), ("f16", "float16"))
    for case in (*_SIZES, *_TEMPORAL, *_UPSTREAM, *_MODES, *_HEADS)
    if case.name
    in {
        "ragged",
        "temporal-sink-1",
        "one-token",
        "hunyuan-padded-text",
        "mode-dense",
        "mode-naive",
        "aligned-balanced",
        "head-dim-80",
        "head-dim-128",
        "batch-2-heads-3",
    }
]

CASES: tuple[KernelCase, ...] = (
    *_SIZES,
    *_WIDTHS,
    *_TEMPORAL,
    *_TEXT,
    *_UPSTREAM,
    *_MODES,
    *_HEADS,
    *_HALVES,
)

_MEDIUM: tuple[tuple[Mode, Callable[..., ct.Mask], str], ...] = (
    ("split", ct.spatial_mask, "float32"),
    ("split", ct.temporal_mask, "bfloat16"),
    ("naive", ct.temporal_mask, "float32"),
    ("aligned", ct.temporal_mask, "float32"),
    ("aligned", ct.spatial_mask, "bfloat16"),
)
MEDIUM_CASES: tuple[KernelCase, ...] = tuple(
    KernelCase(
        f"medium-{mode}-{dtype}",
        ct.TokenGrid(9, 10, 17),
        functools.partial(build, density=0.35, multiple=16),
        192,
        128,
        mode,
        heads=2,
        head_dim=64,
        dtype=dtype,
    )
    for mode, build, dtype in _MEDIUM
)
"""Large enough for many tiles in a row of tiles; errors are checked on sampled rows."""

HUGE_CASES: tuple[KernelCase, ...] = tuple(
    KernelCase(
        f"{name}-{pattern}-{mode}",
        grid,
        functools.partial(build, density=0.35),
        block_q,
        block_kv,
        mode,
        head_dim=128,
        dtype="bfloat16",
    )
    for name, grid, block_q, block_kv in (
        ("wan-480p", ct.TokenGrid(21, 30, 52), 1024, 512),
        ("wan-720p", ct.TokenGrid(21, 45, 80), 3328, 1536),
        ("wan-1080p", ct.TokenGrid(21, 67, 120), 2048, 1024),
        ("wan-1440p", ct.TokenGrid(21, 90, 160), 3328, 1536),
    )
    for pattern, build in (("spatial", ct.spatial_mask), ("temporal", ct.temporal_mask))
    for mode in MODES
)
"""Shapes of real models, for benchmarks; the tests only plan them."""


def find(name: str) -> KernelCase:
    """The case of that name."""
    return next(case for case in (*CASES, *MEDIUM_CASES, *HUGE_CASES) if case.name == name)
