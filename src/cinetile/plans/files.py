"""Reading and writing tile plans as JSON or npz."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cinetile import _checks
from cinetile.files import open_npz, read_object, reading, replace_file
from cinetile.files.documents import parse_json
from cinetile.grid import TokenGrid, TokenOrder
from cinetile.masks import Mask, RowSegment
from cinetile.masks.edges import Edge

FORMAT = "cinetile.plan"
VERSION = 1
TABLES: tuple[str, ...] = ("row_starts", "tile_kv", "tile_kind")
EXPECTED = "a tile plan that `TilePlan.save` wrote"

_HEADER_FIELDS = {"format", "version", "mask", "settings", "fingerprint"}
_MAX_JSON_BYTES = 64 << 20
_MAX_HEADER_CHARACTERS = 1 << 20
# Masks of the library have at most three segments.
_MOST_SEGMENTS = 16
_LONGEST_NAME = 100


@dataclass(frozen=True)
class StoredPlan:
    """What a plan file says; `plans.plan` turns it back into a plan."""

    mask: Mask
    settings: dict[str, Any]
    tables: dict[str, np.ndarray]
    fingerprint: str


def write(
    path: str | os.PathLike[str],
    *,
    mask: Mask,
    settings: dict[str, Any],
    tables: dict[str, np.ndarray],
    fingerprint: str,
) -> None:
    """Writes a plan to `path`, by its suffix; an old file stays whole until the new one is."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "mask": dataclasses.asdict(mask),
        "settings": settings,
        "fingerprint": fingerprint,
    }
    if _suffix(path) == ".json":
        listed = {name: table.tolist() for name, table in tables.items()}
        text = json.dumps({**header, "tables": listed}) + "\n"
        if len(text) > _MAX_JSON_BYTES:
            raise ValueError(
                f"path must end in .npz for a plan of {len(tables['tile_kv']):,} tiles: as JSON it "
                f"has {_checks.size(len(text))}, more than {_checks.size(_MAX_JSON_BYTES)}"
            )
        replace_file(path, lambda file: file.write(text.encode()))
    else:
        arrays: dict[str, Any] = {"header": np.array(json.dumps(header)), **tables}
        replace_file(path, lambda file: np.savez_compressed(file, **arrays))


def read(path: str | os.PathLike[str]) -> StoredPlan:
    """Reads what `write` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the suffix is unknown or the content is no plan.
    """
    if _suffix(path) == ".json":
        content = read_object(path, EXPECTED, max_bytes=_MAX_JSON_BYTES)
        with reading(path, EXPECTED):
            listed = content.pop("tables")
            if not isinstance(listed, dict):
                raise ValueError(f"tables must be an object, got {type(listed).__name__}")
            return _stored(content, {name: np.asarray(table) for name, table in listed.items()})
    with open_npz(path, EXPECTED) as archive:
        header = archive.headers["header"]
        if header.shape != () or header.nbytes > 4 * _MAX_HEADER_CHARACTERS:
            raise ValueError("header must be one text")
        content = parse_json(str(archive.read("header")).encode())
        if not isinstance(content, dict):
            raise ValueError(f"header must be an object, got {type(content).__name__}")
        names = [name for name in archive.headers if name != "header"]
        _require_tables(names)
        return _stored(content, {name: archive.read(name) for name in names})


def _stored(content: dict[str, Any], tables: dict[str, np.ndarray]) -> StoredPlan:
    if (content["format"], content["version"]) != (FORMAT, VERSION):
        raise ValueError(
            f"it has format {_checks.shown(content['format'])}, version "
            f"{_checks.shown(content['version'])}"
        )
    if set(content) != _HEADER_FIELDS:
        raise ValueError(
            f"it has the fields {_checks.shown(sorted(content))}, not {sorted(_HEADER_FIELDS)}"
        )
    _require_tables(list(tables))
    for name, table in tables.items():
        if table.ndim != 1 or table.dtype.kind not in "iu":
            raise ValueError(
                f"table {name} must be a list of integers, got shape "
                f"{_checks.shown(table.shape)} and dtype {table.dtype}"
            )
    if not isinstance(content["fingerprint"], str):
        raise ValueError(f"fingerprint must be text, got {_checks.shown(content['fingerprint'])}")
    return StoredPlan(_mask(content["mask"]), content["settings"], tables, content["fingerprint"])


def _require_tables(names: list[str]) -> None:
    if set(names) != set(TABLES):
        raise ValueError(f"it has the tables {_checks.shown(sorted(names))}, not {sorted(TABLES)}")


def _suffix(path: str | os.PathLike[str]) -> str:
    suffix = Path(path).suffix
    if suffix not in (".json", ".npz"):
        raise ValueError(f"path must end in .json or .npz, got {os.fspath(path)!r}")
    return suffix


def _mask(fields: dict[str, Any]) -> Mask:
    if not isinstance(fields["name"], str) or len(fields["name"]) > _LONGEST_NAME:
        raise ValueError(f"name of the mask must be text, got {_checks.shown(fields['name'])}")
    if not isinstance(fields["segments"], list) or len(fields["segments"]) > _MOST_SEGMENTS:
        raise ValueError(f"segments must be a list of at most {_MOST_SEGMENTS}")
    segments = tuple(
        RowSegment(**{**segment, "low": Edge(**segment["low"]), "high": Edge(**segment["high"])})
        for segment in fields["segments"]
    )
    grid = TokenGrid(**fields["grid"])
    if fields["width"] is not None:
        _checks.integer("width", fields["width"], minimum=0, maximum=grid.num_tokens)
    return Mask(
        **{
            **fields,
            "grid": grid,
            "query_order": TokenOrder(**fields["query_order"]),
            "key_order": TokenOrder(**fields["key_order"]),
            "segments": segments,
        }
    )
