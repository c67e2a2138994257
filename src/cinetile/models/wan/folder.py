"""A pipeline's folder in diffusers' layout: everything is checked when it is opened."""

import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cinetile import _checks
from cinetile.models.wan.config import parse_config, read_json, require_class
from cinetile.models.wan.linear_codec import LinearVideoCodec
from cinetile.models.wan.schedulers import Scheduler, read_scheduler
from cinetile.models.wan.text_encoder import UMT5Config, UMT5EncoderModel
from cinetile.models.wan.tokenizer import PromptTokenizer
from cinetile.models.wan.transformer import WanTransformer3DModel
from cinetile.models.wan.transformer_config import WanTransformerConfig
from cinetile.models.wan.vae import AutoencoderKLWan
from cinetile.models.wan.weights import Part

VideoCodec = AutoencoderKLWan | LinearVideoCodec

_PIPELINE = "WanPipeline"
_PARTS = ("tokenizer", "text_encoder", "transformer", "transformer_2", "vae", "scheduler")
_CODECS = {kind.class_name: kind for kind in (AutoencoderKLWan, LinearVideoCodec)}


@dataclass(frozen=True)
class GenerationDefaults:
    """The defaults of a call, and the sizes that a checkpoint can make: `generation.json`.

    Attributes:
        height: pixels.
        width: pixels.
        num_frames: frames.
        num_inference_steps: denoising steps.
        guidance_scale: weight of the prompt against the negative prompt.
        max_sequence_length: tokens that prompts are padded to.
        negative_prompt: what guidance leads away from.
        fps: frames per second of a video file.
        trained_sizes: the sizes (num_frames, height, width) that the checkpoint was trained at;
            a call at another size warns. Empty where the folder does not say.
    """

    height: int = 480
    width: int = 832
    num_frames: int = 81
    num_inference_steps: int = 50
    guidance_scale: float = 5.0
    max_sequence_length: int = 512
    negative_prompt: str = ""
    fps: int = 16
    trained_sizes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for entry in fields(self):
            if entry.type in (int, "int"):
                _checks.integer(entry.name, getattr(self, entry.name), minimum=1)
        object.__setattr__(self, "trained_sizes", _sizes("trained_sizes", self.trained_sizes))
        object.__setattr__(
            self, "guidance_scale", _checks.finite("guidance_scale", self.guidance_scale)
        )


def _sizes(name: str, value: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, tuple | list):
        raise TypeError(f"{name} must be a list of [num_frames, height, width], got {value!r}")
    sizes = []
    for index, size in enumerate(value):
        if not isinstance(size, tuple | list) or len(size) != 3:
            raise ValueError(f"{name}[{index}] must be [num_frames, height, width], got {size!r}")
        sizes.append(tuple(_checks.integer(f"{name}[{index}]", n, minimum=1) for n in size))
    return tuple(sizes)


@dataclass(frozen=True, eq=False)
class PipelineParts:
    """The models and settings of a pipeline.

    Attributes:
        tokenizer: of the prompts.
        text_encoder: of the prompts.
        transformer: predicts the flow; with two experts, at high noise.
        vae: from latents to pixels.
        scheduler: solves the flow.
        transformer_2: the expert at low noise (Wan 2.2).
        boundary_ratio: noise level under which `transformer_2` takes over.
        defaults: of a call.
    """

    tokenizer: PromptTokenizer
    text_encoder: Part[UMT5Config, UMT5EncoderModel]
    transformer: Part[WanTransformerConfig, WanTransformer3DModel]
    vae: Part[Any, VideoCodec]
    scheduler: Scheduler
    transformer_2: Part[WanTransformerConfig, WanTransformer3DModel] | None = None
    boundary_ratio: float | None = None
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)


def _no_folder(folder: Path) -> str:
    """Tells how to get the folder, where a repository of the Hugging Face hub was named."""
    if folder.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", folder.as_posix()):
        shown = _checks.shown(os.fspath(folder))
        return f"model must be a folder in diffusers' layout, got {shown}"
    return (
        f"model must be a folder in diffusers' layout: there is no folder {folder}, and nothing is "
        f"downloaded. If that is a repository of the Hugging Face hub, run "
        f"`hf download {folder.as_posix()} --local-dir DIR` and give DIR"
    )


