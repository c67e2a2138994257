"""Reading the JSON configurations of a diffusers-layout folder."""

import dataclasses
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

Config = TypeVar("Config")


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds something else.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(document).__name__}")
    return document


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
        TypeError: a field has the wrong type.
        ValueError: a field is unknown, has a value that is not implemented, or is out of range.
    """
    fixed = {} if fixed is None else fixed
    known = {field.name: field.type for field in dataclasses.fields(cast(Any, kind))}
    values: dict[str, Any] = {}
    for name, value in document.items():
        if name in known:
            values[name] = _tuples(value)
            if known[name] is float and type(value) is int:  # JSON writes 3.0 as 3 at times
                values[name] = float(value)
        elif name in fixed:
            if value != fixed[name]:
                raise ValueError(
                    f"{source}: {name} must be {fixed[name]!r}, got {value!r}, "
                    "which is not implemented"
                )
        elif name not in ignored and not name.startswith("_"):
            raise ValueError(f"{source}: unknown field {name!r} (value {value!r})")
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{source}: {error}") from error


def _tuples(value: Any) -> Any:
    """Turns the lists of JSON, and those in them, into tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
