"""JSON and YAML documents: plain data within limits, no name twice, nothing that expands."""

import json
import math
import os
from types import ModuleType
from typing import Any

from cinetile import _checks, _extras
from cinetile.files.faults import reading

MAX_DEPTH = 32
MAX_BYTES = 8 << 20
# PyYAML takes some 10 microseconds per byte.
MAX_YAML_BYTES = 64 << 10
_LONGEST_NAME = 512
_LONGEST_INTEGER = 20
_LONGEST_YAML_SCALAR = 4096


def read_json(
    path: str | os.PathLike[str], expected: str = "a JSON file", *, max_bytes: int = MAX_BYTES
) -> Any:
    """Reads a JSON document.

    Args:
        path: the file.
        expected: what the file should be, for errors.
        max_bytes: size above which the file is refused.

    Raises:
        FileNotFoundError: there is no such file.
        FileError: it is no JSON; is too large or nested too deeply; has a name twice, a number
            that is not finite or has more than 20 digits, or text that is not valid Unicode.
    """
    with reading(path, expected):
        return parse_json(_read_bytes(path, max_bytes))


def read_object(
    path: str | os.PathLike[str], expected: str = "a JSON object", *, max_bytes: int = MAX_BYTES
) -> dict[str, Any]:
    """Reads a JSON document that is an object, as `read_json` does."""
    with reading(path, expected):
        document = read_json(path, expected, max_bytes=max_bytes)
        if not isinstance(document, dict):
            raise ValueError(f"it must hold a JSON object, got {type(document).__name__}")
        return document


def read_yaml(path: str | os.PathLike[str], expected: str = "a YAML file") -> Any:
    """Reads a YAML document of plain data, without anchors and aliases.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: PyYAML is not installed.
        FileError: as for `read_json`; or it has an anchor, an alias, or a value that JSON
            cannot hold.
    """
    yaml = require_yaml()
    with reading(path, expected):
        text = _read_bytes(path, MAX_YAML_BYTES).decode("utf-8")
        try:
            document = yaml.load(text, _plain_loader(yaml))
        except yaml.YAMLError as error:
            raise ValueError(f"it is no YAML file: {error}") from error
        _require_plain(document)
        return document


def require_yaml() -> ModuleType:
    """Returns PyYAML.

    Raises:
        ImportError: it is not installed.
    """
    return _extras.require("yaml", extra="yaml", feature="a policy as YAML", package="PyYAML")


def parse_json(content: bytes) -> Any:
    """Parses JSON under the rules of `read_json`; errors do not name a file.

    Raises:
        ValueError: see `read_json`.
        RecursionError: it is nested far too deeply.
    """
    try:
        document = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
            parse_int=_parse_integer,
            parse_float=_parse_number,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON file: {error}") from error
    _require_plain(document)
    return document


def _read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    with _checks.existing_file("path", path).open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"it has the name {_checks.shown(twice)} twice")
    return document


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it has the number {name}, which is not finite")


def _parse_integer(text: str) -> int:
    if len(text) > _LONGEST_INTEGER:
        raise ValueError(f"it has an integer of {len(text):,} characters")
    return int(text)


def _parse_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"it has the number {_checks.shown(text)}, which is not finite")
    return number


def _require_plain(document: Any) -> None:
    """Raises ValueError if a document is too deep or holds what a program should not meet."""
    pending = [(document, 1)]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, dict):
            for name in value:
                _require_name(name)
            children = value.values()
        elif isinstance(value, list):
            children = value
        else:
            _require_plain_scalar(value)
            continue
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        # Most of a long list is integers; they need no second look unless they are huge.
        pending += [(child, depth + 1) for child in children if not _is_small_integer(child)]


def _is_small_integer(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 64


def _require_name(name: Any) -> None:
    if not isinstance(name, str):
        raise ValueError(f"names must be text, got {_checks.shown(name)}")
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"it has a name of {len(name):,} characters")
    _require_unicode(name)


def _require_plain_scalar(value: Any) -> None:
    if isinstance(value, str):
        _require_unicode(value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"it has the number {value}, which is not finite")
    elif isinstance(value, int):
        if not isinstance(value, bool) and not _is_small_integer(value):
            raise ValueError(f"it has {_checks.shown(value)}, which is too large")
    elif value is not None:
        raise ValueError(f"values must be plain data, got {type(value).__name__}")


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{_checks.shown(text)} is not valid Unicode") from error


def _plain_loader(yaml: ModuleType) -> Any:
    """A loader class that refuses, before it builds anything, what could expand or repeat."""

    class PlainLoader(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                raise ValueError(f"anchors and aliases are not taken (line {_line(event)})")
            if len(getattr(event, "value", None) or "") > _LONGEST_YAML_SCALAR:
                raise ValueError(f"it has a value that is too long (line {_line(event)})")
            if self.depth > MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise ValueError(f"it has the name {_checks.shown(twice)} twice")
            return super().construct_mapping(node, deep)

    return PlainLoader


def _line(event: Any) -> int:
    return event.start_mark.line + 1
