"""Where the small checkpoint lies in an installation that has it."""

import importlib.resources
from pathlib import Path

_PLACE = ("models", "checkpoints", "tiny_wan")


def small_checkpoint() -> Path:
    """The folder of the small checkpoint, in diffusers' layout.

    Raises:
        FileNotFoundError: this installation came without it.
    """
    folder = Path(str(importlib.resources.files("cinetile").joinpath(*_PLACE)))
    if not (folder / "model_index.json").is_file():
        raise FileNotFoundError(
            "this installation came without the small checkpoint: name a model's folder"
        )
    return folder
