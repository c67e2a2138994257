"""`cinetile compare --shape-only`: attention's share of a block, and a whole run's speed-up."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

import cinetile
from cinetile.cli.circumstances import kernel_name, machine_facts
from cinetile.cli.errors import argument_errors
from cinetile.cli.options import NamesType, stacked
from cinetile.cli.output import (
    facts,
    numbers,
    progress_on_stderr,
    report,
    warnings_on_stderr,
)
from cinetile.cli.tables import Numbers
from cinetile.cli.threads import restrict_threads
from cinetile.cli.wording import counted, milliseconds, percent, percent_or_dash, seconds
from cinetile.grid import TokenGrid
from cinetile.lab.bench import Timing
from cinetile.lab.compare.shapes import MODELS, RESOLUTIONS, BlockShape
from cinetile.lab.compare.whole_run import (
    PUBLISHED_RUNS,
    WholeRun,
    check_published,
    model_dense_stack,
    sparse_call_share,
)
from cinetile.policy import SparsityPolicy

if TYPE_CHECKING:
    from cinetile.lab.compare.blocks import BlockResult, BlockTimes

# Longest over shortest time above which the machine counts as busy.
_RESTLESS = 1.3

shape_only_options = stacked(
    click.option(
        "--resolutions",
        metavar="A,B",
        type=NamesType(tuple(RESOLUTIONS)),
        default=tuple(RESOLUTIONS),
        help=f"With --shape-only: sizes of 81 frames.  [default: {','.join(RESOLUTIONS)}]",
    ),
    click.option(
        "--heads",
        type=int,
        default=1,
        show_default=True,
        help="With --shape-only: heads of the timed block; estimates cover all heads of the model.",
    ),
    click.option(
        "--full-width",
        type=click.Choice(tuple(MODELS)),
        default="14B",
        show_default=True,
        help="With --shape-only: the Wan model whose block is timed.",
    ),
)


def compare_shapes(
    policy: SparsityPolicy,
    *,
    resolutions: tuple[str, ...] | Mapping[str, TokenGrid] = tuple(RESOLUTIONS),
    heads: int = 1,
    full_width: str | BlockShape = "14B",
    repeats: int | None = None,
    implementation: str | None = None,
    threads: int | None = None,
    json_target: str | Path | None = None,
    sample_tokens: int | None = None,
) -> None:
    """Times a block at several token counts, and estimates a whole run from these times.

    Must be called from within a command, which turns errors about arguments into usage errors.

    Args:
        policy: policy of the sparse block.
        resolutions: names in `RESOLUTIONS`, or token grids by name.
        heads: heads of the blocks that run at these token counts.
        full_width: a name in `MODELS`, or the sizes of a model's blocks.
        repeats: rounds after the warm-up; by default fewer for long sequences.
        implementation: name of the attention kernel; None chooses the best that can run here.
        threads: processors to use; None for all usable ones.
        json_target: file to write the result to as JSON; "-" for stdout.
        sample_tokens: tokens on which the block at full width is timed; None for the default.
    """
    from cinetile.lab.compare.blocks import BlockConfig, measure_blocks

    grids = (
        resolutions
        if isinstance(resolutions, Mapping)
        else {name: RESOLUTIONS[name] for name in resolutions}
    )
    further = {} if sample_tokens is None else {"sample_tokens": sample_tokens}
    with argument_errors():
        model = full_width if isinstance(full_width, BlockShape) else MODELS[full_width]
        config = BlockConfig(policy, grids, heads, model, repeats, implementation, **further)
        if threads is not None:
            restrict_threads(threads)
    with progress_on_stderr() as progress, warnings_on_stderr():
        result = measure_blocks(config, progress)
    document = _document(result)
    report(document, json_target, lambda console: _print(console, result, document))


def _document(result: "BlockResult") -> dict[str, Any]:
    config = result.config
    sparse_calls = sparse_call_share(config.policy, config.num_steps, config.model.num_layers)
    return {
        "cinetile": cinetile.__version__,
        "machine": result.machine.to_dict(),
        "policy": config.policy.to_dict(),
        "implementation": result.implementation,
        "path": result.path,
        "block": dataclasses.asdict(config.model.with_heads(config.heads)),
        "model": dataclasses.asdict(config.model),
        "num_steps": config.num_steps,
        "sparse_calls": sparse_calls,
        "sample_tokens": config.sample_tokens,
        "rows": [_row(result, row, sparse_calls) for row in result.rows],
        "published": [
            dataclasses.asdict(check)
            | {
                "of_kernels_deviation": check.of_kernels_deviation,
                "with_overhead_deviation": check.with_overhead_deviation,
            }
            for check in check_published()
        ],
        "dense_stack": [
            {"kind": "model", **dataclasses.asdict(run), "speedup": run.speedup}
            for run in model_dense_stack()
        ],
    }


def _row(result: "BlockResult", row: "BlockTimes", sparse_calls: float) -> dict[str, Any]:
    from cinetile.lab.compare.blocks import full_width_block, full_width_rate

    published = PUBLISHED_RUNS.get(row.name)
    attention_share, attention_speedup = row.attention_share, row.attention_speedup
    full_width = None
    if attention_share.value is not None and attention_speedup.value is not None:
        full = full_width_block(row, result.config)
        run = WholeRun(sparse_calls, full.attention_share, attention_speedup.value)
        full_width = {
            "kind": "estimate",
            **_times("sample_ms", row.full_width),
            "tflop_per_s": full_width_rate(row, result.config) * 1e-9,
            **dataclasses.asdict(full),
            "attention_share": full.attention_share,
            "block_speedup": full.block_speedup,
            "run_speedup": run.speedup,
        }
    return {
        "resolution": row.name,
        "grid": [row.grid.frames, row.grid.height, row.grid.width],
        "num_tokens": row.grid.num_tokens,
        "repeats": row.repeats,
        **_times("dense_ms", row.dense),
        **_times("sparse_ms", row.sparse),
        **_times("without_attention_ms", row.without),
        "visited": row.visited,
        **attention_share.to_dict("attention_share"),
        **attention_speedup.to_dict("attention_speedup"),
        **row.block_speedup.to_dict("block_speedup"),
        "spread": row.spread,
        "full_width": full_width,
        "published_attention_share": None if published is None else published.attention_share,
        "published_run_speedup": None if published is None else published.speedup,
    }


def _times(name: str, timing: Timing) -> dict[str, float]:
    return {
        f"{name}_median": timing.median,
        f"{name}_min": timing.minimum,
        f"{name}_max": timing.maximum,
    }


def _print(console: Console, result: "BlockResult", document: dict[str, Any]) -> None:
    console.print(_circumstances(result, document))
    console.print(_measured(document["rows"]))
    for sentence in _unstated(document["rows"]):
        console.print(sentence)
    restless = max(row["spread"] for row in document["rows"])
    if restless > _RESTLESS:
        console.print(
            f"The machine was busy: times of the same block differ by up to {restless:.2f}x, so "
            "shares and speed-ups\nare no more precise than that. Measure again when it is idle."
        )
    console.print(_estimated(document))
    console.print(
        "Estimated: attention's measured time is scaled by the number of heads; the rest is its "
        "operations over the rate\nof a block at full width without attention on "
        f"{document['sample_tokens']:,} tokens, measured in the same rounds. The whole run\n"
        "contains only the layers. Case study: TPU v6e, its own policy.",
        style="dim",
    )
    console.print()
    console.print(_published(document["published"]))
    console.print(
        "The model of a whole run with the case study's own shares and kernel times; nothing is "
        "fitted. Its sparse steps\nare not published: the preset aggressive stands in for them.",
        style="dim",
    )
    console.print()
    console.print(_dense_stack(document["dense_stack"]))
    console.print(
        "A model: maxdiffusion's dense run on v6e-8 (published: 122.2 s at 720p, about 53 ms a "
        "call) with\nstatic estimates of this library's TPU kernel; nothing ran on a TPU.",
        style="dim",
    )


def _circumstances(result: "BlockResult", document: dict[str, Any]) -> Table:
    config = result.config
    block, policy = config.model.with_heads(config.heads), config.policy
    layers = config.model.num_layers
    return facts(
        [
            (
                "block",
                f"{counted(block.heads, 'head')} of {block.head_dim}, width {block.dim:,}, "
                f"feed-forward {block.ffn_dim:,}, {block.text_tokens} text tokens; bfloat16, "
                "random weights and inputs",
            ),
            (
                "model",
                f"{counted(config.model.heads, 'head')}, width {config.model.dim:,}, "
                f"feed-forward {config.model.ffn_dim:,}, {counted(layers, 'layer')}",
            ),
            (
                "policy",
                f"density {policy.density:g}, {policy.mode}; {percent(document['sparse_calls'])} "
                f"of the attention calls of {config.num_steps} steps are sparse",
            ),
            ("kernel", kernel_name(result.implementation, result.path)),
            *machine_facts(result.machine),
            (
                "method",
                "median of interleaved rounds after a warm-up; attention is the block's time minus "
                "that of a block that adds up query, key and value instead",
            ),
        ]
    )


def _measured(rows: list[dict[str, Any]]) -> Numbers:
    table = numbers(
        "measured",
        "tokens",
        "rounds",
        "dense block",
        "sparse block",
        "without attention",
        "attention's share",
        "pairs visited",
        "attention",
        "block",
    )
    for row in rows:
        table.add_row(
            row["resolution"],
            f"{row['num_tokens']:,}",
            str(row["repeats"]),
            milliseconds(row["dense_ms_median"]),
            milliseconds(row["sparse_ms_median"]),
            milliseconds(row["without_attention_ms_median"]),
            percent_or_dash(row["attention_share"]),
            percent(row["visited"]),
            _times_as_fast(row["attention_speedup"]),
            _times_as_fast(row["block_speedup"]),
        )
    return table


def _estimated(document: dict[str, Any]) -> Numbers:
    heads = document["model"]["heads"]
    table = numbers(
        f"estimated, {counted(heads, 'head')}",
        "attention",
        "rate",
        "all else",
        "attention's share",
        "case study",
        "block",
        "whole run",
        "case study",
    )
    for row in document["rows"]:
        full, share = row["full_width"], row["published_attention_share"]
        speedup = row["published_run_speedup"]
        if full is None:
            table.add_row(row["resolution"], *8 * ["-"])
            continue
        table.add_row(
            row["resolution"],
            seconds(full["dense_attention_ms"] * 1e-3),
            f"{1e3 * full['tflop_per_s']:.0f} GFLOP/s",
            seconds(full["rest_ms"] * 1e-3),
            percent(full["attention_share"]),
            "-" if share is None else percent(share),
            _times_as_fast(full["block_speedup"]),
            _times_as_fast(full["run_speedup"]),
            "-" if speedup is None else _times_as_fast(speedup),
        )
    return table


def _published(checks: list[dict[str, Any]]) -> Numbers:
    table = numbers(
        "case study's whole run",
        "attention's share",
        "published",
        "model, kernels only",
        "off by",
        "model, with overhead",
        "off by",
    )
    for check in checks:
        table.add_row(
            check["resolution"],
            percent(check["attention_share"]),
            _times_as_fast(check["published"]),
            _times_as_fast(check["of_kernels"]),
            f"{100 * check['of_kernels_deviation']:+.1f} %",
            _times_as_fast(check["with_overhead"]),
            f"{100 * check['with_overhead_deviation']:+.1f} %",
        )
    return table


def _times_as_fast(speedup: float | None) -> str:
    return "-" if speedup is None else f"{speedup:.2f}x"


def _unstated(rows: list[dict[str, Any]]) -> list[str]:
    """Returns a sentence for each figure that the measurement does not support."""
    names = {
        "attention_share": "attention's share",
        "attention_speedup": "the speed-up of attention",
        "block_speedup": "the speed-up of the block",
    }
    return [
        f"{row['resolution']}: {words} is not stated: {row[f'no_{name}_reason']}."
        for row in rows
        for name, words in names.items()
        if row[name] is None
    ]


def _dense_stack(runs: list[dict[str, Any]]) -> Numbers:
    table = numbers("model of a run on v6e-8", "plan", "dense", "sparse", "whole run")
    for run in runs:
        table.add_row(
            run["resolution"],
            run["mode"],
            seconds(run["dense_s"]),
            seconds(run["sparse_s"]),
            _times_as_fast(run["speedup"]),
        )
    return table
