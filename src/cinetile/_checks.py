"""Argument checks shared by every module: one wording for one kind of mistake."""

import math
import operator
import os
from pathlib import Path
from typing import SupportsIndex

import numpy as np


def integer(name: str, value: object, *, minimum: int, maximum: int | None = None) -> int:
    """Returns `value` as an int, or raises an error that names the argument.

    Raises:
        TypeError: `value` is not an integer (booleans and floats are not).
        ValueError: `value` lies outside `[minimum, maximum]`.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    number = operator.index(value)
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {number}")
    return number


def boolean(name: str, value: object) -> bool:
    """Returns `value` as a bool, or raises TypeError if it is neither true nor false."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def finite(name: str, value: object) -> float:
    """Returns `value` as a finite float, or raises an error that names the argument.

    Raises:
        TypeError: `value` is not a number.
        ValueError: `value` is NaN or infinite.
    """
    try:
        number = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number, got {value!r}") from error
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
        raise ValueError(f"{name} must be one of {listed}, got {value!r}")
    return value


def strides(name: str, value: object) -> tuple[int, int, int]:
    """Returns `value` as three positive ints (time, height, width), or raises an error."""
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise ValueError(f"{name} must be three integers (time, height, width), got {value!r}")
    time, height, width = (
        integer(f"{name}[{axis}]", entry, minimum=1) for axis, entry in enumerate(value)
    )
    return time, height, width


def existing_file(name: str, value: str | os.PathLike[str]) -> Path:
    """Returns `value` as the path of a file, or raises FileNotFoundError if there is none."""
    path = Path(value)
    if not path.is_file():
        raise FileNotFoundError(f"{name} must be an existing file, got {os.fspath(value)!r}")
    return path
