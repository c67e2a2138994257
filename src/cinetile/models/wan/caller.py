"""Warnings that name the line which called the package."""

import inspect
import warnings


def warn_caller(message: str) -> None:
    """Warns at the innermost line of the call stack that lies outside this package."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("cinetile."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
