"""Ten minutes on a TPU that settle what static analysis cannot: numerics, then the ladder.

    python -m benchmarks.tpu_session [--json tpu-session.json] [--video 81x720x1280] [--heads 10]

Checks outputs on the device against float64, then measures dense, naive, split and aligned
attention for spatial and temporal heads, with the fixed bound and with the online softmax, by one
kernel and by two. Writes one JSON in the format of `cinetile ladder --json`; each row also names
its pattern and softmax, and "numerics" holds the checks. Exits with 1 where a check failed.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cinetile as ct
from cinetile.lab.bench.ladder import LadderConfig, measure_ladder
from cinetile.lab.bench.machine import describe_machine
from cinetile.lab.bench.workload import Workload
from cinetile.lab.inputs import random_inputs

TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
# Queries so much longer put every head over the guard's bound.
ONLINE_FACTOR = 16


@dataclass(frozen=True)
class NumericsCheck:
    """One comparison with float64 on the device.

    Attributes:
        name: what was run.
        max_abs_error: of the output.
        lse_error: of the log-sum-exp.
        passed: whether both are within the dtype's tolerance.
    """

    name: str
    max_abs_error: float
    lse_error: float
    passed: bool


def check_numerics(implementation: str) -> list[NumericsCheck]:
    """Small calls of every mode, head size and dtype, with heads on both sides of the guard."""
    grid = ct.TokenGrid(9, 20, 31)
    plans = (
        ct.plan_tiles(ct.spatial_mask(grid, 0.35), 768, 512),
        ct.plan_tiles(ct.temporal_mask(grid, 0.35), 768, 512),
        ct.plan_tiles(ct.spatial_mask(grid, 0.35), 768, 512, "naive"),
        ct.plan_tiles(ct.temporal_mask(grid, 0.35), 768, 512, "aligned"),
        ct.plan_tiles(ct.dense_mask(grid), 1536, 1024),
    )
    routes = np.array([[0, 1, 2, 3, 4, 0]])
    rows = np.unique(np.linspace(0, grid.num_tokens - 1, 200, dtype=np.int64))
    checks = []
    for dtype, tolerance in TOLERANCES.items():
        for head_dim in (64, 128, 256):
            generator = np.random.default_rng(head_dim)
            shape = 1, grid.num_tokens, routes.size, head_dim
            query, key, value = (
                jnp.asarray(generator.standard_normal(shape, np.float32), dtype) for _ in range(3)
            )
            query = query.at[:, :, -1].multiply(ONLINE_FACTOR)
            output, lse = ct.attention(
                query,
                key,
                value,
                plans,
                routes=routes,
                implementation=implementation,
                return_lse=True,
            )
            for head, route in enumerate(routes[0]):
                one_query, one_key, one_value = (
                    np.asarray(array[0, :, head : head + 1]) for array in (query, key, value)
                )
                expected, expected_lse = ct.reference_rows(
                    one_query, one_key, one_value, plans[route], rows
                )
                found = np.asarray(output[0, rows, head], np.float64)
                error = float(np.abs(found - expected[:, 0]).max())
                lse_found = np.asarray(lse[0, rows, head], np.float64)
                lse_error = float(np.abs(lse_found - expected_lse[:, 0]).max())
                limit = tolerance * (ONLINE_FACTOR if head == routes.size - 1 else 1)
                name = f"{implementation} {dtype} head_dim {head_dim} {plans[route]!r}"
                checks.append(
                    NumericsCheck(name, error, lse_error, bool(max(error, lse_error) <= limit))
                )
    return checks


def measure(workload: Workload, implementation: str, repeats: int) -> list[dict[str, Any]]:
    """Rows of the ladder for one kernel, with the fixed bound and then online."""
    tokens, heads, head_dim = workload.grid.num_tokens, workload.heads, workload.head_dim
    config = LadderConfig(workload, implementation=implementation, repeats=repeats)
    inputs = random_inputs(tokens, heads, head_dim, 0)
    online = replace(inputs, query=inputs.query * ONLINE_FACTOR)
    rows = []
    for softmax, arrays in (("fixed", inputs), ("online", online)):
        result = measure_ladder(config, arrays).to_dict()
        for row in result["rows"]:
            rows.append(row | {"pattern": workload.pattern_name, "softmax": softmax})
            print(
                f"{implementation:24} {workload.pattern_name:9} {softmax:7} {row['mode']:8} "
                f"{row['ms_median']:8.2f} ms, relative error {row['rel_error']:.1e}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("tpu-session.json"))
    parser.add_argument("--video", default="81x720x1280")
    parser.add_argument("--heads", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    if jax.default_backend() != "tpu":
        sys.exit(f"this session needs a TPU; jax runs on {jax.default_backend()} here")
    implementations = ("pallas_tpu", "pallas_tpu_two_kernels")
    checks = [check for name in implementations for check in check_numerics(name)]
    for check in checks:
        print("ok    " if check.passed else "FAILED", check.name, f"{check.max_abs_error:.1e}")

    grid = ct.TokenGrid.from_video(*map(int, arguments.video.split("x")))
    workload = Workload(grid, density=0.35, heads=arguments.heads).with_blocks("pallas_tpu")
    document = {
        "cinetile": ct.__version__,
        "machine": describe_machine().to_dict(),
        "workload": workload.to_dict(),
        "rows": [
            row
            for name in implementations
            for pattern in ("spatial", "temporal")
            for row in measure(replace(workload, pattern=pattern), name, arguments.repeats)
        ],
        "rivals": [],
        "numerics": [asdict(check) for check in checks],
    }
    arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    print(f"wrote {arguments.json}")
    if not all(check.passed for check in checks):
        sys.exit(1)


if __name__ == "__main__":
    main()
