"""Time and size of tile plans at 1440p, as a Markdown table for docs/measurements.md.

python -m benchmarks.planning
"""

import time

import cinetile as ct

GRID = ct.TokenGrid.from_video(81, 1440, 2560)
BLOCKS = ((3328, 1536), (1024, 512), (256, 256))
REPEATS = 5


def best_milliseconds(mask: ct.Mask, block_q: int, block_kv: int, mode: str) -> float:
    """Shortest of some timings."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        ct.plan_tiles(mask, block_q, block_kv, mode)  # pyright: ignore[reportArgumentType]
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main() -> None:
    print("| mask | tiles | visited | split | aligned |")
    print("|---|---|---|---|---|")
    for mask in (ct.spatial_mask(GRID, 0.35), ct.temporal_mask(GRID, 0.35)):
        for blocks in BLOCKS:
            visited = ct.plan_tiles(mask, *blocks).stats.tiles_visited
            split, aligned = (best_milliseconds(mask, *blocks, m) for m in ("split", "aligned"))
            print(
                f"| {mask.name} | {blocks[0]} x {blocks[1]} | {visited:,} "
                f"| {split:.1f} ms | {aligned:.1f} ms |"
            )


if __name__ == "__main__":
    main()
