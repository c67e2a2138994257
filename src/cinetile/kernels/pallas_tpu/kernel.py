"""The kernel body: one live tile a grid step, scores transposed, softmax in base 2.

Orientation. `scores[kv, q] = key @ query.T`, so that the query chunk is stationary in the first
product and the weights are in the second, `value_t[d, kv] @ weights[kv, q]`: both fill the matrix
unit as far as the head's size lets them, and all statistics of a query lie along lanes.

Schedule. A unit is `group` queries times `kv_span` keys. Its work is a list of chunk pairs, query
chunk outermost; the first product of a pair that lies ahead is issued before the softmax of the
current one. The compiler overlaps matrix and vector units only as far as the program order lets it.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from cinetile.kernels.pallas_tpu.config import SUBLANES, KernelConfig, Kind
from cinetile.kernels.pallas_tpu.tables import (
    EXTREMES,
    FLAG_BITS,
    FULL,
    INDEX_BITS,
    MASKED,
    MAX_TILES,
    NAIVE,
    ROW_END,
    ROW_START,
)

Scalar = Any  # a traced int32 or bool in scalar memory, or a Python one
Ref = Any  # pallas gives references no public type

# Finite, so that no row computes inf - inf; weights of masked pairs are exactly 0.
MASKED_SCORE = -0.7 * float(np.finfo(np.float32).max)
# Half of it, since scores are multiplied by a factor of at least a half.
_NO_SCORE_YET = 0.25 * MASKED_SCORE
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class StepRefs:
    """Prefetched tables of a range of query tiles; see `routing.StepTable`."""

    lookup: Ref
    first_step: Ref
    shift: Ref
    head: Ref
    plan: Ref
    padding_start: Ref
    padding_stop: Ref
    words: Ref
    extremes: Ref
    first_row: Ref

    def position(self, step: Scalar, granule_bits: int) -> Scalar:
        """Which of the routed heads a grid step belongs to."""
        position = self.lookup[step >> granule_bits]
        return position + (step >= self.first_step[position + 1]).astype(jnp.int32)

    def padding(self, position: Scalar) -> tuple[Scalar, Scalar]:
        """First padding key of a routed head, and the first key after its padding."""
        return self.padding_start[position], self.padding_stop[position]

    def word(self, step: Scalar, position: Scalar) -> Scalar:
        """The tile word of a grid step."""
        return self.words[step + self.shift[position]]


NUM_TABLES = len(dataclasses.fields(StepRefs))


def row_of(word: Scalar) -> Scalar:
    """Query tile of a word, counted from the start of its range."""
    return word >> (FLAG_BITS + INDEX_BITS)


def column_of(word: Scalar) -> Scalar:
    """Key tile of a word."""
    return (word >> FLAG_BITS) & (MAX_TILES - 1)


@dataclass(frozen=True)
class _Arrays:
    query: Ref  # [block_q, head_dim]
    key: Ref  # [block_kv, head_dim]
    value_t: Ref  # [head_dim + 8, block_kv], rows of ones below the values
    edges: Ref  # [3, block_q]
    maximum: Ref  # [rows, block_q], running maximum (online softmax)
    total: Ref  # [rows, block_q], partial sums of the weights (fixed bound)
    accumulator: Ref  # [head_dim + 8, block_q]
    factor: float  # from products of queries and keys to base-2 scores


def kernel(
    *refs: Ref, config: KernelConfig, granule_bits: int, head_dim: int, factor: float
) -> None:
    """One grid step; the order of `refs` is that of `call.run_range`."""
    tables = StepRefs(*refs[:NUM_TABLES])
    query, key, value_t, edges, _, _, output, lse, maximum, total, accumulator = refs[NUM_TABLES:]
    arrays = _Arrays(query, key, value_t, edges, maximum, total, accumulator, factor)
    step = pl.program_id(0)
    position = tables.position(step, granule_bits)
    word = tables.word(step, position)

    @pl.when((word & ROW_START) != 0)
    def _() -> None:
        accumulator[...] = jnp.zeros_like(accumulator)
        total[...] = jnp.zeros_like(total)
        maximum[...] = jnp.full_like(maximum, MASKED_SCORE)

    if config.part != "masked":

        @pl.when((word & FULL) != 0)
        def _() -> None:
            _full_tile(arrays, config, head_dim)

    if config.part != "full":

        @pl.when((word & MASKED) != 0)
        def _() -> None:
            _masked_tile(arrays, config, head_dim, tables, position, word)

    @pl.when((word & ROW_END) != 0)
    def _() -> None:
        _finish(arrays, config, head_dim, output, lse)


def _full_tile(arrays: _Arrays, config: KernelConfig, head_dim: int) -> None:
    def unit(column: Scalar, chunks: int, group: Scalar, key0: Scalar) -> None:
        del group
        _unit(arrays, config, "full", column, chunks, key0, 0, head_dim)

    _each_unit(config, config.full_group, unit)


def _masked_tile(
    arrays: _Arrays,
    config: KernelConfig,
    head_dim: int,
    tables: StepRefs,
    position: Scalar,
    word: Scalar,
) -> None:
    """Each unit looks at the extremes of its rows' edges and pays for its own comparisons only."""
    tile_key0 = column_of(word) * config.block_kv
    naive = (word & NAIVE) != 0
    row, plan = row_of(word), tables.plan[position]
    padding = tables.padding(position) if config.padding else None

    def unit(column: Scalar, chunks: int, group: Scalar, key0: Scalar) -> None:
        at = (row * config.groups + group) * EXTREMES
        extremes = [tables.extremes[plan, at + n] for n in range(EXTREMES)]
        cases = unit_cases(extremes, tile_key0 + key0, config.kv_span, naive, padding)
        for kind in config.kinds:
            run = functools.partial(
                _unit,
                arrays,
                config,
                kind,
                column,
                chunks,
                key0,
                tile_key0,
                head_dim,
                cases["sink"],
                padding,
            )
            pl.when(cases[kind])(run)

    _each_unit(config, config.group, unit)


