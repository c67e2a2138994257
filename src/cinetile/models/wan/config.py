"""Reading the JSON configurations of a diffusers-layout folder."""

import dataclasses
import math
import os
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from cinetile import _checks
from cinetile.files import FileError, read_object

Config = TypeVar("Config")

# Far above any published model; what takes time for each of them is bounded before it is built.
_LARGEST_INTEGER = 1 << 24
_MOST = {"num_layers": 512, "num_res_blocks": 64, "num_inference_steps": 10_000}
_LONGEST_LIST = 1024


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds something else.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is missing")
    return read_object(path, "a configuration in diffusers' layout")


def parse_config(
    kind: type[Config],
    document: Mapping[str, Any],
    source: str | os.PathLike[str],
    *,
    fixed: Mapping[str, object] | None = None,
    ignored: Collection[str] = (),
) -> Config:
    """Builds a configuration from a diffusers one; nothing in it is passed over in silence.

    Args:
        kind: a dataclass whose fields have diffusers' names and defaults.
        document: the JSON object; names with a leading underscore are its own bookkeeping.
        source: its path, for errors.
        fixed: fields that may only have this one value, since no other is implemented.
        ignored: fields that do not matter to what is computed here.

    Raises:
        ValueError: a field is unknown, of the wrong type, has a value that is not implemented, or
            is out of range.
    """
    fixed = {} if fixed is None else fixed
    hints = typing.get_type_hints(kind)
    known = {field.name: hints[field.name] for field in dataclasses.fields(cast(Any, kind))}
    values: dict[str, Any] = {}
    for name, value in document.items():
        if name in known:
            values[name] = _converted(value, known[name], f"{source}: {name}")
        elif name in fixed:
            if type(value) is not type(fixed[name]) or value != fixed[name]:
                raise FileError(
                    f"{source}: {name} must be {fixed[name]!r}, got {_checks.shown(value)}, "
                    "which is not implemented"
                )
        elif name not in ignored and not name.startswith("_"):
            raise FileError(
                f"{source}: unknown field {_checks.shown(name)} (value {_checks.shown(value)})"
            )
    try:
        return kind(**values)
    except (TypeError, ValueError, OverflowError) as error:
        raise FileError(f"{source}: {error}") from error


def require_class(document: Mapping[str, Any], path: str | os.PathLike[str], *known: str) -> str:
    """Returns the `_class_name` of a configuration, which must be one of `known`.

    Raises:
        FileError: it is another one, or no text.
    """
    name = document.get("_class_name")
    if not isinstance(name, str) or name not in known:
        raise FileError(
            f"{path}: _class_name must be one of {', '.join(known)}, got {_checks.shown(name)}"
        )
    return name


def _converted(value: Any, hint: Any, label: str) -> Any:
    """Returns a JSON value as the type of a field, or raises FileError: `label` must be ..."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        (hint,) = (option for option in typing.get_args(hint) if option is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list) or len(value) > _LONGEST_LIST:
            raise _misfit(label, f"a list of at most {_LONGEST_LIST} entries", value)
        entry = typing.get_args(hint)[0]
        return tuple(_converted(item, entry, f"{label}[{n}]") for n, item in enumerate(value))
    if hint is float:
        # JSON writes 3.0 as 3 at times.
        if type(value) not in (int, float) or not math.isfinite(value):
            raise _misfit(label, "a number", value)
        return float(value)
    if hint is int:
        most = _MOST.get(label.rpartition(" ")[2], _LARGEST_INTEGER)
        if type(value) is not int:
            raise _misfit(label, "an integer", value)
        if value > most:
            raise _misfit(label, f"at most {most:,}", value)
        return value
    if hint in (str, bool) and type(value) is not hint:
        raise _misfit(label, "text" if hint is str else "true or false", value)
    return value


def _misfit(label: str, wanted: str, value: Any) -> FileError:
    return FileError(f"{label} must be {wanted}, got {_checks.shown(value)}")
