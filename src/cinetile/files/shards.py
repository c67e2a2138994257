"""Where the pieces of a sharded file may lie: beside their index, and nowhere else."""

from pathlib import Path
from typing import Any

from cinetile import _checks


def shard_path(folder: Path, name: Any) -> Path:
    """The path of a shard that an index names.

    A link may lead to another file of the folder or, in the cache of the Hugging Face hub, whose
    snapshots consist of links, to the blobs of the same repository.

    Args:
        folder: the folder of the index.
        name: what the index says.

    Raises:
        ValueError: `name` is no plain file name, or a link that leads elsewhere.
    """
    plain = isinstance(name, str) and name not in ("", ".", "..") and len(name) <= 255
    if not plain or any(character in name for character in "/\\\0:"):
        raise ValueError(
            f"a shard must be the name of a file in the same folder, got {_checks.shown(name)}"
        )
    path = folder / name
    target, home = path.resolve(), folder.resolve()
    if target.is_relative_to(home):
        return path
    repository = next((parent for parent in home.parents if parent.name == "snapshots"), None)
    if repository is None or not target.is_relative_to(repository.parent / "blobs"):
        raise ValueError(f"shard {_checks.shown(name)} is a link to a file outside the folder")
    return path
