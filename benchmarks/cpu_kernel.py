"""The native CPU kernel against its own dense mode, PyTorch and the other code paths.

Prints the tables of docs/measurements.md. The part "rivals" takes 21 frames of 400 (8,400 tokens, 2
heads), 1,200 (2 heads) and 3,600 (1 head) tokens, head size 128, density 0.35 with the first frame
as sink, random normal inputs; "peak" measures what the processor's multiply-adds reach, and how
many instructions of each kind a core begins in a cycle; "paths" runs every code path that this
processor has on 8,400 tokens; "memory" measures what 16 heads of 75,600 tokens need. All candidates
of a row are timed in turn in one run.

    python -m benchmarks.cpu_kernel [peak] [rivals] [paths] [memory] [--calls 0 4 ...]
        [--repeats 5] [--json PATH]
"""

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cinetile as ct
from cinetile.kernels.cpu.direct import DirectAttention, Operand
from cinetile.kernels.cpu.implementation import PATH_VARIABLE
from cinetile.kernels.cpu.native import load_library
from cinetile.lab.bench.ladder import LadderConfig, LadderResult, run_ladder
from cinetile.lab.bench.workload import Workload

PARTS = ("peak", "rivals", "paths", "memory")
THROUGHPUT = Path(__file__).parents[1] / "native/benchmarks/instruction_throughput.cpp"
MODES = ("dense", "naive", "split", "aligned")
RIVAL_CALLS = (
    (ct.TokenGrid(21, 20, 20), 2, "bfloat16", "spatial"),
    (ct.TokenGrid(21, 30, 40), 2, "bfloat16", "spatial"),
    (ct.TokenGrid(21, 30, 40), 2, "bfloat16", "temporal"),
    (ct.TokenGrid(21, 45, 80), 1, "bfloat16", "spatial"),
    (ct.TokenGrid(21, 20, 20), 2, "float32", "spatial"),
    (ct.TokenGrid(21, 30, 40), 2, "float32", "spatial"),
    (ct.TokenGrid(21, 45, 80), 1, "float32", "spatial"),
)
RIVAL_COLUMNS = (
    "tokens",
    "dtype",
    "mask",
    *(f"{mode} ms" for mode in MODES),
    "ns a pair and thread, dense",
    "SDPA ms",
    "Flex ms",
    "SDPA / dense",
    "dense / split",
    "SDPA / split",
    "Flex / split",
    "SDPA / aligned",
    "error split",
    "error SDPA",
)
PATH_COLUMNS = ("path", "dtype", *(f"{mode} ms" for mode in MODES), "dense / split")
MEMORY_HEADS = 16


def measure(
    grid: ct.TokenGrid, heads: int, dtype: str, pattern: str, rivals: tuple[str, ...], repeats: int
) -> LadderResult:
    """One ladder of the native kernel."""
    workload = Workload(grid, pattern, density=0.35, heads=heads, head_dim=128, dtype=dtype)
    return run_ladder(LadderConfig(workload, implementation="cpu", rivals=rivals, repeats=repeats))


def print_row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def print_header(columns: tuple[str, ...]) -> None:
    print_row(*columns)
    print("|" + "---|" * len(columns))


