"""A small picture of a tile plan for the terminal."""

import sys

import numpy as np
from jaxtyping import Float, UInt8

SKIPPED, FULL, MASKED = 0, 1, 2

# Skipped, few tiles, masked, full.
_BLOCKS, _ASCII = "·░▒█", ".:x#"

MAX_TEXT_ROWS = 32
MAX_TEXT_COLUMNS = 64


def downsample(
    tile_map: UInt8[np.ndarray, "q_tiles kv_tiles"], rows: int, columns: int
) -> tuple[Float[np.ndarray, "rows columns"], Float[np.ndarray, "rows columns"]]:
    """Fractions of visited and of masked tiles in each cell of a coarser map.

    Args:
        tile_map: state of each tile.
        rows: rows of the coarse map; no more than there are are used.
        columns: columns of the coarse map.
    """
    rows, columns = min(rows, tile_map.shape[0]), min(columns, tile_map.shape[1])
    row_starts = np.arange(rows) * tile_map.shape[0] // rows
    column_starts = np.arange(columns) * tile_map.shape[1] // columns

    def cell_sums(values: np.ndarray) -> np.ndarray:
        by_row = np.add.reduceat(values, row_starts, axis=0, dtype=np.int64)
        return np.add.reduceat(by_row, column_starts, axis=1)

    area = np.outer(
        np.diff(row_starts, append=tile_map.shape[0]),
        np.diff(column_starts, append=tile_map.shape[1]),
    )
    return cell_sums(tile_map != SKIPPED) / area, cell_sums(tile_map == MASKED) / area


def text_picture(
    tile_map: UInt8[np.ndarray, "q_tiles kv_tiles"],
    *,
    max_rows: int = MAX_TEXT_ROWS,
    max_columns: int = MAX_TEXT_COLUMNS,
) -> str:
    """Draws the tiles with one character each, or each group of tiles where there are many.

    Full tiles are solid, masked ones hatched, skipped ones a dot; ASCII characters where stdout
    cannot show blocks.
    """
    skipped, few, hatched, full = _BLOCKS if _stdout_can_show(_BLOCKS) else _ASCII
    visited, masked = downsample(tile_map, max_rows, max_columns)
    characters = np.full(visited.shape, skipped)
    characters[visited > 0] = few
    characters[visited >= 0.5] = full
    characters[(masked > 0) & (masked >= visited / 2)] = hatched
    rows = ["".join(row) for row in characters]
    legend = f"{full} full  {hatched} masked  {few} few tiles  {skipped} skipped"
    return "\n".join([*rows, f"queries down, keys across: {legend}"])


def _stdout_can_show(characters: str) -> bool:
    encoding = getattr(sys.stdout, "encoding", None)  # None in memory, and without a stdout
    try:
        characters.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
