"""The child process that compiles: `python -m cinetile.lab.tpu.compiler DUMP RESULT < job`.

Only `aot` starts it, with the environment that it needs.
"""

import functools
import pickle
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from cinetile.kernels.pallas_tpu import PallasTpuImplementation, PallasTpuTwoKernels, call
from cinetile.kernels.pallas_tpu.config import SUBLANES
from cinetile.kernels.pallas_tpu.routing import order_heads
from cinetile.kernels.pallas_tpu.tables import step_tables
from cinetile.lab.tpu.aot import (
    CallJob,
    CompiledCall,
    CompiledKernel,
    CompiledLayer,
    CompiledSplash,
    Failure,
    KernelJob,
    LayerJob,
    SplashJob,
)
from cinetile.lab.tpu.bundles import DumpFormatError, read_dump
from cinetile.lab.tpu.splash import read_splash_dump, splash_call
from cinetile.lab.tpu.targets import TARGETS, Target
from cinetile.layer.sparse_attention import SparseAttention
from cinetile.parallel import collectives

# Of head size 128 and the default scale; its value does not matter to the instructions.
_SCORE_FACTOR = 0.51
_VMEM_OVERFLOW = re.compile(r"E1001|vmem.*(exceed|limit|exhaust)|(exceed|exhaust).*vmem", re.I)


def main() -> None:
    """Compiles the job from stdin and writes its result, or a `Failure`."""
    dump, result = (Path(argument) for argument in sys.argv[1:3])
    job = pickle.loads(sys.stdin.buffer.read())
    try:
        found: Any = _compile(job, dump)
    except DumpFormatError as error:
        found = Failure("DumpFormatError", str(error))
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        overflow = _VMEM_OVERFLOW.search(message) is not None
        found = Failure("VmemOverflowError" if overflow else "TpuCompileError", message[:2000])
    result.write_bytes(pickle.dumps(found))


def _compile(
    job: KernelJob | CallJob | LayerJob | SplashJob, dump: Path
) -> CompiledKernel | CompiledCall | CompiledLayer | CompiledSplash:
    target = TARGETS[job.target]
    _lower_for(target)
    if isinstance(job, LayerJob):
        return _compile_layer(job, target)
    if isinstance(job, SplashJob):
        function, shapes = splash_call(job)
    elif isinstance(job, CallJob):
        function, shapes = _whole_call(job)
    else:
        function, shapes = _kernel_call(job)
    device = topologies.get_topology_desc(
        platform="tpu", topology_name=target.topology, **target.topology_options
    ).devices[0]
    sharding = SingleDeviceSharding(device)
    on_device = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), shapes
    )
    lowered = jax.jit(function).lower(*on_device)
    wall, cpu = time.perf_counter(), _cpu_seconds()
    compiled = lowered.compile()
    wall, cpu = time.perf_counter() - wall, _cpu_seconds() - cpu
    if isinstance(job, SplashJob):
        return CompiledSplash(read_splash_dump(dump), wall)
    if isinstance(job, CallJob):
        memory = compiled.memory_analysis()
        return CompiledCall(wall, 0 if memory is None else memory.temp_size_in_bytes)
    return CompiledKernel(read_dump(dump, call.KERNEL_NAME, job.config), wall, cpu)


def _compile_layer(job: LayerJob, target: Target) -> CompiledLayer:
    kind, chips = target.topology.partition(":")[0], job.topology.split("x")
    bounds = [int(side) for side in (*chips, "1")][:3]
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{kind}:{job.topology}", chips_per_host_bounds=bounds
    ).devices
    names, sizes = zip(*job.axes, strict=True)
    mesh = Mesh(np.array(devices).reshape(sizes), names)
    layer = SparseAttention(
        job.grid, job.policy, mesh=mesh, implementation=_CompiledOnly(), dtype=job.dtype
    )
    assert layer.layout is not None
    array = jax.ShapeDtypeStruct(
        (job.batch, job.grid.num_tokens, job.heads, job.head_dim),
        jnp.dtype(job.dtype),
        sharding=NamedSharding(mesh, layer.layout.spec),
    )

    def function(query: Any, key: Any, value: Any, seed: Any) -> Any:
        rng = jax.random.wrap_key_data(seed)
        return layer(query, key, value, step=1, layer=1, rng=rng, return_record=True)

    seed = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=NamedSharding(mesh, PartitionSpec()))
    lowered = jax.jit(function).lower(array, array, array, seed)
    wall = time.perf_counter()
    compiled = lowered.compile()
    wall = time.perf_counter() - wall
    memory = compiled.memory_analysis()
    temporary = 0 if memory is None else memory.temp_size_in_bytes
    return CompiledLayer(wall, temporary, collectives(compiled.as_text() or ""))


class _CompiledOnly(PallasTpuImplementation):
    """The implementation as it is on a TPU, for a process that compiles and runs nothing."""

    def unavailable(self) -> str | None:
        return None


def _lower_for(target: Target) -> None:
    """Sets the chip that Pallas lowers for; Pallas asks the default backend, here "cpu"."""
    try:
        from jax._src.pallas.mosaic import tpu_info

        chip = getattr(tpu_info.ChipVersion, target.chip)
        tpu_info.registry["cpu"] = lambda: tpu_info._get_tpu_info_impl(chip, 1)
    except (ImportError, AttributeError) as error:
        raise DumpFormatError(f"this jax cannot be told a TPU to lower for: {error}") from error


def _kernel_call(job: KernelJob) -> tuple[Any, Any]:
    config, heads, tokens = job.config, job.heads, job.plan.mask.num_tokens
    dtype = jnp.dtype(job.dtype)
    rows, padded = job.plan.geometry.num_q_tiles, job.plan.geometry.num_kv_tiles * config.block_kv
    tables = step_tables([job.plan], config, heads)
    token_major = jax.ShapeDtypeStruct((heads, tokens, job.head_dim), dtype)
    value_t = jax.ShapeDtypeStruct((heads, job.head_dim + SUBLANES, padded), dtype)
    inputs = call.KernelInputs(token_major, token_major, value_t)  # pyright: ignore[reportArgumentType]
    outputs = jax.eval_shape(
        functools.partial(call.empty_outputs, tokens=rows * config.block_q), token_major
    )

    def function(inputs: Any, outputs: Any, active: Any) -> Any:
        order = order_heads(jnp.zeros(heads, jnp.int32), active)
        return call.run_range(inputs, order, tables, config, outputs, factor=_SCORE_FACTOR)

    return function, (inputs, outputs, jax.ShapeDtypeStruct((heads,), jnp.bool_))


def _whole_call(job: CallJob) -> tuple[Any, Any]:
    implementation = PallasTpuTwoKernels() if job.two_kernels else PallasTpuImplementation()
    tokens = job.plans[0].grid.num_tokens
    array = jax.ShapeDtypeStruct((1, tokens, job.heads, job.head_dim), jnp.dtype(job.dtype))
    routes = jax.ShapeDtypeStruct((1, job.heads), jnp.int32)

    def function(query: Any, key: Any, value: Any, routes: Any) -> Any:
        scale = job.head_dim**-0.5
        return implementation.attend(query, key, value, routes, plans=job.plans, scale=scale)

    return function, (array, array, array, routes)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
