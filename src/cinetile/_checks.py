"""Argument checks shared by every module: one wording for one kind of mistake."""

import math
import operator
import os
import reprlib
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

_LONGEST_SHOWN = 200
_MOST_DIGITS_BITS = 256


class _Shortened(reprlib.Repr):
    """`repr` of bounded length and cost, whatever the value holds."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _LONGEST_SHOWN
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 8
        self.maxlevel = 3

    def repr_int(self, x: Any, level: int) -> str:
        del level
        bits = x.bit_length()
        return repr(x) if bits <= _MOST_DIGITS_BITS else f"an integer of {bits:,} bits"


_SHORTENED = _Shortened()


def shown(value: object) -> str:
    """Returns `repr(value)` for an error's text, shortened to at most 200 characters.

    Values from files may be of any size, and may hold themselves many times over.
    """
    text = _SHORTENED.repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def memory(what: str, nbytes: int) -> None:
    """Raises ValueError if `nbytes` exceed the machine's memory; call it before allocating.

    Args:
        what: what takes them, in the user's words: "query, key and value of 4 tokens".
        nbytes: bytes to allocate.
    """
    available = _physical_memory()
    if nbytes > available:
        raise ValueError(
            f"{what} would take {size(nbytes)}, and this machine has {size(available)} of memory"
        )


def size(nbytes: int) -> str:
    """Returns a number of bytes in words: `512 bytes`, `1.5 GB`, `2.4 TB`."""
    for unit, factor in (("PB", 15), ("TB", 12), ("GB", 9), ("MB", 6)):
        if nbytes >= 10**factor:
            tenths = nbytes * 10 // 10**factor
            return f"{tenths // 10:,}.{tenths % 10} {unit}"
    return f"{nbytes:,} bytes"


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 1 << 40  # the system does not say


def integer(name: str, value: object, *, minimum: int, maximum: int | None = None) -> int:
    """Returns `value` as an int, or raises an error that names the argument.

    Raises:
        TypeError: `value` is not an integer (booleans and floats are not).
        ValueError: `value` lies outside `[minimum, maximum]`.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be an integer, got {shown(value)}")
    number = operator.index(value)
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {shown(number)}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {shown(number)}")
    return number


def boolean(name: str, value: object) -> bool:
    """Returns `value` as a bool, or raises TypeError if it is neither true nor false."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def finite(name: str, value: object) -> float:
    """Returns `value` as a finite float, or raises an error that names the argument.

    Raises:
        TypeError: `value` is not a number; text and booleans are none.
        ValueError: `value` is NaN or infinite, or too large for a float.
    """
    if isinstance(value, bool | np.bool_ | str | bytes | bytearray):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    try:
        number = float(value)  # pyright: ignore[reportArgumentType]
    except OverflowError as error:
        raise ValueError(f"{name} must be finite, got {shown(value)}") from error
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number, got {shown(value)}") from error
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number


def positive(name: str, value: object) -> float:
    """Returns `value` as a finite float above 0, or raises an error that names the argument."""
    number = finite(name, value)
    if number <= 0.0:
        raise ValueError(f"{name} must be above 0, got {number}")
    return number


def fraction(name: str, value: object) -> float:
    """Returns `value` as a float in `(0, 1]`, or raises an error that names the argument."""
    number = finite(name, value)
    if not 0.0 < number <= 1.0:
        raise ValueError(f"{name} must lie in (0, 1], got {number}")
    return number


def choice(name: str, value: object, options: tuple[str, ...]) -> str:
    """Returns `value` if it is one of `options`, or raises an error that lists them."""
    if not isinstance(value, str) or value not in options:
        listed = ", ".join(repr(option) for option in options)
        raise ValueError(f"{name} must be one of {listed}, got {shown(value)}")
    return value


def strides(name: str, value: object) -> tuple[int, int, int]:
    """Returns `value` as three positive ints (time, height, width), or raises an error."""
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise ValueError(f"{name} must be three integers (time, height, width), got {shown(value)}")
    time, height, width = (
        integer(f"{name}[{axis}]", entry, minimum=1) for axis, entry in enumerate(value)
    )
    return time, height, width


def existing_file(name: str, value: str | os.PathLike[str]) -> Path:
    """Returns `value` as the path of a file, or raises FileNotFoundError if there is none."""
    path = Path(value)
    try:
        exists = path.is_file()
    except (OSError, ValueError):  # a name that is too long, or holds what no name can
        exists = False
    if not exists:
        raise FileNotFoundError(f"{name} must be an existing file, got {shown(os.fspath(value))}")
    return path
