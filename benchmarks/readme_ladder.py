"""Writes the ladder's table into the README: `python -m benchmarks.readme_ladder`.

The table is that of `docs/measured/ladder.json`, which `cinetile ladder --json` wrote;
`docs/images/ladder.png` is the picture of the same run.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "docs/measured/ladder.json"
README = ROOT / "README.md"
START, END = "<!-- ladder: python -m benchmarks.readme_ladder -->\n", "<!-- end of ladder -->\n"
COLUMNS = (
    "mode",
    "time",
    "range",
    "speed-up",
    "pairs kept",
    "tiles visited",
    "tiles masked",
    "error of the kernel",
)


def table(result: dict[str, Any]) -> str:
    """The README's text for a saved ladder: what was measured, on what, and the rows."""
    machine, workload, repeats = result["machine"], result["workload"], result["repeats"]
    first = result["rows"][0]
    features = ", ".join(machine["features"]).upper()
    lines = [
        f"Median and range of {repeats} interleaved rounds on {machine['cpu']} with",
        f"{machine['cores']} cores ({features}), the path `{first['path']}` of the "
        f"`{first['implementation']}` kernel, jax {machine['jax']}:",
        f"{workload['heads']} head of {workload['head_dim']}, {workload['dtype']}, tiles of "
        f"{workload['block_q']} queries x {workload['block_kv']} keys.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---" * len(COLUMNS) + "|",
    ]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in result["rows"]]
    return "\n".join([*lines, "", *_changes(result)]) + "\n"


def _changes(result: dict[str, Any]) -> list[str]:
    return [
        f"- On {errors['input']}, the mask changes {errors['exact_vs_dense']:.1%} of dense "
        f"attention's output, and whole tiles a further {errors['aligned_vs_exact']:.1%}."
        for errors in result["mask_errors"]
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    speedup = row["speedup_vs_dense"]
    return [
        row["mode"],
        f"{row['ms_median']:,.0f} ms",
        f"{row['ms_min']:,.0f} to {row['ms_max']:,.0f}",
        "not stated" if speedup is None else f"{speedup:.2f}x",
        f"{row['kept_fraction']:.2%}",
        f"{row['tiles_visited']:,}",
        f"{row['tiles_masked']:,}",
        f"{row['max_abs_error']:.1e}",
    ]


def with_table(readme: str, result: dict[str, Any]) -> str:
    """The README's text with the table of `result` between its two marks."""
    before, rest = readme.split(START)
    _, after = rest.split(END)
    return before + START + table(result) + END + after


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(), json.loads(RESULT.read_text())))
