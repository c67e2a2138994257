"""`Pattern`: one kind of sparsity that heads can be routed to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cinetile import _checks
from cinetile.grid import TokenGrid
from cinetile.masks import Mask

DENSE = "dense"
"""The name of dense attention in tables and pictures; no pattern may take it."""


@runtime_checkable
class BuildMask(Protocol):
    """Builds a pattern's mask on a grid; `ct.spatial_mask` is an example."""

    def __call__(
        self,
        grid: TokenGrid,
        density: float | None = None,
        width: int | None = None,
        sink_frames: int = 1,
        *,
        multiple: int = 128,
    ) -> Mask:
        """Builds the mask from either `density` or `width`; the other is None."""
        ...


@dataclass(frozen=True)
class Pattern:
    """One kind of sparsity: the masks that it stands for, and its name in files and pictures.

    A policy's `patterns` may hold any such object. `PATTERNS` holds those that files and the
    command line know by name.

    Attributes:
        name: unique name; not "dense", without commas and spaces.
        build: returns the mask on a grid. It takes the arguments of `ct.spatial_mask`:
            `(grid, density, width, sink_frames, *, multiple)`, where one of density and width
            is None and `multiple` is what a width that follows from a density is rounded up to.
        probe: returns the mask that stands for the pattern where a policy's `probe` is "svg";
            None if the pattern has none.
        max_sink_frames: largest `sink_frames` that the pattern supports; None for no limit.

    Raises:
        TypeError: `name` is no string, or `build` or `probe` cannot be called.
        ValueError: the name is empty, reserved, or holds a comma or a space.
    """

    name: str
    build: BuildMask
    probe: Callable[[TokenGrid], Mask] | None = None
    max_sink_frames: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a string, got {self.name!r}")
        if not self.name or self.name == DENSE or any(mark in self.name for mark in ", "):
            raise ValueError(
                f"name must be a word without commas and spaces other than {DENSE!r}, "
                f"got {self.name!r}"
            )
        for attribute in ("build", "probe"):
            function = getattr(self, attribute)
            if not callable(function) and not (attribute == "probe" and function is None):
                raise TypeError(f"{attribute} must be a function, got {function!r}")

    def mask(
        self,
        grid: TokenGrid,
        density: float | None = None,
        width: int | None = None,
        sink_frames: int = 1,
        *,
        multiple: int,
    ) -> Mask:
        """Returns the mask on a grid, as `build` makes it, with the sink checked.

        Raises:
            ValueError: `sink_frames` is more than the pattern supports, or `build` refuses an
                argument.
        """
        _checks.integer("sink_frames", sink_frames, minimum=0, maximum=self.max_sink_frames)
        return self.build(grid, density, width, sink_frames, multiple=multiple)