def unit_cases(
    extremes: list[Any],
    key_start: Any,
    span: int,
    naive: Any,
    padding: tuple[Any, Any] | None = None,
) -> dict[str, Bool[Any, "..."]]:
    """Which one of `KINDS` a unit is, if any; takes scalars in the kernel and arrays elsewhere.

    Args:
        extremes: prefix min, max, low min, max, high min, max over the unit's rows.
        key_start: first key of the unit.
        span: keys of the unit.
        naive: whether to evaluate the whole mask whatever the extremes say.
        padding: first padding key and the first key after the padding; None if there is none.

    Returns:
        A truth value for each of `KINDS`, at most one of which holds, and "sink": whether the
        upper edge of an "upper" unit is that of the prefix.
    """
    prefix_min, prefix_max, low_min, low_max, high_min, high_max = extremes
    key_stop = key_start + span
    sink = key_start < prefix_max
    band = (key_start < high_max) & (key_stop > low_min)
    full = (key_stop <= prefix_min) | ((low_max <= key_start) & (key_stop <= high_min))
    lower, upper = low_max > key_start, high_min < key_stop
    some_edge = ~(full | naive)
    one_band = some_edge & band & ~sink
    sink_alone = some_edge & sink & ~band
    cases = {
        "full": full & ~naive,
        "lower": one_band & lower & ~upper,
        "upper": (one_band & upper & ~lower) | sink_alone,
        "window": one_band & lower & upper,
        "general": (some_edge & sink & band) | naive,
    }
    if padding is None:
        return cases | {"padded": naive & False, "sink": sink_alone}
    start, stop = padding
    padded = (start < stop) & (key_start < stop) & (start < key_stop)
    kept = functools.reduce(operator.or_, cases.values())
    cases = {kind: case & ~padded for kind, case in cases.items()}
    return cases | {"padded": padded & kept, "sink": sink_alone}


