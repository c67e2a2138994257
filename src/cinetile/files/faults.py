"""Turning whatever goes wrong while a file is read into one kind of error that names the file."""

import contextlib
import os
from collections.abc import Iterator

_LONGEST_MESSAGE = 400


class FileError(ValueError):
    """A file that cannot be used; its message names the file, the fault and what was expected."""


@contextlib.contextmanager
def reading(path: str | os.PathLike[str], expected: str) -> Iterator[None]:
    """Reports every error of its block as a `FileError` that names `path`.

    A missing file and a missing package stay what they are, FileNotFoundError and ImportError.

    Args:
        path: the file that the block reads.
        expected: what the file should be, with its article: "a tile plan of cinetile".
    """
    try:
        yield
    except (FileError, FileNotFoundError, ImportError):
        raise
    except Exception as error:
        raise _file_error(path, error, expected) from error
    except BaseException as error:
        # Extensions in Rust report their own failed assertions as a BaseException of this name.
        if type(error).__name__ != "PanicException":
            raise
        raise _file_error(path, error, expected) from error


def _file_error(path: str | os.PathLike[str], error: BaseException, expected: str) -> FileError:
    return FileError(f"{os.fspath(path)}: {_fault(error)}; expected {expected}")


def _fault(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "reading it needs more memory than there is"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not {error.encoding} text"
    if isinstance(error, KeyError):
        return f"it has no {_one_line(str(error))}"
    if isinstance(error, OSError) and error.strerror:
        return f"it cannot be read: {error.strerror}"
    message = _one_line(str(error)) or "no further message"
    plain = isinstance(error, ValueError | TypeError)
    return message if plain else f"{type(error).__name__}: {message}"


def _one_line(text: str) -> str:
    # Much longer than what is kept already costs nothing; the rest is never looked at.
    line = " ".join(text[: 4 * _LONGEST_MESSAGE].split())
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]}..."
