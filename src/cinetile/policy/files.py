"""Policies as JSON or YAML files."""

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from cinetile import _checks, _extras
from cinetile._files import replace_file

_SUFFIXES = (".json", ".yaml", ".yml")


def write(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Writes a policy's settings, whole or not at all; the suffix says in which format."""
    if _suffix(path) == ".json":
        text = json.dumps(content, indent=2) + "\n"
    else:
        text = _yaml().safe_dump(content, sort_keys=False, default_flow_style=None)
    replace_file(path, lambda file: file.write(text.encode()))


def read(path: str | os.PathLike[str]) -> Any:
    """Reads what a file says; whether it is a policy is for the caller to find out.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: it is YAML and PyYAML is not installed.
        ValueError: the suffix is unknown, or the file is no JSON or YAML.
    """
    suffix = _suffix(path)
    text = _checks.existing_file("path", path).read_text(encoding="utf-8")
    if suffix == ".json":
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{os.fspath(path)} is no JSON file: {error}") from error
    yaml = _yaml()
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{os.fspath(path)} is no YAML file: {error}") from error


def _suffix(path: str | os.PathLike[str]) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise ValueError(f"path must end in {', '.join(_SUFFIXES)}, got {os.fspath(path)!r}")
    return suffix


def _yaml() -> ModuleType:
    return _extras.require("yaml", extra="yaml", feature="a policy as YAML", package="PyYAML")
