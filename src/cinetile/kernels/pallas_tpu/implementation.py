"""The TPU implementation: what it needs, and how one call becomes runs of the kernel."""

import functools
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from cinetile.kernels.base import AttentionRequest, Implementation
from cinetile.kernels.padding import text_exists
from cinetile.kernels.pallas_tpu import call
from cinetile.kernels.pallas_tpu.config import LANES, VMEM_LIMIT_BYTES, KernelConfig, Part, Softmax
from cinetile.kernels.pallas_tpu.guard import is_safe, score_bounds
from cinetile.kernels.pallas_tpu.placement import move_heads
from cinetile.kernels.pallas_tpu.routing import order_heads
from cinetile.kernels.pallas_tpu.tables import MAX_TILES, StepTables, step_tables
from cinetile.kernels.portable_gradients import attend_with_portable_gradients
from cinetile.placement import place, restore
from cinetile.plans import TilePlan

HEAD_DIMS = (64, 128, 256)
SOFTMAXES: tuple[Softmax, ...] = ("fixed", "online")
_MINIMUM_JAX = (0, 10)
_DEFAULT_BLOCKS = {"bfloat16": (4608, 3072), "float32": (1024, 1024)}
_LOG2_E = math.log2(math.e)


class PallasTpuImplementation(Implementation):
    """Exact block-sparse attention by one Pallas kernel over a flat list of live tiles.

    Heads whose scores are bounded tightly enough skip the running maximum (see `guard`); the
    others run a second kernel with an online softmax. Gradients are those of the portable
    implementation.

    Args:
        interpret: runs the kernel in pallas' interpreter, on any platform and for tiles of any
            size; what `pallas_call` takes. For tests: it is very slow.
    """

    name: ClassVar[str] = "pallas_tpu"
    requirements: ClassVar[str] = "a TPU; block sizes that are multiples of 128"
    finest_blocks: ClassVar[tuple[int, int]] = (LANES, LANES)
    parts: ClassVar[tuple[Part, ...]] = ("all",)
    """The kernels that share the tiles of a plan."""

    def __init__(self, interpret: Any = False) -> None:
        self.interpret = interpret

    def unavailable(self) -> str | None:
        if jax.__version_info__ < _MINIMUM_JAX:
            needed = ".".join(map(str, _MINIMUM_JAX))
            return f"it needs jax {needed} or newer, this is {jax.__version__}"
        if not self.interpret and jax.default_backend() != "tpu":
            return f"jax runs on {jax.default_backend()} here, not on a TPU"
        return None

    def unsupported(self, request: AttentionRequest) -> str | None:
        if request.dtype not in _DEFAULT_BLOCKS:
            return f"TPUs multiply {' and '.join(_DEFAULT_BLOCKS)} arrays, not {request.dtype} ones"
        if request.head_dim > HEAD_DIMS[-1]:
            return f"heads have at most {HEAD_DIMS[-1]} features, not {request.head_dim}"
        return next(filter(None, (self._cannot_run(plan, request) for plan in request.plans)), None)

    def _cannot_run(self, plan: TilePlan, request: AttentionRequest) -> str | None:
        blocks = f"tiles of {plan.block_q} x {plan.block_kv}"
        if max(plan.geometry.num_q_tiles, plan.geometry.num_kv_tiles) > MAX_TILES:
            return f"{blocks} cut {plan.grid} into more than {MAX_TILES:,} rows or columns"
        if self.interpret:
            return None
        if plan.block_q % LANES or plan.block_kv % LANES:
            return f"{blocks} are no multiples of {LANES}"
        config = KernelConfig.for_blocks(plan.block_q, plan.block_kv)
        itemsize = jnp.dtype(request.dtype).itemsize
        needed = config.vmem_bytes(_padded_head_dim(request.head_dim), itemsize)
        if needed > VMEM_LIMIT_BYTES:
            return f"{blocks} take {needed >> 20} MiB of vector memory, over its limit"
        return None

    def default_blocks(self, num_tokens: int, dtype: str) -> tuple[int, int]:
        whole = -(-num_tokens // LANES) * LANES
        # Other dtypes are refused with a reason once a call is to run.
        block_q, block_kv = _DEFAULT_BLOCKS.get(dtype, _DEFAULT_BLOCKS["float32"])
        return min(block_q, whole), min(block_kv, whole)

    def attend(
        self,
        query: Float[Array, "batch tokens heads head_dim"],
        key: Float[Array, "batch tokens heads head_dim"],
        value: Float[Array, "batch tokens heads head_dim"],
        routes: Int[Array, "batch heads"] | None,
        *,
        plans: tuple[TilePlan, ...],
        scale: float,
        prompt_lengths: Int[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch tokens heads head_dim"], Float[Array, "batch tokens heads"]]:
        forward = functools.partial(_attend, self, plans, scale)
        return attend_with_portable_gradients(
            forward, plans, scale, query, key, value, routes, prompt_lengths
        )


class PallasTpuTwoKernels(PallasTpuImplementation):
    """The same with one body a kernel, should a chip punish two: full tiles, then masked ones.

    Every part runs on its own, and the results are merged by their log-sum-exp.
    """

    name: ClassVar[str] = "pallas_tpu_two_kernels"
    automatic: ClassVar[bool] = False
    parts: ClassVar[tuple[Part, ...]] = ("full", "masked")


def _attend(
    implementation: PallasTpuImplementation,
    plans: tuple[TilePlan, ...],
    scale: float,
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch tokens heads head_dim"],
    value: Float[Array, "batch tokens heads head_dim"],
    routes: Int[Array, "batch heads"] | None,
    prompt_lengths: Int[Array, " batch"] | None,
) -> tuple[Float[Array, "batch tokens heads head_dim"], Float[Array, "batch tokens heads"]]:
    batch, tokens, heads, head_dim = query.shape
    if routes is None:
        routes = jnp.zeros((batch, heads), jnp.int32)
    flat_routes, grid = routes.reshape(-1), plans[0].grid
    query_orders = [plan.mask.query_order for plan in plans]
    key_orders = [plan.mask.key_order for plan in plans]
    # The kernel multiplies by `factor`; the rest is a power of two, which rounds no query.
    factor, exponent = math.frexp(scale * _LOG2_E)
    scaled = (query.astype(jnp.float32) * 2.0**exponent).astype(query.dtype)
    if prompt_lengths is not None:
        # Whatever padding holds, it must not send a head to the online kernel.
        exists = text_exists(grid, prompt_lengths)[:, :, None, None]
        scaled, key = (jnp.where(exists, array, 0).astype(array.dtype) for array in (scaled, key))
    padding = _padding_of_heads(plans, routes, prompt_lengths)
    with jax.named_scope("cinetile_placement"):
        placed_query, placed_key, placed_value = (
            move_heads(place, _heads_first(array), flat_routes, orders, grid)
            for array, orders in ((scaled, query_orders), (key, key_orders), (value, key_orders))
        )
    parts = [
        _attend_part(
            placed_query,
            placed_key,
            placed_value,
            flat_routes,
            padding,
            plans,
            part,
            factor,
            implementation.interpret,
        )
        for part in implementation.parts
    ]
    outputs = parts[0] if len(parts) == 1 else _merge(*parts)
    output, lse = outputs.output[:, :tokens, :head_dim], outputs.lse[:, 0, :tokens]
    with jax.named_scope("cinetile_placement"):
        output = move_heads(restore, output, flat_routes, query_orders, grid)
        lse = move_heads(restore, lse, flat_routes, query_orders, grid)
        return (
            output.reshape(batch, heads, tokens, head_dim).swapaxes(1, 2),
            lse.reshape(batch, heads, tokens).swapaxes(1, 2),
        )


def _attend_part(
    query: Float[Array, "heads tokens head_dim"],
    key: Float[Array, "heads tokens head_dim"],
    value: Float[Array, "heads tokens head_dim"],
    routes: Int[Array, " heads"],
    padding: tuple[Int[Array, " heads"], Int[Array, " heads"]] | None,
    plans: tuple[TilePlan, ...],
    part: Part,
    factor: float,
    interpret: Any,
) -> call.Outputs:
    """Runs the tiles of one part: each tile geometry and each softmax has a kernel of its own."""
    with jax.named_scope("cinetile_guard"):
        safe = is_safe(score_bounds(query, key, factor), value)
    padded = max(plan.geometry.num_q_tiles * plan.block_q for plan in plans)
    outputs = call.empty_outputs(query, padded)
    for block_q, block_kv, chosen, local_routes in _geometries(plans, routes):
        with jax.named_scope("cinetile_transposition"):
            inputs = call.KernelInputs(query, key, call.transpose_value(value, block_kv))
        for softmax in SOFTMAXES:
            config = KernelConfig.for_blocks(
                block_q, block_kv, softmax, part, padding=padding is not None
            )
            tables = step_tables([plans[index] for index in chosen], config, routes.size)
            active = _routed_to(routes, chosen) & (safe if softmax == "fixed" else ~safe)
            order = order_heads(local_routes, active, padding)
            with jax.named_scope(_kernel_scope(config, tables)):
                outputs = call.run(
                    inputs, order, tables, config, outputs, factor=factor, interpret=interpret
                )
    return outputs


def _kernel_scope(config: KernelConfig, tables: StepTables) -> str:
    """Name of a kernel in profiles, with the grid steps that a head takes in each plan."""
    tiles = "_".join(map(str, tables.lengths.sum(axis=0)))
    return f"cinetile_kernel_{config.softmax}_{config.part}_tiles_{tiles}"


def _padding_of_heads(
    plans: tuple[TilePlan, ...],
    routes: Int[Array, "batch heads"],
    prompt_lengths: Int[Array, " batch"] | None,
) -> tuple[Int[Array, " all_heads"], Int[Array, " all_heads"]] | None:
    """First padding key of each head and the first key after its padding, in its plan's order."""
    if prompt_lengths is None:
        return None
    ranges = [plan.mask.key_order.text_range(plan.grid) for plan in plans]
    starts, stops = jnp.asarray(np.array(ranges, np.int32).T)[:, routes]
    return (starts + prompt_lengths[:, None]).reshape(-1), stops.reshape(-1)


def _geometries(
    plans: tuple[TilePlan, ...], routes: Int[Array, " heads"]
) -> Iterator[tuple[int, int, list[int], Int[Array, " heads"]]]:
    """Block sizes, indices of the plans that have them, and the routes counted among these."""
    for block_q, block_kv in dict.fromkeys((plan.block_q, plan.block_kv) for plan in plans):
        chosen = [
            index
            for index, plan in enumerate(plans)
            if (plan.block_q, plan.block_kv) == (block_q, block_kv)
        ]
        local = np.zeros(len(plans), np.int32)
        local[chosen] = np.arange(len(chosen))
        yield block_q, block_kv, chosen, jnp.asarray(local)[routes]


def _routed_to(routes: Int[Array, " heads"], plans: list[int]) -> Bool[Array, " heads"]:
    return jnp.isin(routes, jnp.asarray(plans, jnp.int32))


@jax.named_scope("cinetile_merge")
def _merge(first: call.Outputs, second: call.Outputs) -> call.Outputs:
    """Attention over the union of two disjoint sets of keys, from attention over each."""
    lse = jnp.logaddexp(first.lse, second.lse)
    some_key = jnp.isfinite(lse)
    output = sum(
        part.output.astype(jnp.float32)
        * jnp.where(some_key, jnp.exp(part.lse - jnp.where(some_key, lse, 0)), 0)[:, 0, :, None]
        for part in (first, second)
    )
    return call.Outputs(jnp.asarray(output).astype(first.output.dtype), lse)


def _heads_first(
    array: Float[Array, "batch tokens heads head_dim"],
) -> Float[Array, "all_heads tokens padded_head_dim"]:
    batch, tokens, heads, head_dim = array.shape
    missing = _padded_head_dim(head_dim) - head_dim
    flat = array.swapaxes(1, 2).reshape(batch * heads, tokens, head_dim)
    return jnp.pad(flat, ((0, 0), (0, 0), (0, missing)))


def _padded_head_dim(head_dim: int) -> int:
    """The next size that the kernel is built for; features of zeros change nothing."""
    return next(size for size in HEAD_DIMS if size >= head_dim)
