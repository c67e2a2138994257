"""Writing files whole or not at all."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import IO

from cinetile import _checks

# What the name of a file that is not complete yet has more than its own.
_EXTRA_CHARACTERS = 10


def replace_file(path: str | os.PathLike[str], write_to: Callable[[IO[bytes]], object]) -> None:
    """Writes a file beside `path` and moves it there once it is complete.

    Args:
        path: what to write; an old file stays as it is until the new one is whole. Links are
            followed, and what is no file (a device, a pipe) is written to as it stands.
        write_to: writes the content to the binary file that it is given.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        with target.open("wb") as device:
            write_to(device)
        return
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            write_to(file)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def require_writable(path: str | os.PathLike[str]) -> None:
    """Raises ValueError if `path` could not be written; nothing is written or changed.

    A file is replaced by way of a new one beside it, so its folder must be writable; a device or
    a pipe is written to as it stands.
    """
    shown = _checks.shown(os.fspath(path))
    try:
        target = Path(path).resolve()
        parent = target.parent
        if target.is_dir():
            raise ValueError(f"{shown} is a folder")
        if not parent.is_dir():
            what = "is no folder" if parent.exists() else "does not exist"
            raise ValueError(f"the folder {_checks.shown(str(parent))} {what}")
        special = target.exists() and not target.is_file()
        if not os.access(target if special else parent, os.W_OK if special else os.W_OK | os.X_OK):
            where = shown if special else f"the folder {_checks.shown(str(parent))}"
            raise ValueError(f"{where} cannot be written")
        longest = os.pathconf(parent, "PC_NAME_MAX") if hasattr(os, "pathconf") else 255
    except (OSError, RuntimeError) as error:  # a name that is too long, a circle of links
        raise ValueError(f"{shown} cannot be written: {error}") from error
    if len(os.fsencode(target.name)) + _EXTRA_CHARACTERS > longest:
        raise ValueError(f"{shown} has too long a name")