def _each_unit(
    config: KernelConfig, size: int, unit: Callable[[Scalar, int, Scalar, Scalar], None]
) -> None:
    """Calls `unit(first column, chunks, group, first key)` for all groups of `size` and spans."""
    whole, left = divmod(config.block_q, size)

    def span(index: Scalar) -> None:
        key0 = 0 if config.spans == 1 else pl.multiple_of(index * config.kv_span, config.kv_span)

        def group(index: Scalar) -> None:
            column = 0 if whole == 1 else pl.multiple_of(index * size, size)
            unit(column, size // config.q_chunk, index, key0)

        _repeat(whole, group)
        if left:
            unit(whole * size, left // config.q_chunk, whole, key0)

    _repeat(config.spans, span)


def _repeat(count: int, body: Callable[[Scalar], None]) -> None:
    """A rolled loop, or only the body if it runs once."""
    if count == 1:
        body(0)
    else:
        pl.loop(0, count)(body)


def _unit(
    arrays: _Arrays,
    config: KernelConfig,
    kind: Kind,
    column: Scalar,
    chunks: int,
    key0: Scalar,
    tile_key0: Scalar,
    head_dim: int,
    sink_alone: Scalar = None,
    padding: tuple[Scalar, Scalar] | None = None,
) -> None:
    """`chunks` query chunks from `column` on against `kv_span` keys from `key0` of the tile on."""
    q_chunk, kv_chunk = config.q_chunk, config.kv_chunk
    steps = config.kv_span // kv_chunk
    pairs = [(chunk, step) for chunk in range(chunks) for step in range(steps)]
    online = config.softmax == "online"
    # The online softmax waits for its maximum, so its scores must be further ahead.
    lookahead = min(len(pairs), (2 if online else 1) * steps)
    value_rows = slice(0, head_dim + SUBLANES if online else head_dim)

    def queries(chunk: int) -> Any:
        return _aligned_slice(column, chunk * q_chunk, q_chunk)

    def keys(step: int) -> Any:
        return _aligned_slice(key0, step * kv_chunk, kv_chunk)

    def scores(chunk: int, step: int) -> Float[Array, "kv_chunk q_chunk"]:
        return _dot(arrays.key[keys(step), :], arrays.query[queries(chunk), :], transpose=True)

    pending = [scores(*pair) for pair in pairs[:lookahead]]
    for index, (chunk, step) in enumerate(pairs):
        if index + lookahead < len(pairs):
            pending.append(scores(*pairs[index + lookahead]))
        at = queries(chunk)
        edges = [arrays.edges[n : n + 1, at] for n in range(3)] if kind != "full" else []
        first_key = tile_key0 + key0 + step * kv_chunk
        score = _masked(pending.pop(0), kind, edges, first_key, sink_alone, padding)
        score = score.reshape(-1, config.accumulator_rows, q_chunk) * arrays.factor
        if online:
            before = arrays.maximum[:, at]
            largest = jnp.maximum(before, score.max(0)).max(0, keepdims=True)
            largest = jnp.broadcast_to(largest, before.shape)
            _rescale(arrays.accumulator, at, jnp.exp2(before - largest))
            arrays.maximum[:, at] = largest
            weights = jnp.exp2(score - largest[None])
        else:
            weights = jnp.exp2(score)
            arrays.total[:, at] += weights.sum(0)
        weights = weights.reshape(kv_chunk, q_chunk).astype(arrays.value_t.dtype)
        arrays.accumulator[value_rows, at] += _dot(arrays.value_t[value_rows, keys(step)], weights)


def _aligned_slice(start: Scalar, offset: int, size: int) -> Any:
    start = start + offset
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, size), size)


def _dot(left: Array, right: Array, *, transpose: bool = False) -> Float[Array, "rows columns"]:
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    contracted = ((1,), (1 if transpose else 0,))
    return jax.lax.dot_general(
        left, right, (contracted, ((), ())), precision, preferred_element_type=jnp.float32
    )


def _masked(
    scores: Float[Array, "kv_chunk q_chunk"],
    kind: Kind,
    edges: list[Int[Array, "1 q_chunk"]],
    first_key: Scalar,
    sink_alone: Scalar,
    padding: tuple[Scalar, Scalar] | None,
) -> Float[Array, "kv_chunk q_chunk"]:
    """Compares a loop-invariant row index with the edges moved to the chunk's first key."""
    if kind == "full":
        return scores
    prefix, low, high = (edge - first_key for edge in edges)
    key = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    if kind == "lower":
        keep = key >= low
    elif kind == "upper":
        keep = key < jnp.where(sink_alone, prefix, high)
    else:
        keep = (key >= low) & (key < high)
        if kind != "window":
            keep |= key < prefix
        if kind == "padded" and padding is not None:
            start, stop = (edge - first_key for edge in padding)
            keep &= (key < start) | (key >= stop)
    return jnp.where(keep, scores, MASKED_SCORE)


def _rescale(accumulator: Ref, at: Any, factor: Float[Array, "rows q_chunk"]) -> None:
    rows, q_chunk = factor.shape
    scaled = accumulator[:, at].reshape(-1, rows, q_chunk) * factor[None]
    accumulator[:, at] = scaled.reshape(-1, q_chunk)


def _finish(arrays: _Arrays, config: KernelConfig, head_dim: int, output: Ref, lse: Ref) -> None:
    """Normalises a query tile; rows that kept nothing get 0 and minus infinity."""
    if config.softmax == "fixed":
        sums = arrays.total[...].sum(0, keepdims=True)
        maximum, alive = jnp.zeros_like(sums), sums > 0
    else:
        sums = arrays.accumulator[head_dim : head_dim + 1, :]
        maximum = arrays.maximum[0:1, :]
        alive = (sums > 0) & (maximum > _NO_SCORE_YET)
    sums = jnp.where(alive, sums, 1.0)
    scaled = arrays.accumulator[0:head_dim, :] * jnp.where(alive, 1.0 / sums, 0.0)
    output[...] = scaled.T.astype(output.dtype)
    lse[...] = jnp.where(alive, (maximum + jnp.log2(sums)) / _LOG2_E, -jnp.inf)
