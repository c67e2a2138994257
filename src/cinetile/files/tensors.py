"""Safetensors files: a header that is checked here, and data that the package reads."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from cinetile import _checks, _extras
from cinetile.files.arrays import ArrayFile, ArrayHeader
from cinetile.files.documents import parse_json
from cinetile.files.faults import reading

_MAX_HEADER = 32 << 20
# The product of millions of sizes would take hours.
_MAX_AXES = 32
# The format's names and NumPy's; what has none is described, but cannot be read.
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


@contextlib.contextmanager
def open_safetensors(
    path: str | os.PathLike[str], expected: str, *, extra: str, feature: str
) -> Iterator[ArrayFile]:
    """Opens a .safetensors file; its header is read and checked, its data is not.

    Args:
        path: the file.
        expected: what the file should be, for errors.
        extra: the extra that installs the package, for errors.
        feature: what needs the package, for errors.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: safetensors is not installed.
        FileError: it is truncated or damaged, or has a name twice; from `read`, a tensor has a
            dtype that NumPy does not know.
    """
    safetensors = _extras.require("safetensors", extra=extra, feature=feature)
    with reading(path, expected), contextlib.ExitStack() as stack:
        headers = _headers(_checks.existing_file("path", path))
        archive: Any = stack.enter_context(safetensors.safe_open(path, framework="numpy"))

        def read(name: str) -> Shaped[np.ndarray, "..."]:
            with reading(path, expected):
                header = headers[name]
                if header.dtype not in _DTYPES.values():
                    raise ValueError(
                        f"tensor {_checks.shown(name)} has dtype {header.dtype}, which is none of "
                        f"{', '.join(_DTYPES)}"
                    )
                return archive.get_tensor(name)

        yield ArrayFile(headers, read)


def _headers(path: Path) -> dict[str, ArrayHeader]:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError("it is truncated or no safetensors file")
        if length > _MAX_HEADER:
            raise ValueError(f"its header has {length:,} bytes, more than {_MAX_HEADER:,}")
        document = parse_json(file.read(length))
    if not isinstance(document, dict):
        raise ValueError("its header is no JSON object")
    document.pop("__metadata__", None)
    headers = {name: _header(name, entry) for name, entry in document.items()}
    if sum(header.nbytes for header in headers.values()) != size - 8 - length:
        raise ValueError("it is truncated or has data that belongs to no tensor")
    return headers


def _header(name: str, entry: Any) -> ArrayHeader:
    label = f"tensor {_checks.shown(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{label} must have dtype, shape and data_offsets")
    shape, offsets, dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
    if not isinstance(dtype, str):
        raise ValueError(f"{label} has the dtype {_checks.shown(dtype)}")
    for what, values in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(values, list) or any(
            type(number) is not int or number < 0 for number in values
        ):
            raise ValueError(f"{label} has the {what} {_checks.shown(values)}")
    if len(shape) > _MAX_AXES:
        raise ValueError(f"{label} has {len(shape):,} axes, more than {_MAX_AXES}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{label} has the data_offsets {_checks.shown(offsets)}")
    known = _DTYPES.get(dtype)
    nbytes = offsets[1] - offsets[0]
    if known is not None:
        itemsize = 2 if known == "bfloat16" else np.dtype(known).itemsize
        if math.prod(shape) * itemsize != nbytes:
            raise ValueError(f"{label} has the shape {_checks.shown(shape)} in {nbytes:,} bytes")
    return ArrayHeader(tuple(shape), dtype if known is None else known, nbytes)
