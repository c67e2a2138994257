"""`cinetile route`: which pattern a policy gives each head, on saved or video-derived arrays."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
from rich.console import Console

import cinetile
from cinetile import _checks
from cinetile.cli.errors import argument_errors
from cinetile.cli.options import (
    DEFAULT_DENSITY,
    NamesType,
    OutputType,
    grid_options,
    implementation_option,
    json_option,
    make_grid,
    read_policy,
    refuse_without_effect,
    stacked,
)
from cinetile.cli.output import facts, numbers, progress_on_stderr, report, tell_written
from cinetile.cli.wording import counted
from cinetile.grid import TokenGrid
from cinetile.lab import pictures
from cinetile.lab.bench import DTYPES
from cinetile.lab.bench.sources import SAMPLE_CLIP
from cinetile.lab.canvas import require_matplotlib
from cinetile.lab.inputs import Inputs, SavedCall, clip_inputs, find_calls, load_qkv, sample_clip
from cinetile.layer.plans import PlanChoice
from cinetile.layer.route_table import RouteTable
from cinetile.layer.sparse_attention import SparseAttention
from cinetile.patterns import PATTERN_NAMES
from cinetile.policy import EXPERTS, PRESETS, SparsityPolicy
from cinetile.policy.policy import POLICY_MODES

_MAX_HEADS_LISTED = 32

_policy_options = stacked(
    click.option(
        "--policy",
        metavar="NAME|FILE",
        help=f"{', '.join(PRESETS)}, or a .json or .yaml file; the options below override it. "
        "[default: no dense steps or layers]",
    ),
    click.option(
        "--density",
        type=float,
        help=f"Fraction of pairs that a band keeps.  [default: {DEFAULT_DENSITY}]",
    ),
    click.option(
        "--patterns",
        metavar="A,B",
        type=NamesType(PATTERN_NAMES),
        help="Patterns to route heads to.",
    ),
    click.option(
        "--width-multiple", type=int, help="Band widths are rounded up to a multiple of this."
    ),
    click.option("--sink-frames", type=int, help="First frames that every query keeps."),
    click.option(
        "--mode", type=click.Choice(POLICY_MODES), help="Probe exact pairs or aligned tiles."
    ),
    click.option("--block-q", type=int, help="Queries in a tile."),
    click.option("--block-kv", type=int, help="Keys in a tile."),
    click.option("--text-tokens", type=int, default=0, help="Text tokens in the same sequence."),
    click.option(
        "--text-first", is_flag=True, help="Text tokens precede the video instead of following it."
    ),
    click.option("--prompt-length", type=int, help="Text tokens that are not padding."),
    click.option("--num-samples", type=int, help="Query rows to sample."),
    click.option(
        "--num-steps",
        type=int,
        help="Steps of the run; needed if the policy has fractions of steps.",
    ),
    click.option(
        "--num-layers",
        type=int,
        help="Layers of the model; needed if the policy has fractions of layers.",
    ),
    click.option(
        "--expert", type=click.Choice(EXPERTS), help="Expert of Wan 2.2 that the layer is part of."
    ),
)

_EXAMPLES = """\b
Examples:
  cinetile route saved/ --grid 21x30x52 --picture routes.png --csv routes.csv
  cinetile route step3_layer*.npz --policy moderate --num-steps 40 --num-layers 40
  cinetile route --clip sample --grid 9x20x20 --heads 4 --json -
