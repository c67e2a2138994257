"""What is to be computed: the grid, the mask, the arrays' shape and the tiles."""

from dataclasses import dataclass, fields, replace
from typing import Any

from cinetile import _checks
from cinetile.grid import TokenGrid
from cinetile.kernels.base import ImplementationChoice
from cinetile.kernels.registry import select_implementation
from cinetile.layer.plans import layer_blocks
from cinetile.masks import Mask
from cinetile.masks.widths import WIDTH_MULTIPLE
from cinetile.patterns import Pattern, as_pattern, canonical_pattern, name_of
from cinetile.plans import MODES, ROUNDINGS, TilePlan, plan_tiles

DTYPES: tuple[str, ...] = ("bfloat16", "float32", "float16")


@dataclass(frozen=True)
class Workload:
    """One attention call and how it is tiled; checked when it is built.

    Attributes:
        grid: the tokens.
        pattern: a name of `cinetile.patterns.PATTERNS`, or a `Pattern`.
        density: fraction of pairs that the mask's band keeps. Either this or `width`.
        width: the band's width in tokens.
        sink_frames: first frames that every query keeps; 0 or 1 for the svg patterns.
        batch: rows of the batch.
        heads: attention heads.
        head_dim: features of a head.
        dtype: "bfloat16", "float32" or "float16".
        block_q: queries in a tile; None until `with_block_sizes` chooses.
        block_kv: keys in a tile; None as for `block_q`.
        rounding: how aligned plans round boundary tiles.
    """

    grid: TokenGrid
    pattern: str | Pattern = "spatial"
    density: float | None = None
    width: int | None = None
    sink_frames: int = 1
    batch: int = 1
    heads: int = 1
    head_dim: int = 128
    dtype: str = "bfloat16"
    block_q: int | None = None
    block_kv: int | None = None
    rounding: str = "balanced"

    def __post_init__(self) -> None:
        if not isinstance(self.grid, TokenGrid):
            raise TypeError(f"grid must be a TokenGrid, got {type(self.grid).__name__}")
        object.__setattr__(self, "pattern", canonical_pattern("pattern", self.pattern))
        _checks.choice("dtype", self.dtype, DTYPES)
        _checks.choice("rounding", self.rounding, ROUNDINGS)
        for name in ("batch", "heads", "head_dim"):
            _checks.integer(name, getattr(self, name), minimum=1)
        for name in ("block_q", "block_kv"):
            if getattr(self, name) is not None:
                _checks.integer(name, getattr(self, name), minimum=1)
        self.mask()

    @property
    def pattern_name(self) -> str:
        """Name of the pattern, for tables and files."""
        return name_of(self.pattern)

    def mask(self) -> Mask:
        """The mask that `pattern`, `density` or `width`, and `sink_frames` describe."""
        return as_pattern("pattern", self.pattern).mask(
            self.grid, self.density, self.width, self.sink_frames, multiple=WIDTH_MULTIPLE
        )

    def with_blocks(self, implementation: ImplementationChoice = None) -> "Workload":
        """Fills in the tile sizes that a layer would use where none were asked for.

        Args:
            implementation: as for `attention`.

        Raises:
            ValueError: the name is unknown.
            NotImplementedError: the implementation cannot run on this machine.
        """
        chosen = select_implementation(implementation, None)
        return self.with_block_sizes(*layer_blocks(chosen, self.grid, self.dtype))

    def with_block_sizes(self, block_q: int, block_kv: int) -> "Workload":
        """Fills in these tile sizes where none were asked for."""
        return replace(self, block_q=self.block_q or block_q, block_kv=self.block_kv or block_kv)

    def plan(self, mode: str) -> TilePlan:
        """The tile plan of one mode.

        Raises:
            ValueError: the mode is unknown, or a tile size is not chosen yet.
        """
        if self.block_q is None or self.block_kv is None:
            raise ValueError("block_q and block_kv must be set; with_blocks chooses them")
        return plan_tiles(
            self.mask(),
            self.block_q,
            self.block_kv,
            _checks.choice("mode", mode, MODES),  # pyright: ignore[reportArgumentType]
            rounding=self.rounding if mode == "aligned" else None,  # pyright: ignore[reportArgumentType]
        )

    def to_dict(self) -> dict[str, Any]:
        mask = self.mask()
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "pattern": self.pattern_name,
            "grid": [self.grid.frames, self.grid.height, self.grid.width],
            "text_tokens": self.grid.text_tokens,
            "num_tokens": self.grid.num_tokens,
            "width": mask.width,
            "mask_density": mask.density,
        }
