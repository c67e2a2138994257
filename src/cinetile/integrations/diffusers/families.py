"""What a family of video models is like: one description for each."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from cinetile import _checks
from cinetile.grid import TokenGrid
from cinetile.integrations.diffusers.tracking import StepFinder, step_by_timestep

HOWTO = "docs/howto/diffusers.md"
_PLACES = {"none": "not in the sequence", "first": "before the video", "last": "after the video"}


@dataclass(frozen=True)
class Call:
    """One call of a model, as a description sees it.

    Attributes:
        config: the model's configuration.
        arguments: arguments of its `forward`, by name.
    """

    config: Any
    arguments: Mapping[str, Any]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor among the arguments."""
        return tuple(self.arguments[name].shape)


VideoGrid = Callable[[Call], tuple[int, int, int]]
"""Frames, height and width of the video's tokens in a call."""


@dataclass(frozen=True)
class Family:
    """Where a model attends to itself, and on which tokens.

    Attributes:
        name: for tables and errors.
        models: names of the transformers' classes.
        pipelines: names of pipelines that it is meant for, for tables only: any pipeline with
            this transformer is accepted.
        self_attention: where the layers are, in the order in which they run: paths of modules
            in which `*` stands for the members of a list.
        video_grid: gives the grid of the video's tokens in a call.
        text: whether text tokens stand in the same sequence, before the video or after it.
        text_argument: the argument of `forward` whose second axis is that text.
        components: attributes of the pipeline that hold transformers. Where a pipeline has both of
            two, the first is the high-noise and the second the low-noise expert.
        step: tells the denoising step of a call.

    Raises:
        TypeError: names are not given as a tuple of strings, or a function cannot be called.
        ValueError: `self_attention` or `components` is empty, or `text` is none of the three.
    """

    name: str
    models: tuple[str, ...]
    pipelines: tuple[str, ...]
    self_attention: tuple[str, ...]
    video_grid: VideoGrid
    text: Literal["none", "first", "last"] = "none"
    text_argument: str = "encoder_hidden_states"
    components: tuple[str, ...] = ("transformer",)
    step: StepFinder = field(default=step_by_timestep)

    def __post_init__(self) -> None:
        for name in ("models", "pipelines", "self_attention", "components"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(module, str) for module in value):
                raise TypeError(f"{name} must be a tuple of strings, got {value!r}")
        for name in ("self_attention", "components"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        for name in ("video_grid", "step"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} must be a function, got {getattr(self, name)!r}")
        _checks.choice("text", self.text, tuple(_PLACES))

    def grid(self, call: Call) -> TokenGrid:
        """The tokens that self-attention sees in a call."""
        sizes: Any = self.video_grid(call)
        if not isinstance(sizes, tuple | list) or len(sizes) != 3:
            raise ValueError(
                f"video_grid of family {self.name} must give frames, height and width, "
                f"got {sizes!r}"
            )
        text_tokens = 0 if self.text == "none" else call.shape(self.text_argument)[1]
        return TokenGrid(*sizes, text_tokens=text_tokens, text_first=self.text == "first")

    def layers(self, model: Any) -> tuple[Any, ...]:
        """The self-attention modules of a model, in the order in which they run.

        Raises:
            ValueError: one of the paths leads to something without an attention processor, or all
                of them to nothing.
        """
        found: list[Any] = []
        for path in self.self_attention:
            modules = _resolve(model, path)
            if not all(hasattr(module, "processor") for module in modules):
                raise self._misplaced(path, model)
            found += modules
        if not found:
            raise self._misplaced(", ".join(self.self_attention), model)
        return tuple(found)

    def _misplaced(self, path: str, model: Any) -> ValueError:
        return ValueError(
            f"family {self.name} has its self-attention at {path}, but {type(model).__name__} has "
            "no attention processors there"
        )


def _resolve(module: Any, path: str) -> list[Any]:
    """What a path leads to; None stands for what is not there."""
    modules = [module]
    for name in path.split("."):
        if name == "*":
            modules = [
                member
                for module in modules
                for member in (module if isinstance(module, Iterable) else (None,))
            ]
        else:
            modules = [getattr(module, name, None) for module in modules]
    return modules


def _wan_grid(call: Call) -> tuple[int, int, int]:
    _, _, frames, height, width = call.shape("hidden_states")
    patch_frames, patch_height, patch_width = call.config.patch_size
    return frames // patch_frames, height // patch_height, width // patch_width


def _hunyuan_grid(call: Call) -> tuple[int, int, int]:
    _, _, frames, height, width = call.shape("hidden_states")
    patch = call.config.patch_size
    return frames // call.config.patch_size_t, height // patch, width // patch


def _cogvideox_grid(call: Call) -> tuple[int, int, int]:
    _, frames, _, height, width = call.shape("hidden_states")
    patch = call.config.patch_size
    return frames // (call.config.patch_size_t or 1), height // patch, width // patch


def _ltx_grid(call: Call) -> tuple[int, int, int]:
    if call.arguments.get("video_coords") is not None:
        return _grid_of_coordinates(call.arguments["video_coords"])
    sizes = [call.arguments.get(name) for name in ("num_frames", "height", "width")]
    frames, height, width = sizes
    if frames is None or height is None or width is None:
        raise ValueError(
            "LTX-Video's transformer was called without video_coords, and without num_frames, "
            f"height and width, by which its token grid is known, got {sizes}"
        )
    patch = call.config.patch_size
    return frames // call.config.patch_size_t, height // patch, width // patch


def _grid_of_coordinates(coordinates: torch.Tensor) -> tuple[int, int, int]:
    """The grid whose tokens have these times, heights and widths `[batch, 3, tokens]`."""
    places = coordinates[0].detach().cpu()
    axes = [torch.unique(axis) for axis in places]
    if not torch.equal(torch.cartesian_prod(*axes).T, places):
        raise ValueError(
            "LTX-Video's transformer was called with video_coords that are not those of one "
            "video, frame by frame: a sequence with further tokens, such as those of images, "
            "cannot be made sparse"
        )
    return len(axes[0]), len(axes[1]), len(axes[2])


FAMILIES: tuple[Family, ...] = (
    Family(
        name="Wan 2.1 and 2.2",
        models=("WanTransformer3DModel",),
        pipelines=("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline"),
        self_attention=("blocks.*.attn1",),
        video_grid=_wan_grid,
        components=("transformer", "transformer_2"),
    ),
    Family(
        name="HunyuanVideo",
        models=("HunyuanVideoTransformer3DModel",),
        pipelines=("HunyuanVideoPipeline", "HunyuanVideoImageToVideoPipeline"),
        self_attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        video_grid=_hunyuan_grid,
        text="last",
    ),
    Family(
        name="CogVideoX",
        models=("CogVideoXTransformer3DModel",),
        pipelines=(
            "CogVideoXPipeline",
            "CogVideoXImageToVideoPipeline",
            "CogVideoXVideoToVideoPipeline",
        ),
        self_attention=("transformer_blocks.*.attn1",),
        video_grid=_cogvideox_grid,
        text="first",
    ),
    Family(
        name="LTX-Video",
        models=("LTXVideoTransformer3DModel",),
        pipelines=("LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline"),
        self_attention=("transformer_blocks.*.attn1",),
        video_grid=_ltx_grid,
    ),
)
"""The families that are known, in the order of the table."""


def family_of(model: Any) -> Family | None:
    """The family that a model's class or one of its bases belongs to; None if unknown."""
    names = {cls.__name__ for cls in type(model).__mro__}
    return next((family for family in FAMILIES if names & set(family.models)), None)


def unknown_model(pipe: Any, found: list[str]) -> ValueError:
    """The error that tells what is supported and how to describe what is not."""
    if family_of(pipe):
        return ValueError(
            f"pipe must be the pipeline, by whose scheduler the steps are known, got its "
            f"transformer, {type(pipe).__name__}"
        )
    known = "; ".join(f"{family.name} ({', '.join(family.models)})" for family in FAMILIES)
    return ValueError(
        f"pipe must have a transformer of a supported family, got {type(pipe).__name__} with "
        f"{', '.join(found) or 'no transformer'}. Supported: {known}. For another model pass "
        f"family=cinetile.integrations.diffusers.Family(...), which takes a page: see {HOWTO}"
    )


def family_table() -> str:
    """The supported families as a table in Markdown."""
    lines = ["| family | pipelines | self-attention | text |", "|---|---|---|---|"]
    for family in FAMILIES:
        pipelines = ", ".join(f"`{name}`" for name in family.pipelines)
        layers = ", ".join(f"`{path}`" for path in family.self_attention)
        lines.append(f"| {family.name} | {pipelines} | {layers} | {_PLACES[family.text]} |")
    return "\n".join(lines) + "\n"
