"""Query, key and value from a file that somebody saved."""

import os
import zipfile
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped

from cinetile import _checks, _extras
from cinetile.lab.inputs.arrays import Inputs

_NAMES = ("query", "key", "value")
_DTYPES = ("float16", "bfloat16", "float32", "float64")
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
        TypeError: `num_tokens` is not an integer, or an array is not floating point.
        ValueError: The suffix is unknown, the file is damaged, an array is missing, empty, of
            another rank or shape, or holds values that are not finite in float32.
    """
    if num_tokens is not None:
        num_tokens = _checks.integer("num_tokens", num_tokens, minimum=1)
    path = _checks.existing_file("path", path)
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"path takes a file ending in {' or '.join(readers)}, got {str(path)!r}")

    found, arrays = reader(path)
    missing = [name for name in _NAMES if name not in arrays]
    if missing:
        raise ValueError(f"{path}: holds {found}, wanted {list(_NAMES)}: {missing} missing")
    query, key, value = (_batched(path, name, arrays[name]) for name in _NAMES)
    for name, array in (("key", key), ("value", value)):
        if array.shape != query.shape:
            raise ValueError(
                f"{path}: {name!r} has shape {array.shape}, wanted {query.shape} as 'query' has"
            )
    if num_tokens is not None and query.shape[1] != num_tokens:
        wanted = (query.shape[0], num_tokens, *query.shape[2:])
        raise ValueError(
            f"{path}: 'query' has shape {query.shape}, wanted {wanted}: "
            f"{query.shape[1]} tokens do not match num_tokens {num_tokens}"
        )
    return Inputs(query, key, value, f"file {path.name}")


def _read_npz(path: Path) -> tuple[list[str], dict[str, Shaped[np.ndarray, "..."]]]:
    """Returns the names in the archive and the wanted arrays among them."""
    try:
        with path.open("rb") as stream:
            archive = np.load(stream)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds one unnamed array")
            with archive:
                found = archive.files
                return found, {name: archive[name] for name in _NAMES if name in found}
    # NumPy lets the error of whichever layer met the damage through; zipfile's for a flag or a
    # method that it does not know is a RuntimeError.
    except (
        ValueError,
        OSError,
        EOFError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ValueError(f"{path}: not a readable .npz file: {error}") from error


def _read_safetensors(path: Path) -> tuple[list[str], dict[str, Shaped[np.ndarray, "..."]]]:
    """Returns the names in the file and the wanted arrays among them."""
    safetensors = _extras.require(
        "safetensors", extra="video", feature="reading a .safetensors file"
    )
    try:
        with safetensors.safe_open(path, framework="numpy") as archive:
            found = list(archive.keys())
            return found, {name: archive.get_tensor(name) for name in _NAMES if name in found}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: not a readable .safetensors file: {error}") from error


def _batched(
    path: Path, name: str, array: Shaped[np.ndarray, "..."]
) -> Float[np.ndarray, "batch tokens heads head_dim"]:
    """Checks one stored array and returns it in float32 with a batch axis."""
    # NumPy has no name for bfloat16, so an .npz returns it as two raw bytes.
    if array.dtype == np.dtype("V2"):
        array = array.view(ml_dtypes.bfloat16)
    label = f"{path}: {name!r} has shape {array.shape} and dtype {array.dtype}"
    if array.dtype.name not in _DTYPES:
        raise TypeError(f"{label}, wanted a dtype of {', '.join(_DTYPES)}")
    if array.ndim not in (3, 4):
        raise ValueError(f"{label}, wanted shape {_RANKS}")
    if array.size == 0:
        raise ValueError(f"{label}, wanted shape {_RANKS} with no size of 0")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    bad = array.size - np.count_nonzero(np.isfinite(array))
    if bad:
        raise ValueError(f"{label}, wanted finite float32 values: {bad} are not")
    return array[np.newaxis] if array.ndim == 3 else array