"""


@click.command("route", epilog=_EXAMPLES, short_help="Show the pattern of each head.")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@grid_options
@click.option("--clip", metavar="VIDEO", help="Video to derive the arrays from, or 'sample'.")
@click.option("--heads", type=int, help="Attention heads of a clip.  [default: 4]")
@click.option("--head-dim", type=int, help="Head size of a clip.  [default: 128]")
@_policy_options
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="bfloat16",
    show_default=True,
    help="Dtype of the arrays.",
)
@implementation_option
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sampled rows.")
@click.option("--csv", "csv_path", metavar="PATH", type=OutputType(), help="Write a line per head.")
@click.option(
    "--picture",
    metavar="PNG",
    type=OutputType(".png"),
    help="Draw routes and errors by layer and step (needs the extra `plot`).",
)
@json_option
def route_command(
    *,
    files: tuple[Path, ...],
    video: tuple[int, int, int] | None,
    grid: tuple[int, int, int] | None,
    clip: str | None,
    heads: int | None,
    head_dim: int | None,
    policy: str | None,
    num_steps: int | None,
    num_layers: int | None,
    expert: str | None,
    dtype: str,
    implementation: str | None,
    text_tokens: int,
    text_first: bool,
    prompt_length: int | None,
    seed: int,
    csv_path: Path | None,
    picture: Path | None,
    json_target: str | Path | None,
    **settings: Any,
) -> None:
    """Show the pattern of each head, and the error that each pattern would cause.

    FILES are .npz or .safetensors files with query, key and value, or folders of such files; the
    step and layer of each are read from its name, as in step3_layer12.npz.
    \f

    Long because its arguments are the options of the command.
    """  # noqa: D301
    if bool(files) == (clip is not None):
        raise click.UsageError("give either FILES or --clip")
    if clip is None and not heads is head_dim is None:
        raise click.UsageError(
            "--heads and --head-dim apply only to --clip; FILES determine their own"
        )
    if not text_tokens:
        refuse_without_effect(
            ("text_first", "prompt_length"), "has an effect only with --text-tokens"
        )
    with argument_errors():
        tokens = dataclasses.replace(
            make_grid(video, grid), text_tokens=text_tokens, text_first=text_first
        )
        if heads is not None:
            _checks.integer("heads", heads, minimum=1)
        layer = SparseAttention(
            tokens,
            _policy(policy, settings),
            implementation=implementation,
            num_steps=num_steps,
            num_layers=num_layers,
            expert=expert,
            dtype=dtype,
        )
        calls = find_calls(files)
        _check_positions(calls, num_steps, num_layers)
    if picture is not None:
        require_matplotlib()

    rng = jax.random.key(seed)
    tables, descriptions = [], []
    with progress_on_stderr() as progress:
        if clip is None:
            inputs = _saved(calls, tokens)
        else:
            inputs = iter([(0, 0, _from_clip(clip, tokens, heads or 4, head_dim or 128))])
        for done, (step, index, arrays) in enumerate(inputs):
            progress("routing", arrays.description, done, max(len(calls), 1))
            query, key, value = (
                jnp.asarray(array, dtype) for array in (arrays.query, arrays.key, arrays.value)
            )
            record = layer.route(
                query, key, value, step=step, layer=index, rng=rng, prompt_length=prompt_length
            )
            tables.append(RouteTable.from_records([record]))
            descriptions.append(arrays.description)
    table = RouteTable.joined(tables)
    document = {
        "cinetile": cinetile.__version__,
        "grid": [tokens.frames, tokens.height, tokens.width],
        "text_tokens": tokens.text_tokens,
        "policy": layer.policy.to_dict(),
        "inputs": descriptions,
        **table.to_dict(),
    }
    report(document, json_target, lambda console: _print(console, layer, descriptions, table))
    if csv_path is not None:
        table.to_csv(csv_path)
        tell_written(csv_path)
    if picture is not None:
        pictures.route_picture(table, picture)
        tell_written(picture)


def _policy(name: str | None, settings: dict[str, Any]) -> SparsityPolicy:
    if name is None:
        policy = SparsityPolicy(DEFAULT_DENSITY, dense_steps=(), dense_layers=())
    else:
        policy = read_policy(name)
    given = {name: value for name, value in settings.items() if value is not None}
    if policy.rules and "density" in given:
        raise ValueError(f"density cannot override the rules of policy {name!r}; edit a copy of it")
    return dataclasses.replace(policy, **given)


def _check_positions(
    calls: tuple[SavedCall, ...], num_steps: int | None, num_layers: int | None
) -> None:
    for call in calls:
        for what, index, count in (
            ("step", call.step, num_steps),
            ("layer", call.layer, num_layers),
        ):
            if count is not None and index >= count:
                raise ValueError(
                    f"num_{what}s must be above {index}, the {what} of {call.path}, got {count}"
                )


def _saved(calls: tuple[SavedCall, ...], grid: TokenGrid) -> Iterator[tuple[int, int, Inputs]]:
    for call in calls:
        with argument_errors():
            inputs = load_qkv(call.path, grid.num_tokens)
        yield call.step, call.layer, inputs


def _from_clip(clip: str, grid: TokenGrid, heads: int, head_dim: int) -> Inputs:
    with argument_errors():
        path = sample_clip() if clip == SAMPLE_CLIP else clip
        return clip_inputs(path, grid.frames, grid.height, grid.width, heads, head_dim)


def _print(
    console: Console, layer: SparseAttention, descriptions: list[str], table: RouteTable
) -> None:
    policy = layer.policy
    shown = descriptions[0]
    if len(descriptions) > 1:
        shown += f" and {counted(len(descriptions) - 1, 'other')}"
    choices = ", ".join(str(choice) for choice in layer.planned.choices[1:])
    console.print(
        facts(
            [
                ("input", shown),
                ("tokens", str(layer.grid)),
                ("choices", f"{choices or 'dense only'}; {policy.mode}"),
                ("sampled", f"{policy.num_samples} query rows per head"),
            ]
        )
    )
    if len(table.entries) <= _MAX_HEADS_LISTED:
        _print_heads(console, table)
    else:
        _print_calls(console, table)
    console.print("mean squared error against dense attention on the sampled rows", style="dim")


def _print_heads(console: Console, table: RouteTable) -> None:
    listing = numbers("step", "layer", "row", "head", "goes to", *_error_columns(table))
    for entry in table.entries:
        errors = [f"{error:.2e}" for error in (entry["errors"] or {}).values()]
        listing.add_row(
            *(str(entry[name]) for name in ("step", "layer", "batch", "head")),
            str(PlanChoice(entry["pattern"], entry["density"])),
            *(errors or ["-"] * len(table.patterns)),
        )
    console.print(listing)


def _print_calls(console: Console, table: RouteTable) -> None:
    names = ["dense", *table.patterns]
    medians = [f"median {column}" for column in _error_columns(table)]
    listing = numbers("step", "layer", *(f"{name} heads" for name in names), *medians)
    for (step, layer), entries in table.calls().items():
        listing.add_row(str(step), str(layer), *_counts(names, entries), *_medians(table, entries))
    console.print(listing)


def _counts(names: list[str], entries: list[dict[str, Any]]) -> list[str]:
    return [str(sum(entry["pattern"] == name for entry in entries)) for name in names]


def _medians(table: RouteTable, entries: list[dict[str, Any]]) -> list[str]:
    medians = table.median_errors(entries)
    return ["-" if math.isnan(median) else f"{median:.2e}" for median in medians]


def _error_columns(table: RouteTable) -> list[str]:
    return [f"{pattern} error" for pattern in table.patterns]
