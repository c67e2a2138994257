"""Calls of the native kernel on memory that someone else owns, without a copy and without JAX.

For arrays of other libraries: they hand over pointers and strides. Inside JAX, `ct.attention`
calls the same kernel through XLA's foreign function interface.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from cinetile import _checks
from cinetile.kernels.cpu.native import load_library
from cinetile.kernels.cpu.tables import flatten_plans
from cinetile.plans import TilePlan

_DTYPES = ("float32", "bfloat16", "float16")  # numbered as by native/problem.h
_REASON_BYTES = 512
_INTERRUPTED = 2


class _Array(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


class _Call(ctypes.Structure):
    """As native/c_api.cpp has it."""

    _fields_ = (
        ("size", ctypes.c_int64),
        ("data_type", ctypes.c_int64),
        ("batch", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("query", _Array),
        ("key", _Array),
        ("value", _Array),
        ("output", _Array),
        ("lse", ctypes.c_void_p),
        ("routes", ctypes.c_void_p),
        ("prompt_lengths", ctypes.c_void_p),
        ("header", ctypes.c_void_p),
        ("num_plans", ctypes.c_int64),
        ("row_starts", ctypes.c_void_p),
        ("num_row_starts", ctypes.c_int64),
        ("tile_kv", ctypes.c_void_p),
        ("tile_kind", ctypes.c_void_p),
        ("num_tiles", ctypes.c_int64),
        ("edges", ctypes.c_void_p),
        ("num_edges", ctypes.c_int64),
        ("orders", ctypes.c_void_p),
        ("num_orders", ctypes.c_int64),
        ("path", ctypes.c_char_p),
        ("num_threads", ctypes.c_int64),
        ("scale", ctypes.c_double),
    )


@dataclass(frozen=True)
class Operand:
    """Where an array `[batch, tokens, heads, head_dim]` lies; its features are adjacent.

    Attributes:
        address: of its first element.
        strides: elements from one batch row, token and head to the next.
    """

    address: int
    strides: tuple[int, int, int]


class DirectAttention:
    """Attention over some plans by the native kernel, on pointers.

    Args:
        plans: what a head can be routed to; all on one token grid.
        path: which code to run; the fastest by default.

    Raises:
        NotImplementedError: the library is not there or has no such path.
    """

    def __init__(self, plans: tuple[TilePlan, ...], path: str | None = None) -> None:
        library = load_library()
        if isinstance(library, str):
            raise NotImplementedError(f"cpu: {library}")
        self.path = library.paths[0] if path is None else path
        self._attend = library.attend
        self._num_tokens = plans[0].grid.num_tokens
        self._tables = flatten_plans(plans)

    def __call__(
        self,
        query: Operand,
        key: Operand,
        value: Operand,
        output: Operand,
        *,
        dtype: str,
        head_dim: int,
        routes: Int[np.ndarray, "batch heads"],
        scale: float,
        num_threads: int,
        prompt_lengths: Int[np.ndarray, " batch"] | None = None,
    ) -> None:
        """Writes the output. Nothing else is written, and Python's lock is released meanwhile.

        Args:
            query: queries in frame-major order.
            key: keys, of the same form.
            value: values, of the same form.
            output: where the output goes, of the same form; must not overlap the others.
            dtype: of all four, "float32", "bfloat16" or "float16".
            head_dim: features of a head.
            routes: index into the plans for each head of each batch row.
            scale: factor on the logits.
            num_threads: threads to run on.
            prompt_lengths: text tokens of each batch row that exist; None for all.

        Raises:
            ValueError: the kernel refuses the call, and says why.
            KeyboardInterrupt: SIGINT ended the call early; the output is incomplete.
        """
        _checks.choice("dtype", dtype, _DTYPES)
        routes = np.ascontiguousarray(routes, np.int32)
        batch, heads = routes.shape
        if prompt_lengths is not None:
            prompt_lengths = np.ascontiguousarray(prompt_lengths, np.int32)
            if prompt_lengths.shape != (batch,):
                raise ValueError(
                    f"prompt_lengths must be [{batch}], got {list(prompt_lengths.shape)}"
                )
        lse = np.empty((batch, self._num_tokens, heads), np.float32)
        tables = self._tables
        call = _Call(
            size=ctypes.sizeof(_Call),
            data_type=_DTYPES.index(dtype),
            batch=batch,
            num_tokens=self._num_tokens,
            heads=heads,
            head_dim=head_dim,
            query=_Array(query.address, *query.strides),
            key=_Array(key.address, *key.strides),
            value=_Array(value.address, *value.strides),
            output=_Array(output.address, *output.strides),
            lse=lse.ctypes.data,
            routes=routes.ctypes.data,
            prompt_lengths=None if prompt_lengths is None else prompt_lengths.ctypes.data,
            header=tables.header.ctypes.data,
            num_plans=tables.header.shape[0],
            row_starts=tables.row_starts.ctypes.data,
            num_row_starts=tables.row_starts.size,
            tile_kv=tables.tile_kv.ctypes.data,
            tile_kind=tables.tile_kind.ctypes.data,
            num_tiles=tables.tile_kv.size,
            edges=tables.edges.ctypes.data,
            num_edges=tables.edges.shape[0],
            orders=tables.orders.ctypes.data,
            num_orders=tables.orders.shape[0],
            path=self.path.encode(),
            num_threads=num_threads,
            scale=scale,
        )
        reason = ctypes.create_string_buffer(_REASON_BYTES)
        status = self._attend(ctypes.byref(call), reason, _REASON_BYTES)
        if status == _INTERRUPTED:
            raise KeyboardInterrupt
        if status:
            raise ValueError(f"cinetile's cpu kernel: {reason.value.decode()}")
