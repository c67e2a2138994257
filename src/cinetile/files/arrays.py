"""NumPy's .npz archives: headers first, data within bounds, never pickled objects."""

import contextlib
import io
import math
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Shaped

from cinetile import _checks
from cinetile.files.faults import reading

_MOST_ARRAYS = 4096
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# Deflate cannot shrink anything further.
_DEFLATE_RATIO = 1032
_CHUNK = 1 << 20
_KINDS = "biufVU"


@dataclass(frozen=True)
class ArrayHeader:
    """What a file says of an array before any of its data is read.

    Attributes:
        shape: sizes of the axes.
        dtype: NumPy's name of the dtype, or the format's own where NumPy has none.
        nbytes: bytes of the data.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class ArrayFile:
    """An open file of named arrays.

    Attributes:
        headers: what it says of each array.
        read: reads one array by its name.
    """

    headers: dict[str, ArrayHeader]
    read: Callable[[str], Shaped[np.ndarray, "..."]]


@contextlib.contextmanager
def open_npz(path: str | os.PathLike[str], expected: str) -> Iterator[ArrayFile]:
    """Opens an .npz archive; its headers are read and checked, its data is not.

    Raises:
        FileNotFoundError: there is no such file.
        FileError: it is no archive, is damaged, has a name twice, holds what is no plain array,
            or a header and the size of its data disagree.
    """
    with reading(path, expected), contextlib.ExitStack() as stack:
        file = stack.enter_context(_checks.existing_file("path", path).open("rb"))
        if file.read(6) == np.lib.format.MAGIC_PREFIX:
            raise ValueError("it holds one unnamed array")
        archive = stack.enter_context(zipfile.ZipFile(file))
        members = _members(archive)
        headers = {name: _header(archive, info)[0] for name, info in members.items()}
        yield ArrayFile(headers, lambda name: _read(archive, members[name]))


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    listed = archive.infolist()
    if len(listed) > _MOST_ARRAYS:
        raise ValueError(f"it has more than {_MOST_ARRAYS:,} arrays")
    members: dict[str, zipfile.ZipInfo] = {}
    for info in listed:
        name = info.filename.removesuffix(".npy")
        if name in members:
            raise ValueError(f"it has the name {_checks.shown(name)} twice")
        if info.compress_type not in _METHODS:
            raise ValueError(f"{_checks.shown(name)} is compressed by an unknown method")
        if info.file_size > info.compress_size * _DEFLATE_RATIO + _CHUNK:
            raise ValueError(
                f"{_checks.shown(name)} claims {info.file_size:,} bytes, which "
                f"{info.compress_size:,} bytes cannot hold"
            )
        members[name] = info
    return members


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[ArrayHeader, np.dtype, bool]:
    """The header of a member, its dtype, and whether its first axis is the fastest."""
    with archive.open(info) as stream:
        return _parse_header(stream, info)  # pyright: ignore[reportArgumentType]


def _parse_header(
    stream: io.BufferedIOBase, info: zipfile.ZipInfo
) -> tuple[ArrayHeader, np.dtype, bool]:
    label = _checks.shown(info.filename.removesuffix(".npy"))
    parsers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    version = np.lib.format.read_magic(stream)
    if version not in parsers:
        raise ValueError(f"{label} is in an unknown version of NumPy's format")
    with warnings.catch_warnings(action="ignore"):  # headers are parsed as Python literals
        shape, fortran_order, dtype = parsers[version](stream)
    if dtype.hasobject or dtype.kind not in _KINDS or dtype.names is not None:
        raise ValueError(f"{label} holds {_checks.shown(str(dtype))}: objects are not taken")
    if any(isinstance(size, bool) or size < 0 for size in shape):
        raise ValueError(f"{label} has the shape {_checks.shown(shape)}")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != info.file_size - stream.tell():
        raise ValueError(
            f"{label} has the shape {_checks.shown(shape)} and dtype {dtype}, which do not fit "
            f"its {info.file_size - stream.tell():,} bytes"
        )
    return ArrayHeader(tuple(shape), dtype.name, nbytes), dtype, fortran_order


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Shaped[np.ndarray, "..."]:
    with archive.open(info) as stream:
        header, dtype, fortran_order = _parse_header(stream, info)  # pyright: ignore[reportArgumentType]
        _checks.memory(f"array {_checks.shown(info.filename)}", header.nbytes)
        data = np.empty(header.nbytes, np.uint8)
        done = 0
        while chunk := stream.read(_CHUNK):
            data[done : done + len(chunk)] = np.frombuffer(chunk, np.uint8)
            done += len(chunk)
    if done != header.nbytes:
        raise ValueError(f"{_checks.shown(info.filename)} ends after {done:,} bytes")
    # A dtype without size, or a size of 0, leaves no bytes to look at.
    array = data.view(dtype) if header.nbytes else np.empty(math.prod(header.shape), dtype)
    if fortran_order:
        return array.reshape(header.shape[::-1]).T
    return array.reshape(header.shape)
