"""Timing one transformer block of Wan, dense and sparse; attention's share of its time.

Measured, at each resolution and with few heads: the block with dense and with sparse attention,
and the block with an attention that merely adds query, key and value up. The difference is what
attention takes. Measured in the same rounds: the block at the model's full width with that
stand-in, on a short stretch of tokens. The block at full width and length is estimated from
these (`full_width_block`): attention's time grows with heads, all the rest with its operations.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from cinetile import _checks
from cinetile.grid import TokenGrid, require_grid
from cinetile.kernels.base import AttentionRequest
from cinetile.kernels.registry import select_implementation
from cinetile.lab.bench.machine import Machine, describe_machine
from cinetile.lab.bench.timing import Progress, Timing, no_progress, time_interleaved
from cinetile.lab.compare.shapes import MODELS, BlockShape
from cinetile.lab.compare.stand_in import add_up
from cinetile.lab.compare.whole_run import PUBLISHED_STEPS, sparse_call_share
from cinetile.lab.ratios import Stated, share, speedup, speedup_without
from cinetile.layer.plans import visited_share
from cinetile.layer.sparse_attention import SparseAttention
from cinetile.models.rotary import rotary_tables
from cinetile.models.wan.attention import DenseAttention
from cinetile.models.wan.transformer_config import WanTransformerConfig
from cinetile.models.wan.transformer_layers import Block
from cinetile.policy import SparsityPolicy

DENSE, SPARSE, WITHOUT = "dense", "sparse", "without attention"
FULL_WIDTH = "full width, without attention"
_DTYPE = "bfloat16"
# Up to so many tokens a block takes seconds, above it minutes.
_LONG = 100_000
_REPEATS, _LONG_REPEATS = 5, 3
# Long enough that widening the weights is a small part of the time.
_SAMPLE_TOKENS = 2048

_Attend = Callable[[Array, Array, Array], Array]


@dataclass(frozen=True)
class BlockConfig:
    """What is timed; checked when it is built, before anything is computed.

    Attributes:
        policy: the sparse side; of its densities, the one that most calls of the run have.
        grids: token grids by name, none with text tokens of its own.
        heads: heads of the blocks that run at these lengths.
        model: the model whose block it is; few heads keep its ratio of widths.
        repeats: rounds that count; by default 3, and 1 above 100,000 tokens.
        implementation: name of the attention kernel; None for the best that can run here.
        num_steps: denoising steps of the run that the policy is for.
        sample_tokens: tokens on which the block at full width is timed, without attention.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or the policy is dense throughout.
        NotImplementedError: the implementation cannot run on this machine.
    """

    policy: SparsityPolicy
    grids: Mapping[str, TokenGrid]
    heads: int = 1
    model: BlockShape = MODELS["14B"]
    repeats: int | None = None
    implementation: str | None = None
    num_steps: int = PUBLISHED_STEPS
    sample_tokens: int = _SAMPLE_TOKENS

    def __post_init__(self) -> None:
        if not isinstance(self.policy, SparsityPolicy):
            raise TypeError(f"policy must be a SparsityPolicy, got {type(self.policy).__name__}")
        if not self.grids:
            raise ValueError("grids must hold at least one token grid, got none")
        for name, grid in self.grids.items():
            require_grid(grid)
            if grid.text_tokens:
                raise ValueError(f"grids[{name!r}] must have no text tokens, got {grid}")
        for name in ("num_steps", "sample_tokens"):
            object.__setattr__(self, name, _checks.integer(name, getattr(self, name), minimum=1))
        if self.repeats is not None:
            object.__setattr__(self, "repeats", _checks.integer("repeats", self.repeats, minimum=1))
        self.model.with_heads(self.heads)
        if not sparse_call_share(self.policy, self.num_steps, self.model.num_layers):
            raise ValueError("policy must be sparse in some step and layer, it is dense throughout")
        select_implementation(self.implementation, None)

    def repeats_at(self, grid: TokenGrid) -> int:
        """Rounds that count on a grid."""
        if self.repeats is not None:
            return self.repeats
        return _REPEATS if grid.num_tokens <= _LONG else _LONG_REPEATS


@dataclass(frozen=True)
class BlockTimes:
    """Measured times of one block with few heads.

    Attributes:
        name: of the resolution.
        grid: the tokens.
        repeats: rounds that counted.
        dense: the block with dense attention.
        sparse: the block with sparse attention, routing included.
        without: the block with an attention that adds query, key and value up.
        full_width: the same for the block at the model's full width, on few tokens.
        visited: share of all pairs that the sparse attention visits, on average of the
            patterns that heads can be routed to.
    """

    name: str
    grid: TokenGrid
    repeats: int
    dense: Timing
    sparse: Timing
    without: Timing
    full_width: Timing
    visited: float

    @property
    def dense_attention_ms(self) -> float:
        """Dense attention time in ms: block time minus block time without attention, by round."""
        return self._attention_ms(self.dense)

    @property
    def sparse_attention_ms(self) -> float:
        """Sparse attention time in ms, routing included; as `dense_attention_ms`."""
        return self._attention_ms(self.sparse)

    @property
    def attention_share(self) -> Stated:
        """Dense attention's share of the block's time."""
        return share(self.dense.milliseconds, self.without.milliseconds)

    @property
    def attention_speedup(self) -> Stated:
        """Dense over sparse attention time, routing included."""
        return speedup_without(
            self.dense.milliseconds, self.sparse.milliseconds, self.without.milliseconds
        )

    @property
    def block_speedup(self) -> Stated:
        """Time of the dense block over that of the sparse block."""
        return speedup(self.dense.milliseconds, self.sparse.milliseconds)

    def _attention_ms(self, block: Timing) -> float:
        rounds = zip(block.milliseconds, self.without.milliseconds, strict=True)
        return statistics.median(time - rest for time, rest in rounds)

    @property
    def spread(self) -> float:
        """Longest over shortest time of the same thing, where they differ most."""
        timings = (self.dense, self.sparse, self.without, self.full_width)
        return max(timing.maximum / timing.minimum for timing in timings)


@dataclass(frozen=True)
class FullWidthBlock:
    """Estimated times of a block with all heads of the model.

    Attributes:
        dense_attention_ms: measured on few heads and multiplied.
        sparse_attention_ms: the same for sparse attention.
        rest_ms: operations over the rate that was measured on a short stretch of tokens.
    """

    dense_attention_ms: float
    sparse_attention_ms: float
    rest_ms: float

    @property
    def attention_share(self) -> float:
        """Dense attention's share of the block's time."""
        return self.dense_attention_ms / (self.dense_attention_ms + self.rest_ms)

    @property
    def block_speedup(self) -> float:
        dense = self.dense_attention_ms + self.rest_ms
        return dense / (self.sparse_attention_ms + self.rest_ms)


def full_width_block(times: BlockTimes, config: BlockConfig) -> FullWidthBlock:
    """Estimates the block with all of the model's heads from what was measured.

    Args:
        times: of a block with few heads.
        config: what was measured.
    """
    ratio = config.model.heads / config.heads
    return FullWidthBlock(
        dense_attention_ms=times.dense_attention_ms * ratio,
        sparse_attention_ms=times.sparse_attention_ms * ratio,
        rest_ms=config.model.flops_without_attention(times.grid.num_tokens)
        / full_width_rate(times, config),
    )


def full_width_rate(times: BlockTimes, config: BlockConfig) -> float:
    """Measured operations of matrix products a millisecond, all else of the block included."""
    return config.model.flops_without_attention(config.sample_tokens) / times.full_width.median


@dataclass(frozen=True)
class BlockResult:
    """A finished measurement.

    Attributes:
        config: what was timed.
        machine: where it ran.
        implementation: name of the attention kernel that ran.
        path: its code path; the name again if it has only one.
        rows: one for each grid.
    """

    config: BlockConfig
    machine: Machine
    implementation: str
    path: str
    rows: tuple[BlockTimes, ...]


def measure_blocks(config: BlockConfig, progress: Progress = no_progress) -> BlockResult:
    """Times the blocks of all grids; dense, sparse and the rest in turn, round after round.

    Weights and inputs are random. One grid after the other is held in memory, some ten arrays of
    `[tokens, width]` of the block with few heads, and beside it the weights of one block at full
    width (0.7 GB for the 14B model, thrice that while it runs on CPUs).

    Args:
        config: what to time.
        progress: told what is going on.

    Raises:
        NotImplementedError: the named implementation cannot run these blocks.
        RuntimeError: an output is not finite.
    """
    attentions = {
        name: (
            DenseAttention.on(grid, _DTYPE, config.implementation),
            SparseAttention(
                grid,
                config.policy,
                implementation=config.implementation,
                num_steps=config.num_steps,
                num_layers=config.model.num_layers,
                dtype=_DTYPE,
            ),
        )
        for name, grid in config.grids.items()
    }
    shape = config.model.with_heads(config.heads)
    chosen, *_ = [
        select_implementation(
            config.implementation,
            AttentionRequest(
                1, shape.heads, shape.head_dim, _DTYPE, (dense.plan, *sparse.planned.plans)
            ),
        )
        for dense, sparse in attentions.values()
    ]
    full_width = _call(*_random_block(config.model, TokenGrid(1, 1, config.sample_tokens)), add_up)
    rows = tuple(
        _measure_grid(config, name, full_width, *attentions[name], progress)
        for name in config.grids
    )
    return BlockResult(
        config=config,
        machine=describe_machine(),
        implementation=chosen.name,
        path=chosen.path,
        rows=rows,
    )


def _measure_grid(
    config: BlockConfig,
    name: str,
    full_width: Callable[[], Array],
    dense: DenseAttention,
    sparse: SparseAttention,
    progress: Progress,
) -> BlockTimes:
    grid = config.grids[name]
    block, inputs = _random_block(config.model.with_heads(config.heads), grid)
    step, layer, level = _usual_call(sparse)
    rng = jax.random.key(0)
    nowhere = jnp.asarray(0, jnp.int32)
    attentions: dict[str, _Attend] = {
        DENSE: lambda q, k, v: dense(q, k, v, step=nowhere, layer=nowhere, rng=rng),
        SPARSE: lambda q, k, v: sparse(q, k, v, step=step, layer=layer, rng=rng),
        WITHOUT: add_up,
    }
    calls = {label: _call(block, inputs, attend) for label, attend in attentions.items()}
    timings = time_interleaved(
        calls | {FULL_WIDTH: full_width},
        config.repeats_at(grid),
        examine=_require_finite,
        progress=_within(name, progress),
    )
    plans = [sparse.planned.plans[plan] for plan in sparse.planned.levels[level]]
    return BlockTimes(
        name=name,
        grid=grid,
        repeats=config.repeats_at(grid),
        dense=timings[DENSE],
        sparse=timings[SPARSE],
        without=timings[WITHOUT],
        full_width=timings[FULL_WIDTH],
        visited=math.fsum(visited_share(plan) for plan in plans) / len(plans),
    )


def _random_block(shape: BlockShape, grid: TokenGrid) -> tuple[Block, tuple[Any, ...]]:
    """A block, and what it is called with but for the attention."""
    config = WanTransformerConfig(
        num_attention_heads=shape.heads,
        attention_head_dim=shape.head_dim,
        ffn_dim=shape.ffn_dim,
        num_layers=1,
    )
    weights, *keys = jax.random.split(jax.random.key(0), 4)
    block = Block(config, key=weights, dtype=jnp.dtype(_DTYPE))
    sizes = (grid.num_tokens, shape.text_tokens, 6)
    arrays = (
        jax.random.normal(key, (1, size, shape.dim), _DTYPE)
        for key, size in zip(keys, sizes, strict=True)
    )
    tables = rotary_tables(grid.frames, grid.height, grid.width, shape.head_dim)
    return block, (*arrays, tuple(jnp.asarray(table) for table in tables))


def _call(block: Block, inputs: tuple[Any, ...], attend: _Attend) -> Callable[[], Array]:
    """Runs the block with an attention, compiled."""

    @jax.jit
    def run(block: Block, inputs: tuple[Any, ...]) -> Array:
        x, text, modulation, rotary = inputs
        return block(x, text, modulation, rotary, lambda *arrays: (attend(*arrays), None))[0]

    return lambda: run(block, inputs).block_until_ready()


def _usual_call(sparse: SparseAttention) -> tuple[int, int, int]:
    """Step, layer and level of a sparse call as most of them are."""
    level_of = sparse.planned.level_of
    levels, counts = np.unique(level_of[level_of > 0], return_counts=True)
    level = int(levels[counts.argmax()])
    step, layer = np.argwhere(level_of == level)[0].tolist()
    return step, layer, level


def _require_finite(name: str, output: Array) -> None:
    if not bool(jnp.isfinite(output).all()):
        raise RuntimeError(f"the block ({name}) gave values that are not finite")


def _within(name: str, progress: Progress) -> Progress:
    """Puts a name in front of every stage."""

    def show(stage: str, current: str, done: int, total: int) -> Any:
        return progress(f"{name}, {stage}", current, done, total)

    return show
