"""Options that several commands share, and the objects that they describe."""

import os
import re
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from cinetile.files import require_writable
from cinetile.grid import TokenGrid
from cinetile.lab.bench import DTYPES, Workload
from cinetile.patterns import PATTERN_NAMES
from cinetile.plans import ROUNDINGS
from cinetile.policy import PRESETS, SparsityPolicy

DEFAULT_VIDEO = (81, 720, 1280)
DEFAULT_DENSITY = 0.35

Command = TypeVar("Command", bound=Callable[..., Any])


class SizesType(click.ParamType):
    """Three whole numbers separated by x."""

    def __init__(self, meaning: str) -> None:
        self.name = meaning

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", value.strip().lower())
        if match is None:
            self.fail(f"{value!r} is not {self.name}, as in 81x720x1280", param, ctx)
        frames, height, width = (int(number) for number in match.groups())
        return frames, height, width


class MeshType(click.ParamType):
    """Number of devices along each axis of a mesh."""

    name = "mesh"
    axes = ("data", "sequence", "heads")

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, int]:
        if isinstance(value, dict):
            return value
        sizes: dict[str, int] = {}
        for part in value.split(","):
            match = re.fullmatch(rf"({'|'.join(self.axes)})=([1-9]\d*)", part.strip())
            if match is None or match[1] in sizes:
                self.fail(
                    f"{value!r} does not name devices along {', '.join(self.axes)}, each once, "
                    "as in data=2,heads=4",
                    param,
                    ctx,
                )
            sizes[match[1]] = int(match[2])
        return sizes


class NamesType(click.ParamType):
    """Names of a fixed set, separated by commas."""

    name = "names"

    def __init__(self, known: tuple[str, ...]) -> None:
        self.known = known

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in value.split(",") if name.strip())
        unknown = [name for name in names if name not in self.known]
        if unknown or not names:
            self.fail(f"{value!r} must hold names of {', '.join(self.known)}", param, ctx)
        return names


class SizeListType(click.ParamType):
    """Whole numbers, separated by commas."""

    name = "sizes"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            sizes = tuple(int(size) for size in value.split(","))
        except ValueError:
            self.fail(f"{value!r} must hold whole numbers, as in 128,256", param, ctx)
        return sizes


class OutputType(click.ParamType):
    """A file to write; its folder must exist before the command computes anything.

    Args:
        suffixes: accepted suffixes of its name; any suffix if empty.
        dash: whether `-` stands for standard output.
    """

    name = "path"

    def __init__(self, *suffixes: str, dash: bool = False) -> None:
        self.suffixes = suffixes
        self.dash = dash

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | Path:
        if value == "-":
            if self.dash:
                return value
            self.fail("must be a file; only --json prints to stdout", param, ctx)
        path = Path(value)
        if self.suffixes and path.suffix.lower() not in self.suffixes:
            self.fail(f"{value!r} must end in {' or '.join(self.suffixes)}", param, ctx)
        try:
            require_writable(path)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if path.exists() and not os.access(path, os.W_OK):
            self.fail(f"{value!r} is read-only", param, ctx)
        return path


def is_given(parameter: str) -> bool:
    """Whether the command line or the environment sets a parameter of the running command."""
    source = click.get_current_context().get_parameter_source(parameter)
    return source not in (None, ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)


