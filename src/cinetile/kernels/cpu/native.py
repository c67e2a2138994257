"""The compiled library: finding it, what it can do here, and its name within XLA."""

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import jax

from cinetile.kernels.cpu.interrupts import watch_interrupts

TARGET = "cinetile_attention"


@dataclass(frozen=True)
class NativeLibrary:
    """A library that is loaded, and whose kernel XLA knows as `TARGET`.

    Attributes:
        paths: ways through the kernel that this processor can run, the fastest first.
        test_paths: further ones, which are slow and only for tests.
        attend: its entry point for plain pointers; see `direct`.
        computed_queries: how many queries a path computes for a tile of so many, given its name,
            the number of a dtype and the queries; 0 where the processor has no such path.
    """

    paths: tuple[str, ...]
    test_paths: tuple[str, ...]
    attend: Callable[..., int]
    computed_queries: Callable[..., int]


@functools.cache
def load_library() -> NativeLibrary | str:
    """Loads the library on the first call; gives the reason where that cannot be done."""
    # Where an extension module would be, though this is none: it needs no Python API.
    spec = importlib.util.find_spec("cinetile.kernels.cpu.cinetile_native")
    if spec is None or spec.origin is None:
        return (
            "its library was not built when cinetile was installed, which takes a C++17 compiler "
            "(g++ or clang++); reinstall with one to get it"
        )
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError as error:
        return f"its library does not load: {error}"
    try:
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library[TARGET]), platform="cpu")
    except jax.errors.JaxRuntimeError as error:
        return f"its library was built for another version of jaxlib: {error}"
    list_paths = library.cinetile_paths
    list_paths.restype = ctypes.c_char_p
    names = list_paths().decode().split(",")
    attend = library.cinetile_attend
    attend.restype = ctypes.c_int
    attend.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64)
    watch_interrupts(library)
    computed_queries = library.cinetile_computed_queries
    computed_queries.restype = ctypes.c_int64
    computed_queries.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)
    return NativeLibrary(
        paths=tuple(name for name in names if not name.startswith("(")),
        test_paths=tuple(name.strip("()") for name in names if name.startswith("(")),
        attend=attend,
        computed_queries=computed_queries,
    )
