"""Query, key and value from a file that somebody saved."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped

from cinetile import _checks
from cinetile.files import ArrayFile, ArrayHeader, open_npz, open_safetensors, reading
from cinetile.lab.inputs.arrays import Inputs, require_memory

_NAMES = ("query", "key", "value")
_DTYPES = ("float16", "bfloat16", "float32", "float64")
# NumPy has no name for bfloat16, so an .npz holds it as two raw bytes.
_RAW_BFLOAT16 = np.dtype("V2").name
_EXPECTED = "a file with query, key and value"
_RANKS = "[tokens, heads, head_dim] or [batch, tokens, heads, head_dim]"


def load_qkv(path: str | os.PathLike[str], num_tokens: int | None = None) -> Inputs:
    """Loads the arrays `query`, `key` and `value` of a file; others in it are ignored.

    Each is `[tokens, heads, head_dim]`, which becomes batch 1, or
    `[batch, tokens, heads, head_dim]`, in float16, bfloat16, float32 or float64.

    Args:
        path: A `.npz` or `.safetensors` file.
        num_tokens: The token count that the arrays must have; None takes any.

    Returns:
        The inputs in float32.

    Raises:
        FileNotFoundError: There is no such file.
        ImportError: The file is a `.safetensors` and safetensors is not installed.
        TypeError: `num_tokens` is not an integer.
        ValueError: The suffix is unknown, the file is damaged, an array is missing, empty, not
            floating point, of another rank or shape, does not fit in memory, or holds values that
            are not finite in float32.
    """
    if num_tokens is not None:
        num_tokens = _checks.integer("num_tokens", num_tokens, minimum=1)
    path = _checks.existing_file("path", path)
    with _open(path) as archive, reading(path, _EXPECTED):
        _check_headers(archive.headers, num_tokens)
        query, key, value = (_batched(name, archive.read(name)) for name in _NAMES)
    return Inputs(query, key, value, f"file {path.name}")


def _open(path: Path) -> AbstractContextManager[ArrayFile]:
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return open_npz(path, _EXPECTED)
    if suffix == ".safetensors":
        return open_safetensors(
            path, _EXPECTED, extra="video", feature="reading a .safetensors file"
        )
    raise ValueError(f"path takes a file ending in .npz or .safetensors, got {str(path)!r}")


def _check_headers(headers: Mapping[str, ArrayHeader], num_tokens: int | None) -> None:
    """Raises ValueError unless the arrays fit each other, before any data is read."""
    missing = [name for name in _NAMES if name not in headers]
    if missing:
        raise ValueError(
            f"it holds {_checks.shown(list(headers))}, wanted {list(_NAMES)}: {missing} missing"
        )
    for name in _NAMES:
        header = headers[name]
        label = f"{name!r} has shape {_checks.shown(header.shape)} and dtype {header.dtype}"
        if header.dtype not in (*_DTYPES, _RAW_BFLOAT16):
            raise ValueError(f"{label}, wanted a dtype of {', '.join(_DTYPES)}")
        if len(header.shape) not in (3, 4):
            raise ValueError(f"{label}, wanted shape {_RANKS}")
        if 0 in header.shape:
            raise ValueError(f"{label}, wanted shape {_RANKS} with no size of 0")
    query = headers["query"].shape
    for name in ("key", "value"):
        if headers[name].shape != query:
            raise ValueError(
                f"{name!r} has shape {headers[name].shape}, wanted {query} as 'query' has"
            )
    batched = query if len(query) == 4 else (1, *query)
    if num_tokens is not None and batched[1] != num_tokens:
        raise ValueError(
            f"'query' has shape {batched}, wanted {(batched[0], num_tokens, *batched[2:])}: "
            f"{batched[1]} tokens do not match num_tokens {num_tokens}"
        )
    require_memory(batched[1], batched[2], batched[3], batched[0])


def _batched(
    name: str, array: Shaped[np.ndarray, "..."]
) -> Float[np.ndarray, "batch tokens heads head_dim"]:
    """Returns a stored array in float32 with a batch axis, or raises ValueError."""
    if array.dtype == np.dtype("V2"):
        array = array.view(ml_dtypes.bfloat16)
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    bad = array.size - np.count_nonzero(np.isfinite(array))
    if bad:
        raise ValueError(f"{name!r} must have finite float32 values: {bad:,} are not")
    return array[np.newaxis] if array.ndim == 3 else array