def refuse_without_effect(parameters: Container[str | None], reason: str) -> None:
    """Refuses parameters of the running command that would be ignored.

    Args:
        parameters: Python names of the parameters.
        reason: text after the option's name in the error: "has an effect only with --clip".

    Raises:
        click.UsageError: one of the parameters is given.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name in parameters and is_given(parameter.name or ""):
            is_option = isinstance(parameter, click.Option)
            shown = parameter.opts[0] if is_option else parameter.human_readable_name
            raise click.UsageError(f"{shown} {reason}")


def refuse_rounding_without(modes: Container[str]) -> None:
    """Refuses --rounding if no plan of the running command is aligned."""
    if "aligned" not in modes:
        refuse_without_effect(("rounding",), "has an effect only on plans of mode aligned")


def stacked(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Combines several options into one decorator, in the order in which --help lists them."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def policy_option(default: str) -> Callable[[Command], Command]:
    """Returns the option --policy; its help names `default` as the default."""
    return click.option(
        "--policy",
        metavar="NAME|FILE",
        help=f"Where self-attention is sparse: {', '.join(PRESETS)}, or a file that "
        f"`SparsityPolicy.to_file` wrote.  [default: {default}]",
    )


def read_policy(value: str) -> SparsityPolicy:
    """Returns the policy that --policy names.

    Raises:
        ValueError: `value` is neither a preset nor a file, or the file holds no policy.
    """
    if value in PRESETS:
        return SparsityPolicy.preset(value)
    if not Path(value).is_file():
        raise ValueError(f"--policy must be one of {', '.join(PRESETS)} or a file, got {value!r}")
    return SparsityPolicy.from_file(value)


json_option = click.option(
    "--json",
    "json_target",
    metavar="PATH|-",
    type=OutputType(dash=True),
    help="Write the result to PATH as JSON; - prints only the JSON, to stdout.",
)

implementation_option = click.option(
    "--implementation",
    metavar="NAME",
    help="Kernel to run; see `cinetile implementations`.  [default: the best that can run here]",
)

grid_options = stacked(
    click.option(
        "--video",
        metavar="FxHxW",
        type=SizesType("FRAMESxHEIGHTxWIDTH"),
        help="Frames, height and width of the video.  [default: 81x720x1280]",
    ),
    click.option(
        "--grid",
        metavar="FxHxW",
        type=SizesType("FRAMESxHEIGHTxWIDTH"),
        help="Latent token grid instead of --video, as in 21x45x80.",
    ),
)

shape_options = stacked(
    grid_options,
    click.option(
        "--density",
        type=float,
        help=f"Fraction of pairs that the band keeps.  [default: {DEFAULT_DENSITY}]",
    ),
    click.option("--width", type=int, help="Width of the band in tokens, instead of --density."),
    click.option(
        "--pattern",
        type=click.Choice(PATTERN_NAMES),
        default="spatial",
        show_default=True,
        help="Which keys a query keeps; svg-* are the masks of Sparse VideoGen as published.",
    ),
    click.option(
        "--sink-frames",
        type=int,
        default=1,
        show_default=True,
        help="First frames that every query keeps.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        default="bfloat16",
        show_default=True,
        help="Dtype of the arrays.",
    ),
    click.option(
        "--rounding",
        type=click.Choice(ROUNDINGS),
        default="balanced",
        show_default=True,
        help="How aligned plans round boundary tiles.",
    ),
    implementation_option,
)

workload_options = stacked(
    shape_options,
    click.option(
        "--block-q", type=int, help="Queries in a tile.  [default: chosen for the kernel]"
    ),
    click.option("--block-kv", type=int, help="Keys in a tile.  [default: chosen for the kernel]"),
)


def make_grid(video: tuple[int, int, int] | None, grid: tuple[int, int, int] | None) -> TokenGrid:
    """Returns the token grid of --video or --grid, or of the default video if neither is given.

    Raises:
        click.UsageError: both are given.
        ValueError: a size is out of range.
    """
    if video is not None and grid is not None:
        raise click.UsageError("--video and --grid exclude each other")
    return TokenGrid.from_video(*(video or DEFAULT_VIDEO)) if grid is None else TokenGrid(*grid)


def make_workload(
    *,
    video: tuple[int, int, int] | None,
    grid: tuple[int, int, int] | None,
    density: float | None,
    width: int | None,
    **fields: Any,
) -> Workload:
    """Builds the workload that the shared options describe.

    Args:
        video: value of --video.
        grid: value of --grid.
        density: value of --density.
        width: value of --width.
        **fields: all other fields of `Workload` by name.

    Raises:
        click.UsageError: options exclude each other.
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """
    tokens = make_grid(video, grid)
    if density is not None and width is not None:
        raise click.UsageError("--density and --width exclude each other")
    if density is None and width is None:
        density = DEFAULT_DENSITY
    return Workload(tokens, density=density, width=width, **fields)
