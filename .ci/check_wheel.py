"""Checks an installed wheel: the native kernel is in it, can run, and agrees with float64.

Run with the environment's own Python: `python .ci/check_wheel.py`. Exits with 1 where something
is missing. Where the C++ does not compile, a wheel is built without the native kernel; no release
may contain such a wheel.
"""

import json
import subprocess
import sys

import cinetile as ct

GRID = "9x20x20"
WORST_ERROR = 2e-2  # relative, in bfloat16


def main() -> None:
    """Runs the checks, and prints what was found."""
    status = {row.name: row for row in ct.implementations()}["cpu"]
    if not status.available:
        sys.exit(f"the native kernel cannot run: {status.reason}")
    ladder = ("ladder", "--grid", GRID, "--implementation", "cpu", "--json", "-")
    program = "import cinetile.cli; cinetile.cli.run()"
    done = subprocess.run(
        [sys.executable, "-c", program, *ladder], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"cinetile {' '.join(ladder)} failed")
    for row in json.loads(done.stdout)["rows"]:
        mode, error = row["mode"], row["rel_error"]
        print(f"{mode}: relative error {error:.1e}")
        if not error <= WORST_ERROR:
            sys.exit(f"{mode} differs from float64 by more than {WORST_ERROR}")
    print(f"cpu ({status.variant}) runs")


if __name__ == "__main__":
    main()
