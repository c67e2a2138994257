"""Optional packages: importing them, and what to install where they are missing."""

import importlib
from typing import Any

# Extras with PyTorch: pip would take it with 3 GB of CUDA libraries, which nothing here needs.
_WITH_PYTORCH = frozenset({"diffusers", "parity", "rivals", "torchax", "train"})
_CPU_BUILD = "--extra-index-url https://download.pytorch.org/whl/cpu"


def install_hint(extra: str) -> str:
    """The command that installs an optional extra of this package, as part of a message.

    cinetile is on no package index, so the command runs in a clone. Extras with PyTorch take its
    CPU build.

    Args:
        extra: name of the extra in `pyproject.toml`.
    """
    cpu_build = f" {_CPU_BUILD}" if extra in _WITH_PYTORCH else ""
    return (
        f'run `pip install --constraint constraints.txt{cpu_build} ".[{extra}]"` '
        "in a clone of cinetile"
    )


def require(module: str, *, extra: str, feature: str, package: str | None = None) -> Any:
    """Imports an optional module.

    Args:
        module: what to import.
        extra: the extra that installs it.
        feature: what needs it, as the start of a sentence: "writing a video".
        package: the name under which users know it; by default the module's.

    Returns:
        The module.

    Raises:
        ImportError: the module cannot be imported. The message names the feature, the package and
            the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        known = package or module.partition(".")[0]
        missing = isinstance(error, ModuleNotFoundError) and error.name in (None, *_parents(module))
        reason = "" if missing else f" (importing it failed: {error})"
        raise ImportError(f"{feature} needs {known}{reason}: {install_hint(extra)}") from error


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]
