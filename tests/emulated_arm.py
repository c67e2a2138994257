"""The native kernel as it is compiled for Arm, under emulation on another machine.

`make test-arm` compiles native/tests/serve_calls.cpp for Arm. Here it runs in qemu as a server, and
takes the place of the library in `CpuImplementation`: everything above the library is the same.
"""

import functools
import os
import subprocess
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cinetile.kernels.cpu.native import NativeLibrary
from cinetile.kernels.cpu.tables import flatten_plans
from cinetile.plans import TilePlan

_DTYPES = ("float32", "bfloat16", "float16")  # numbered as by native/problem.h
SERVER_VARIABLE = "CINETILE_TEST_ARM_SERVER"
_NUM_THREADS = 2
_REASON_BYTES = 512


class EmulatedLibrary:
    """Calls of the server, one after the other.

    Args:
        command: starts the server, such as `qemu-aarch64 -cpu max serve_calls`.
    """

    def __init__(self, command: str) -> None:
        self._server = subprocess.Popen(
            command.split(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._to_server, self._from_server = self._server.stdin, self._server.stdout
        self._lock = threading.Lock()
        self.paths = tuple(self._from_server.readline().decode().strip().split(","))

    def as_native(self) -> NativeLibrary:
        """What `load_library` gives on the emulated machine."""

        def refuse(*_: Any) -> int:
            raise NotImplementedError("only calls through XLA reach the emulated library")

        return NativeLibrary(
            paths=self.paths, test_paths=(), attend=refuse, computed_queries=refuse
        )

    def call(self, path: str, plans: tuple[TilePlan, ...], scale: float, *arrays: jax.Array) -> Any:
        """As `cinetile.kernels.cpu.implementation._call`."""
        query = arrays[0]
        shapes = (
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(query.shape[:3], jnp.float32),
        )
        attend = functools.partial(self._attend, path, plans, scale)
        return jax.pure_callback(attend, shapes, *arrays)

    def _attend(
        self, path: str, plans: tuple[TilePlan, ...], scale: float, *arrays: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        query, key, value, routes, prompt_lengths = (
            np.ascontiguousarray(array) for array in arrays
        )
        tables = flatten_plans(plans)
        sizes = (
            len(path),
            _DTYPES.index(query.dtype.name),
            *query.shape,
            tables.header.shape[0],
            tables.row_starts.size,
            tables.tile_kv.size,
            tables.edges.shape[0],
            tables.orders.shape[0],
            _NUM_THREADS,
        )
        pieces = (
            np.array(sizes, np.int64),
            np.frombuffer(path.encode(), np.uint8),
            # XLA hands the scale over as a float32 too.
            np.array([np.float32(scale)], np.float64),
            query,
            key,
            value,
            routes.astype(np.int32),
            prompt_lengths.astype(np.int32),
            *vars(tables).values(),
        )
        request = b"".join(piece.tobytes() for piece in pieces)
        with self._lock:
            self._to_server.write(request)
            self._to_server.flush()
            if np.frombuffer(self._read(8), np.int64)[0] != 0:
                raise ValueError(self._read(_REASON_BYTES).rstrip(b"\0").decode())
            output = np.frombuffer(self._read(query.nbytes), query.dtype)
            lse = np.frombuffer(self._read(4 * query[..., 0].size), np.float32)
        return output.reshape(query.shape), lse.reshape(query.shape[:3])

    def _read(self, count: int) -> bytes:
        data = self._from_server.read(count)
        assert len(data) == count, "the server ended in the middle of an answer"
        return data


@functools.cache
def emulated_library() -> EmulatedLibrary | str:
    """The server that the environment names, or why there is none."""
    command = os.environ.get(SERVER_VARIABLE)
    return EmulatedLibrary(command) if command else "needs an Arm server: run `make test-arm`"
