"""Writing files whole or not at all."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import IO


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
