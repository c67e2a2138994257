"""A small picture of a tile plan for the terminal."""

import numpy as np
from jaxtyping import Float, UInt8

SKIPPED, FULL, MASKED = 0, 1, 2

MAX_TEXT_ROWS = 32
MAX_TEXT_COLUMNS = 64


def downsample(
    tile_map: UInt8[np.ndarray, "q_tiles kv_tiles"], rows: int, columns: int
) -> tuple[Float[np.ndarray, "rows columns"], Float[np.ndarray, "rows columns"]]:
    """Fractions of visited and of masked tiles in each cell of a coarser map.

    Args:
        tile_map: state of each tile.
        rows: rows of the coarse map; no more than there are are used.
        columns: columns of the coarse map, likewise.
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

    Full tiles are solid, masked ones hatched, skipped ones a dot.
    """
    visited, masked = downsample(tile_map, max_rows, max_columns)
    characters = np.full(visited.shape, "·")
    characters[visited > 0] = "░"
    characters[visited >= 0.5] = "█"
    characters[(masked > 0) & (masked >= visited / 2)] = "▒"
    rows = ["".join(row) for row in characters]
    return "\n".join([*rows, "queries down, keys across: █ full  ▒ masked  ░ few tiles  · skipped"])
