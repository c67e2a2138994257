"""Reading and writing tile plans as JSON or npz."""

import dataclasses
import json
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cinetile._files import replace_file
from cinetile.grid import TokenGrid, TokenOrder
from cinetile.masks import Mask, RowSegment
from cinetile.masks.edges import Edge

FORMAT = "cinetile.plan"
VERSION = 1
TABLES: tuple[str, ...] = ("row_starts", "tile_kv", "tile_kind")


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
    try:
        if _suffix(path) == ".json":
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            tables = {name: np.asarray(table) for name, table in content["tables"].items()}
        else:
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as archive:
                content = json.loads(str(archive["header"]))
                tables = {name: archive[name] for name in archive.files if name != "header"}
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise ValueError(f"format {content['format']!r}, version {content['version']!r}")
        if set(tables) != set(TABLES):
            raise ValueError(f"it has the tables {sorted(tables)}, not {sorted(TABLES)}")
        return StoredPlan(
            _mask(content["mask"]), content["settings"], tables, content["fingerprint"]
        )
    # NumPy lets the error of whichever layer met the damage through.
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ValueError(f"{os.fspath(path)} holds no valid tile plan: {error}") from error


def _suffix(path: str | os.PathLike[str]) -> str:
    suffix = Path(path).suffix
    if suffix not in (".json", ".npz"):
        raise ValueError(f"path must end in .json or .npz, got {os.fspath(path)!r}")
    return suffix


def _mask(fields: dict[str, Any]) -> Mask:
    segments = tuple(
        RowSegment(**{**segment, "low": Edge(**segment["low"]), "high": Edge(**segment["high"])})
        for segment in fields["segments"]
    )
    return Mask(
        **{
            **fields,
            "grid": TokenGrid(**fields["grid"]),
            "query_order": TokenOrder(**fields["query_order"]),
            "key_order": TokenOrder(**fields["key_order"]),
            "segments": segments,
        }
    )