def measure_peak() -> list[dict[str, Any]]:
    """What the processor's instructions reach; needs a C++ compiler."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "instruction_throughput"
        subprocess.run(
            ["c++", "-std=c++17", "-O2", "-pthread", THROUGHPUT, "-o", program], check=True
        )
        run = subprocess.run([program], check=True, capture_output=True, text=True)
    print(run.stdout, end="")
    rates = {threads: measure_rate(threads) for threads in (1, os.cpu_count() or 1)}
    for threads, rate in rates.items():
        print(f"{'dense float32 attention':24} {rate:6.1f} GFLOP/s on {threads} threads")
    return [{"lines": run.stdout.splitlines(), "attention": rates}]


def measure_rate(num_threads: int) -> float:
    """GFLOP/s of the two products of dense float32 attention: 8,400 tokens, a head a thread."""
    grid = ct.TokenGrid(21, 20, 20)
    plan = ct.plan_tiles(ct.dense_mask(grid), *ct.default_blocks(grid.num_tokens, "float32", "cpu"))
    shape = 1, grid.num_tokens, num_threads, 128
    arrays = [np.random.default_rng(i).standard_normal(shape, np.float32) for i in range(4)]
    strides = grid.num_tokens * num_threads * 128, num_threads * 128, 128
    operands = [Operand(array.ctypes.data, strides) for array in arrays]
    attend = DirectAttention((plan,))
    routes = np.zeros((1, num_threads), np.int32)
    options = {"dtype": "float32", "head_dim": 128, "routes": routes, "scale": 128**-0.5}
    times = []
    for _ in range(6):
        start = time.perf_counter()
        attend(*operands, **options, num_threads=num_threads)
        times.append(time.perf_counter() - start)
    return 4 * 128 * grid.num_tokens**2 * num_threads / min(times) / 1e9


def measure_rivals(repeats: int, calls: tuple[int, ...]) -> list[dict[str, Any]]:
    """The native kernel beside PyTorch, on some of `RIVAL_CALLS`."""
    print_header(RIVAL_COLUMNS)
    results = []
    for grid, heads, dtype, pattern in (RIVAL_CALLS[call] for call in calls):
        flex = pattern == "spatial"  # temporal masks move its tokens
        rivals = ("torch-sdpa", "torch-flex") if flex else ("torch-sdpa",)
        result = measure(grid, heads, dtype, pattern, rivals, repeats)
        times = {row.mode: row.ms_median for row in result.rows}
        rows = {row.mode: row for row in result.rows}
        rival_times = {rival.name: rival.ms_median for rival in result.rivals}
        sdpa = rival_times["torch-sdpa"]
        pairs = heads * grid.num_tokens**2
        print_row(
            f"{grid.num_tokens:,}",
            dtype,
            pattern,
            *(f"{times[mode]:,.0f}" for mode in MODES),
            f"{times['dense'] * 1e6 * result.machine.threads / pairs:.2f}",
            f"{sdpa:,.0f}",
            f"{rival_times['torch-flex']:,.0f}" if flex else "-",
            f"{sdpa / times['dense']:.2f}",
            f"{times['dense'] / times['split']:.2f}",
            f"{sdpa / times['split']:.2f}",
            f"{rival_times['torch-flex'] / times['split']:.2f}" if flex else "-",
            f"{sdpa / times['aligned']:.2f}",
            f"{rows['split'].rel_error:.1e}",
            f"{result.rivals[0].rel_error:.1e}",
        )
        results.append(result.to_dict())
    return results


def measure_paths(repeats: int) -> list[dict[str, Any]]:
    """Every code path that this processor has, on 8,400 tokens."""
    print_header(PATH_COLUMNS)
    library = load_library()
    if isinstance(library, str):
        raise SystemExit(f"the native kernel cannot run here: {library}")
    results = []
    for path in library.paths:
        os.environ[PATH_VARIABLE] = path
        for dtype in ("bfloat16", "float32"):
            jax.clear_caches()  # the path is chosen when a call is compiled
            result = measure(ct.TokenGrid(21, 20, 20), 2, dtype, "spatial", (), repeats)
            times = {row.mode: row.ms_median for row in result.rows}
            print_row(
                path,
                dtype,
                *(f"{times[mode]:,.0f}" for mode in MODES),
                f"{times['dense'] / times['split']:.2f}",
            )
            results.append(result.to_dict())
    del os.environ[PATH_VARIABLE]
    return results


def measure_memory() -> list[dict[str, Any]]:
    """The most memory that a process holds while 16 heads of 75,600 tokens are attended to."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_hold_and_attend, args=(sender,))
    process.start()
    sender.close()
    result = receiver.recv()
    process.join()
    ratio = result["beyond_arrays_bytes"] / result["array_bytes"] + 1
    print(
        f"{MEMORY_HEADS} heads of 75,600 tokens, bfloat16: query, key, value and output take "
        f"{result['array_bytes'] / 2**20:,.0f} MiB; the process grew by "
        f"{result['beyond_arrays_bytes'] / 2**20:,.0f} MiB beyond them, {ratio:.2f} times in all"
    )
    return [result]


def _hold_and_attend(sender: Any) -> None:
    grid = ct.TokenGrid(21, 45, 80)
    plan = ct.plan_tiles(ct.spatial_mask(grid, density=0.05), 256, 128)
    small = ct.TokenGrid(3, 4, 5)
    ones = jnp.ones((1, small.num_tokens, 1, 128), jnp.bfloat16)
    small_plan = ct.plan_tiles(ct.dense_mask(small), 16, 16)
    ct.attention(ones, ones, ones, small_plan, implementation="cpu").block_until_ready()
    shape = (1, grid.num_tokens, MEMORY_HEADS, 128)
    query, key, value = (
        jnp.full(shape, number, jnp.bfloat16).block_until_ready() for number in (0.1, 0.2, 0.3)
    )
    before = _resident_bytes()
    with Path("/proc/self/clear_refs").open("w") as file:
        file.write("5")  # forgets the peak of what came before
    output = ct.attention(query, key, value, plan, implementation="cpu").block_until_ready()
    peak = _peak_bytes()
    sender.send(
        {
            "array_bytes": 4 * output.nbytes,
            "beyond_arrays_bytes": peak - before - output.nbytes,
        }
    )


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    kibibytes = next(line for line in lines if line.startswith("VmHWM")).split()[1]
    return int(kibibytes) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; all by default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--calls",
        type=int,
        nargs="+",
        choices=range(len(RIVAL_CALLS)),
        default=range(len(RIVAL_CALLS)),
        help="rows of the table of rivals to measure; all by default",
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    parts = tuple(arguments.parts) or PARTS
    if set(parts) - set(PARTS):
        parser.error(f"parts must be some of {', '.join(PARTS)}, got {', '.join(parts)}")
    results = {}
    for part in parts:
        if part == "peak":
            results[part] = measure_peak()
        elif part == "memory":
            results[part] = measure_memory()
        elif part == "rivals":
            results[part] = measure_rivals(arguments.repeats, tuple(arguments.calls))
        else:
            results[part] = measure_paths(arguments.repeats)
        print()
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
