"""Policies as JSON or YAML files."""

import json
import os
from pathlib import Path
from typing import Any

from cinetile import _checks
from cinetile.files import read_json, read_yaml, replace_file
from cinetile.files.documents import MAX_YAML_BYTES, require_yaml

EXPECTED = "a policy that `SparsityPolicy.to_file` wrote"
_SUFFIXES = (".json", ".yaml", ".yml")


def write(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Writes a policy's settings, whole or not at all; the suffix says in which format."""
    if _suffix(path) == ".json":
        text = json.dumps(content, indent=2) + "\n"
    else:
        text = require_yaml().safe_dump(content, sort_keys=False, default_flow_style=None)
    replace_file(path, lambda file: file.write(text.encode()))


def read(path: str | os.PathLike[str]) -> Any:
    """Reads what a file says; whether it is a policy is for the caller to find out.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: it is YAML and PyYAML is not installed.
        ValueError: the suffix is unknown, or the file is no JSON or YAML.
    """
    if _suffix(path) == ".json":
        return read_json(path, EXPECTED, max_bytes=MAX_YAML_BYTES)
    return read_yaml(path, EXPECTED)


def _suffix(path: str | os.PathLike[str]) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise ValueError(
            f"path must end in {', '.join(_SUFFIXES)}, got {_checks.shown(os.fspath(path))}"
        )
    return suffix
