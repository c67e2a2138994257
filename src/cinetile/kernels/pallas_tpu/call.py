"""Runs of the kernel: blocks, scalar memory, and the outputs that several runs share."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from cinetile.kernels.pallas_tpu.config import (
    SUBLANES,
    VMEM_LIMIT_BYTES,
    KernelConfig,
)
from cinetile.kernels.pallas_tpu.kernel import StepRefs, column_of, kernel, row_of
from cinetile.kernels.pallas_tpu.routing import HeadOrder, step_table
from cinetile.kernels.pallas_tpu.tables import EDGES, StepTables

KERNEL_NAME = "cinetile_attention"


class KernelInputs(NamedTuple):
    """Arrays that all runs read; tokens in the orders of the heads' plans.

    Attributes:
        query: scaled by a power of two; see `run`.
        key: as given.
        value_t: transposed, rows of ones below, zeros past the last key; see `transpose_value`.
    """

    query: Float[Array, "heads tokens head_dim"]
    key: Float[Array, "heads tokens head_dim"]
    value_t: Float[Array, "heads head_dim_plus_8 padded_tokens"]


class Outputs(NamedTuple):
    """Buffers that runs write one after the other, each its own heads and query tiles."""

    output: Float[Array, "heads padded_tokens head_dim"]
    lse: Float[Array, "heads 1 padded_tokens"]


def empty_outputs(query: Float[Array, "heads tokens head_dim"], tokens: int) -> Outputs:
    """Outputs that no run has written yet, of as many tokens as whole query tiles have."""
    heads, _, head_dim = query.shape
    return Outputs(
        jnp.zeros((heads, tokens, head_dim), query.dtype),
        jnp.zeros((heads, 1, tokens), jnp.float32),
    )


def transpose_value(
    value: Float[Array, "heads tokens head_dim"], block_kv: int
) -> Float[Array, "heads head_dim_plus_8 padded_tokens"]:
    """Values with keys along lanes, and rows of ones by which the matrix unit sums weights."""
    heads, tokens, _ = value.shape
    ones = jnp.ones((heads, SUBLANES, tokens), value.dtype)
    value_t = jnp.concatenate([value.swapaxes(1, 2), ones], axis=1)
    return jnp.pad(value_t, ((0, 0), (0, 0), (0, -tokens % block_kv)))


def run(
    inputs: KernelInputs,
    order: HeadOrder,
    tables: StepTables,
    config: KernelConfig,
    outputs: Outputs,
    *,
    factor: float,
    interpret: Any = False,
) -> Outputs:
    """Attention of the ordered heads; what other heads have in `outputs` stays.

    Args:
        inputs: the arrays.
        order: the heads to run.
        tables: words of their plans.
        config: how tiles are cut.
        outputs: where to write; given up to the result.
        factor: multiplies products of queries and keys to base-2 scores.
        interpret: pallas' own argument; for tests.
    """

    def one_range(index: Any, outputs: Outputs) -> Outputs:
        return run_range(
            inputs, order, tables, config, outputs, index, factor=factor, interpret=interpret
        )

    def all_ranges(outputs: Outputs) -> Outputs:
        ranges = tables.words.shape[0]
        if ranges == 1:
            return one_range(0, outputs)
        return jax.lax.fori_loop(0, ranges, one_range, outputs)

    return jax.lax.cond(order.num_active > 0, all_ranges, lambda outputs: outputs, outputs)


def run_range(
    inputs: KernelInputs,
    order: HeadOrder,
    tables: StepTables,
    config: KernelConfig,
    outputs: Outputs,
    index: Any = 0,
    *,
    factor: float,
    interpret: Any = False,
) -> Outputs:
    """One run of the kernel, over one range of query tiles."""
    head_dim = inputs.query.shape[-1]
    table = step_table(order, tables, index)
    prefetched = (
        *table,
        jnp.asarray(tables.words)[index],
        jnp.asarray(tables.extremes)[index],
        jnp.asarray(tables.first_row)[index].reshape(1),
    )
    arrays = (*inputs, jnp.asarray(tables.edges), *outputs)
    edges_at, specs = len(prefetched) + len(inputs), _block_specs(config, tables, head_dim)
    result = pl.pallas_call(
        functools.partial(
            kernel,
            config=config,
            granule_bits=tables.granule_bits(),
            head_dim=head_dim,
            factor=factor,
        ),
        name=KERNEL_NAME,
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(table.num_steps,),
            in_specs=[*specs[:-2], *[pl.BlockSpec(memory_space=pl.ANY)] * 2],
            out_specs=specs[-2:],
            scratch_shapes=[
                pltpu.VMEM((config.accumulator_rows, config.block_q), jnp.float32),
                pltpu.VMEM((config.accumulator_rows, config.block_q), jnp.float32),
                pltpu.VMEM((head_dim + SUBLANES, config.block_q), jnp.float32),
            ],
        ),
        # Runs write disjoint blocks of the same buffers.
        input_output_aliases={edges_at + 1: 0, edges_at + 2: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=VMEM_LIMIT_BYTES,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
    )(*prefetched, *arrays)
    return Outputs(*result)


class _Place(NamedTuple):
    """Where a grid step works; traced scalars."""

    head: Any
    row: Any
    column: Any
    plan: Any


def _block_specs(config: KernelConfig, tables: StepTables, head_dim: int) -> list[pl.BlockSpec]:
    """Blocks of query, key, value_t, edges, output and lse."""
    bits = tables.granule_bits()
    block_q, block_kv = config.block_q, config.block_kv

    def spec(shape: tuple[int, int], index: Callable[[_Place], tuple[Any, ...]]) -> pl.BlockSpec:
        def index_map(step: Any, *tables: Any) -> tuple[Any, ...]:
            refs = StepRefs(*tables)
            position = refs.position(step, bits)
            word = refs.word(step, position)
            row = row_of(word) + refs.first_row[0]
            return index(_Place(refs.head[position], row, column_of(word), refs.plan[position]))

        return pl.BlockSpec((None, *shape), index_map)

    by_row = spec((block_q, head_dim), lambda at: (at.head, at.row, 0))
    by_row_on_lanes = spec((1, block_q), lambda at: (at.head, 0, at.row))
    return [
        by_row,
        spec((block_kv, head_dim), lambda at: (at.head, at.column, 0)),
        spec((head_dim + SUBLANES, block_kv), lambda at: (at.head, 0, at.column)),
        spec((EDGES, block_q), lambda at: (at.plan, 0, at.row)),
        by_row,
        by_row_on_lanes,
    ]