def open_folder(folder: str | os.PathLike[str], dtype: str | None = None) -> PipelineParts:
    """Reads a folder's configurations and the headers of its weights, but no weights yet.

    Args:
        folder: holds `model_index.json` and a folder for each part.
        dtype: of the transformers and the text encoder; by default as stored.

    Raises:
        FileNotFoundError: the folder or a file of it is missing.
        ImportError: safetensors or tokenizers is not installed.
        ValueError: a configuration is not implemented, or weights do not fit it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(_no_folder(folder))
    index_path = folder / "model_index.json"
    index = read_json(index_path)
    require_class(index, index_path, _PIPELINE)
    if index.get("expand_timesteps"):
        raise ValueError(f"{index_path}: expand_timesteps (Wan 2.2 TI2V) is not implemented")
    known = (*_PARTS, "boundary_ratio", "expand_timesteps")
    for name in index:
        if name not in known and not name.startswith("_"):
            raise ValueError(f"{index_path}: unknown part {_checks.shown(name)}")

    boundary_ratio = index.get("boundary_ratio")
    experts = [_expert(index, "transformer"), _expert(index, "transformer_2")]
    if not experts[0]:
        raise ValueError(f"{index_path}: transformer must be {WanTransformer3DModel.class_name}")
    if experts[1] and boundary_ratio is None:
        raise ValueError(f"{index_path}: transformer_2 needs a boundary_ratio")
    if boundary_ratio is not None:
        boundary_ratio = _checks.fraction(f"{index_path}: boundary_ratio", boundary_ratio)
        if not experts[1]:
            raise ValueError(f"{index_path}: boundary_ratio needs a transformer_2")

    defaults = GenerationDefaults()
    defaults_path = folder / "generation.json"
    if defaults_path.is_file():
        defaults = parse_config(GenerationDefaults, read_json(defaults_path), defaults_path)
    parts = PipelineParts(
        tokenizer=PromptTokenizer(folder / "tokenizer"),
        text_encoder=UMT5EncoderModel.deferred(folder / "text_encoder", dtype=dtype),
        transformer=WanTransformer3DModel.deferred(folder / "transformer", dtype=dtype),
        transformer_2=(
            WanTransformer3DModel.deferred(folder / "transformer_2", dtype=dtype)
            if experts[1]
            else None
        ),
        vae=_open_codec(folder / "vae"),
        scheduler=read_scheduler(folder / "scheduler"),
        boundary_ratio=boundary_ratio,
        defaults=defaults,
    )
    _check_together(parts)
    return parts


def _expert(index: dict[str, Any], name: str) -> bool:
    """Whether the index names a transformer here."""
    entry = index.get(name)
    return isinstance(entry, list) and entry[-1:] == [WanTransformer3DModel.class_name]


def _open_codec(folder: Path) -> Part[Any, VideoCodec]:
    path = folder / "config.json"
    return _CODECS[require_class(read_json(path), path, *_CODECS)].deferred(folder)


def _check_together(parts: PipelineParts) -> None:
    """Raises ValueError where two parts do not fit each other."""
    for name, expert in (
        ("transformer", parts.transformer),
        ("transformer_2", parts.transformer_2),
    ):
        if expert is None:
            continue
        pairs = (
            ("in_channels", expert.config.in_channels, "vae z_dim", parts.vae.config.z_dim),
            ("out_channels", expert.config.out_channels, "vae z_dim", parts.vae.config.z_dim),
            (
                "text_dim",
                expert.config.text_dim,
                "text_encoder d_model",
                parts.text_encoder.config.d_model,
            ),
            (
                "patch_size",
                expert.config.patch_size,
                "transformer patch_size",
                parts.transformer.config.patch_size,
            ),
        )
        for ours, value, theirs, wanted in pairs:
            if value != wanted:
                raise ValueError(f"{name} {ours} must be the {theirs} {wanted}, got {value}")
