"""`cinetile tpu`: compiles the TPU kernel and estimates its time without a TPU."""

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from cinetile.cli.errors import argument_errors
from cinetile.cli.options import (
    NamesType,
    json_option,
    make_workload,
    refuse_rounding_without,
    stacked,
    workload_options,
)
from cinetile.cli.output import facts, numbers, progress_on_stderr, report
from cinetile.cli.wording import counted, percent
from cinetile.kernels.pallas_tpu.implementation import SOFTMAXES
from cinetile.lab.compare.whole_run import DENSE_STACK
from cinetile.lab.tpu import RIVALS, TARGETS, StaticConfig, StaticReport, static_report
from cinetile.lab.tpu.calibration import CALIBRATION
from cinetile.plans import MODES

_kernel_options = stacked(
    click.option(
        "--target",
        type=click.Choice(tuple(TARGETS)),
        default="v6e",
        show_default=True,
        help="Chip to compile for.",
    ),
    click.option("--heads", type=int, default=10, show_default=True, help="Attention heads."),
    click.option("--head-dim", type=int, default=128, show_default=True, help="Head size."),
    click.option(
        "--modes",
        metavar="A,B",
        type=NamesType(MODES),
        default=MODES,
        help=f"Plans to estimate.  [default: {','.join(MODES)}]",
    ),
    click.option(
        "--softmax",
        "softmaxes",
        metavar="A,B",
        type=NamesType(SOFTMAXES),
        default=SOFTMAXES,
        help=f"Kernels to compile.  [default: {','.join(SOFTMAXES)}]",
    ),
    click.option(
        "--two-kernels", is_flag=True, help="One kernel for full tiles and one for masked tiles."
    ),
    click.option(
        "--rivals",
        metavar="A,B",
        type=NamesType(RIVALS),
        default=(),
        help="Also compile jax's stock kernel: splash.",
    ),
)

_EXAMPLES = """\b
Examples:
  cinetile tpu
  cinetile tpu --target tpu7x --softmax fixed --pattern temporal
  cinetile tpu --block-q 3328 --block-kv 1536 --rivals splash --json -
"""


@click.command(
    "tpu", epilog=_EXAMPLES, short_help="Compile for a TPU without one; static estimate."
)
@workload_options
@_kernel_options
@json_option
def tpu_command(
    *,
    target: str,
    modes: tuple[str, ...],
    softmaxes: tuple[Any, ...],
    two_kernels: bool,
    rivals: tuple[str, ...],
    implementation: str | None,
    json_target: str | Path | None,
    **shape: Any,
) -> None:
    """Compile the TPU kernel ahead of time and estimate its time from the instructions.

    Needs the extra `tpu-aot`. Nothing runs on a TPU; every time is a static estimate.
    """
    if implementation not in (None, "pallas_tpu"):
        raise click.UsageError("--implementation is always pallas_tpu here")
    refuse_rounding_without(modes)
    with argument_errors():
        config = StaticConfig(make_workload(**shape), target, modes, softmaxes, two_kernels, rivals)
    with progress_on_stderr() as progress:
        result = static_report(config, progress)
    report(result.to_dict(), json_target, lambda console: _print(console, result))


def _print(console: Console, result: StaticReport) -> None:
    workload = result.config.workload
    mask = workload.mask()
    console.print(
        facts(
            [
                ("target", f"{result.config.target}, compiled ahead of time; nothing ran"),
                ("tokens", f"{workload.grid}, {counted(workload.heads, 'head')}"),
                (
                    "mask",
                    f"{workload.pattern_name}, width {mask.width:,}: "
                    f"{percent(mask.density)} of the pairs",
                ),
                ("tiles", f"{workload.block_q} queries x {workload.block_kv} keys"),
            ]
        )
    )
    times = numbers(
        "softmax", "plan", "static estimate", "error band", "matrix floor", "VMEM", "SMEM"
    )
    for row in result.rows:
        times.add_row(
            row.softmax,
            row.mode,
            f"{row.static_ms:,.1f} ms",
            f"+-{row.error_band:.0%}",
            f"{row.floor_ms:,.1f} ms",
            f"{row.vmem_bytes / 2**20:.1f} MiB",
            f"{row.smem_bytes / 2**10:.0f} KiB",
        )
    for rival in result.rivals:
        cells = (f"{rival.static_ms:,.1f} ms", f"+-{rival.error_band:.0%}")
        times.add_row(rival.name, "dense", *cells, "", "", "")
    console.print(times)
    _print_bundles(console, result)
    calibration = numbers("calibration", "published", "static estimate", "error")
    for row in CALIBRATION:
        cells = ["not recorded", ""]
        if row.static_ms is not None:
            cells = [f"{row.static_ms:.1f} ms", f"{row.static_ms / row.published_ms - 1:+.1%}"]
        calibration.add_row(row.name, f"{row.published_ms:.2f} ms", *cells)
    console.print(calibration)
    console.print(
        f"Today's dense attention (maxdiffusion, v6e) takes about {DENSE_STACK.call_ms:.0f} ms for "
        f"{DENSE_STACK.num_tokens:,} tokens x 10 heads x 128,\nderived from a whole run; the case "
        "study published 78.70 ms.",
        style="dim",
    )


def _print_bundles(console: Console, result: StaticReport) -> None:
    seen = {row.softmax: row for row in result.rows}
    kinds = list(dict.fromkeys(kind for row in seen.values() for kind in row.bundles_per_mpair))
    table = numbers(
        "bundles for 2^20 pairs", *(kind.replace("_", " ") for kind in kinds), "compile"
    )
    for softmax, row in seen.items():
        costs = [f"{row.bundles_per_mpair[kind]:,.0f}" for kind in kinds]
        table.add_row(softmax, *costs, f"{row.compile_s:.0f} s")
    for rival in result.rivals:
        blanks = [""] * (len(kinds) - 1)
        cost = f"{rival.bundles_per_mpair:,.0f}"
        table.add_row(rival.name, cost, *blanks, f"{rival.compile_s:.0f} s")
    console.print(table)
    busy = numbers("busy in full tiles", *next(iter(result.utilisation.values())))
    for softmax, shares in result.utilisation.items():
        busy.add_row(softmax, *(f"{share:.0%}" for share in shares.values()))
    console.print(busy)
