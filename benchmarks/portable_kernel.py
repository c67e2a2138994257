"""The portable kernel against its own dense mode and against torch's dense attention.

Prints the table of docs/measurements.md: 21 frames of 400 and of 1,200 tokens, 2 heads of 128,
density 0.35 with the first frame as sink, random normal inputs. All candidates of a row are timed
in turn in one run.

    python -m benchmarks.portable_kernel [--repeats 7] [--json PATH]
"""

import argparse
import json
from pathlib import Path

from cinetile.grid import TokenGrid
from cinetile.lab.bench.ladder import LadderConfig, LadderResult, run_ladder
from cinetile.lab.bench.workload import Workload

GRIDS = (TokenGrid(21, 20, 20), TokenGrid(21, 30, 40))
DTYPES = ("float32", "bfloat16")
HEADER = (
    "| tokens | dtype | tiles | dense ms | naive ms | split ms | aligned ms | torch dense ms "
    "| dense / split | naive / split | split / torch dense |"
)


def measure(grid: TokenGrid, dtype: str, repeats: int) -> LadderResult:
    """One ladder with torch's dense attention beside it."""
    workload = Workload(grid, density=0.35, heads=2, head_dim=128, dtype=dtype)
    return run_ladder(
        LadderConfig(workload, implementation="xla", rivals=("torch-sdpa",), repeats=repeats)
    )


def table_row(result: LadderResult) -> str:
    """One line of the Markdown table."""
    workload = result.workload
    times = {row.mode: row.ms_median for row in result.rows}
    torch_dense = result.rivals[0].ms_median
    cells = [
        f"{workload.grid.num_tokens:,}",
        workload.dtype,
        f"{workload.block_q} x {workload.block_kv}",
        *(f"{times[mode]:,.0f}" for mode in ("dense", "naive", "split", "aligned")),
        f"{torch_dense:,.0f}",
        f"{times['dense'] / times['split']:.2f}",
        f"{times['naive'] / times['split']:.2f}",
        f"{times['split'] / torch_dense:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(HEADER)
    print("|" + "---|" * HEADER.count(" | ") + "---|")
    results = []
    for grid in GRIDS:
        for dtype in DTYPES:
            result = measure(grid, dtype, arguments.repeats)
            print(table_row(result), flush=True)
            results.append(result.to_dict())
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
