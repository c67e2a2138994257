"""Static estimates of the TPU kernel: the tables of docs/how-the-tpu-kernel-works.md.

10 heads of 128, bfloat16, density 0.35 with the first frame as sink; nothing runs on a TPU. Needs
the extra `tpu-aot`. Each kernel is compiled once and serves all videos, since its instructions do
not depend on the plan.

    python -m benchmarks.tpu_static [--targets v6e,tpu7x] [--temporal] [--json PATH]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from cinetile.grid import TokenGrid
from cinetile.kernels.pallas_tpu.config import KernelConfig
from cinetile.lab.bench.workload import Workload
from cinetile.lab.tpu.aot import CompiledKernel, KernelJob, compile_kernel
from cinetile.lab.tpu.estimate import estimate
from cinetile.lab.tpu.report import StaticConfig, StaticReport, static_report
from cinetile.lab.tpu.targets import TARGETS

VIDEOS = {
    "720p": TokenGrid(21, 45, 80),
    "1080p": TokenGrid(21, 67, 120),
    "1440p": TokenGrid(21, 90, 160),
}
MODES = ("dense", "split", "aligned")
HEADER = "| video | pattern | kernels | softmax | dense ms | split ms | aligned ms |"
# A tile of the strided view is whole pixels over all frames: 21 x 128 tokens each way.
STRIDED = KernelConfig(2688, 2688, 384, 384, kv_span=2688, group=1152, full_group=2688)


class Compilations:
    """Compiles each kernel once, whatever the plan."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, KernelConfig], CompiledKernel] = {}

    def __call__(self, job: KernelJob) -> CompiledKernel:
        name = job.target, job.config
        if name not in self._known:
            self._known[name] = compile_kernel(job)
        return self._known[name]


def workload(grid: TokenGrid, pattern: str) -> Workload:
    return Workload(grid, pattern, density=0.35, heads=10)


def table_rows(video: str, report: StaticReport) -> list[str]:
    """Lines of the Markdown table, one for each softmax."""
    kernels = "two" if report.config.two_kernels else "one"
    lines = []
    for softmax in report.config.softmaxes:
        times = [f"{row.static_ms:.1f}" for row in report.rows if row.softmax == softmax]
        pattern = report.config.workload.pattern_name
        lines.append("| " + " | ".join([video, pattern, kernels, softmax, *times]) + " |")
    return lines


def bundle_rows(report: StaticReport) -> list[str]:
    """Instructions for 2^20 pairs, memory and compilation of each kernel."""
    lines = []
    for softmax in report.config.softmaxes:
        row = next(row for row in report.rows if row.softmax == softmax)
        costs = ", ".join(f"{name} {cost:,.0f}" for name, cost in row.bundles_per_mpair.items())
        lines.append(
            f"- {report.config.target} {softmax}: {costs}; VMEM {row.vmem_bytes / 2**20:.1f} MiB; "
            f"compiled in {row.compile_cpu_s:.0f} s of processor time"
        )
    return lines


def temporal_comparison(compile_one: Compilations) -> list[str]:
    """A strided view of the tokens in frame-major order against permuting them first, on v6e."""
    target, placed = TARGETS["v6e"], workload(VIDEOS["720p"], "temporal")
    config = StaticConfig(placed, modes=("split",), softmaxes=("fixed",))
    permuted = static_report(config, compile_one=compile_one).rows[0]
    plan = placed.with_block_sizes(STRIDED.block_q, STRIDED.block_kv).plan("split")
    compiled = compile_one(KernelJob("v6e", STRIDED, plan, 10, 128, "bfloat16"))
    strided = estimate(compiled.dump, plan, STRIDED, target, 10, 128, 2)
    array = 10 * placed.grid.num_tokens * 128 * 2
    # Query and value are rewritten anyway, to be scaled and transposed; key and output are not.
    passes_ms = 4 * array / target.hbm_bytes_per_us / 1e3
    full = next(body for body in compiled.dump.bodies if body.kind == "full tile")
    return [
        f"- permute, then run: {permuted.static_ms:.1f} ms + {passes_ms:.2f} ms to move key and "
        f"output ({4 * array / 2**20:,.0f} MiB); full tiles take "
        f"{permuted.bundles_per_mpair['full']:,.0f} bundles for 2^20 pairs",
        f"- strided view, tiles of 21 frames x 128 pixels: {strided.static_ms:.1f} ms; full tiles "
        f"take {full.per_mega_pair:,.0f} bundles; "
        f"a key block is 21 copies of {128 * 128 * 2 // 1024} KiB instead of one of "
        f"{3072 * 128 * 2 // 1024} KiB, the bytes are the same",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", default="v6e,tpu7x")
    parser.add_argument("--temporal", action="store_true", help="only how temporal heads are read")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    compile_one = Compilations()
    if arguments.temporal:
        print("\n".join(temporal_comparison(compile_one)))
        return
    documents: list[dict[str, Any]] = []
    for target in arguments.targets.split(","):
        rule = "---|" * (HEADER.count(" | ") + 1)
        print(f"\n{target}, static estimates:\n\n{HEADER}\n|{rule}")
        bundles: list[str] = []
        for two_kernels in (False, True):
            for video, grid in VIDEOS.items():
                for pattern in ("spatial", "temporal"):
                    config = StaticConfig(
                        workload(grid, pattern), target, MODES, two_kernels=two_kernels
                    )
                    report = static_report(config, compile_one=compile_one)
                    print("\n".join(table_rows(video, report)), flush=True)
                    documents.append(report.to_dict())
                    bundles = bundles or bundle_rows(report)
        print("\n" + "\n".join(bundles), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(documents, indent=2) + "\n")


if __name__ == "__main__":
    main()
