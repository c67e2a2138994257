"""The native CPU implementation: requirements, call and gradients."""

import functools
import os
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cinetile.kernels.base import Implementation
from cinetile.kernels.cpu.blocks import tuned_blocks
from cinetile.kernels.cpu.native import TARGET, load_library
from cinetile.kernels.cpu.tables import flatten_plans
from cinetile.kernels.portable_gradients import Outputs, attend_with_portable_gradients
from cinetile.plans import TilePlan

PATH_VARIABLE = "CINETILE_CPU_PATH"


class CpuImplementation(Implementation):
    """Exact block-sparse attention in C++, compiled for several kinds of processors.

    It reads and writes frame-major arrays directly in the orders of each plan: no separate pass
    moves tokens.
    Gradients are those of the portable implementation.

    Args:
        path: the code path to run, one of those that `load_library` lists. By default the path in
            the environment variable CINETILE_CPU_PATH, or else the fastest path; the variable is
            read when a call is compiled.
    """

    name: ClassVar[str] = "cpu"
    moves_tokens: ClassVar[bool] = False
    requirements: ClassVar[str] = "JAX on a CPU; a C++17 compiler at installation"

    def __init__(self, path: str | None = None) -> None:
        self._path = path

    @property
    def path(self) -> str:
        """The code that runs here.

        One of "amx", "avx512_bf16", "avx512", "avx2", "neon_bf16", "neon" and "portable".
        """
        library = load_library()
        if isinstance(library, str):
            raise NotImplementedError(f"cpu: {library}")
        return self._wanted_path or library.paths[0]

    @property
    def _wanted_path(self) -> str | None:
        return self._path or os.environ.get(PATH_VARIABLE) or None

    def unavailable(self) -> str | None:
        if jax.default_backend() != "cpu":
            return f"jax runs on {jax.default_backend()} here, not on a CPU"
        library = load_library()
        if isinstance(library, str):
            return library
        wanted = self._wanted_path
        if wanted is None or wanted in library.paths + library.test_paths:
            return None
        paths = f"this processor has no path {wanted!r}, only {', '.join(library.paths)}"
        if self._path is None:
            # Another kernel instead of the one that was asked for would mislead.
            raise ValueError(f"{PATH_VARIABLE} is {wanted!r}, but {paths}")
        return paths

    def default_blocks(self, num_tokens: int, dtype: str) -> tuple[int, int]:
        return tuned_blocks(self.path, dtype, num_tokens)

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
    ) -> Outputs:
        forward = functools.partial(_attend, self.path, plans, scale)
        return attend_with_portable_gradients(
            forward, plans, scale, query, key, value, routes, prompt_lengths
        )


def _attend(
    path: str,
    plans: tuple[TilePlan, ...],
    scale: float,
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch tokens heads head_dim"],
    value: Float[Array, "batch tokens heads head_dim"],
    routes: Int[Array, "batch heads"] | None,
    prompt_lengths: Int[Array, " batch"] | None,
) -> Outputs:
    batch, tokens, heads, _ = query.shape
    if routes is None:
        routes = jnp.zeros((batch, heads), jnp.int32)
    if prompt_lengths is None:
        prompt_lengths = jnp.full(batch, tokens, jnp.int32)
    return _batched_call(path, plans, scale)(query, key, value, routes, prompt_lengths)


def _batched_call(path: str, plans: tuple[TilePlan, ...], scale: float) -> Any:
    """The call of the library; `jax.vmap` adds to its batch dimension instead of looping."""

    @jax.custom_batching.custom_vmap
    def call(*arrays: Array) -> Any:
        return _call(path, plans, scale, *arrays)

    @call.def_vmap
    def _(axis_size: int, is_batched: list[bool], *arrays: Array) -> Any:
        folded = [
            jnp.reshape(
                array if batched else jnp.broadcast_to(array, (axis_size, *array.shape)),
                (axis_size * array.shape[batched], *array.shape[1 + batched :]),
            )
            for array, batched in zip(arrays, is_batched, strict=True)
        ]
        outputs = [
            output.reshape(axis_size, arrays[0].shape[is_batched[0]], *output.shape[1:])
            for output in call(*folded)
        ]
        return tuple(outputs), (True, True)

    return call


def _call(
    path: str,
    plans: tuple[TilePlan, ...],
    scale: float,
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch tokens heads head_dim"],
    value: Float[Array, "batch tokens heads head_dim"],
    routes: Int[Array, "batch heads"],
    prompt_lengths: Int[Array, " batch"],
) -> Outputs:
    tables = flatten_plans(plans)
    run = jax.ffi.ffi_call(
        TARGET,
        (
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(query.shape[:3], jnp.float32),
        ),
    )
    output, lse = run(
        query,
        key,
        value,
        routes.astype(jnp.int32),
        prompt_lengths.astype(jnp.int32),
        tables.header,
        tables.row_starts,
        tables.tile_kv,
        tables.tile_kind,
        tables.edges,
        tables.orders,
        scale=np.float32(scale),
        path=path,
    )
    return output, lse
