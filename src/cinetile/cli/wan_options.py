"""Options that the commands that run a Wan pipeline share."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from jax.sharding import Mesh

from cinetile.cli.options import refuse_without_effect, stacked
from cinetile.cli.wording import counted

if TYPE_CHECKING:
    from cinetile.models.wan import CallPlan, WanPipeline

model_options = stacked(
    click.option(
        "--model",
        metavar="DIR",
        type=click.Path(path_type=Path),
        help="Folder in diffusers' layout.  [default: the bundled small checkpoint]",
    ),
    click.option(
        "--dtype",
        type=click.Choice(("float32", "bfloat16")),
        help="Dtype to compute in.  [default: dtype of the stored weights]",
    ),
)

prompt_options = stacked(
    click.option("--negative-prompt", metavar="TEXT", help="Prompt that guidance moves away from."),
    click.option("--steps", type=int, help="Denoising steps.  [default: the model's]"),
    click.option(
        "--guidance-scale",
        type=float,
        help="Weight of the prompt against the negative prompt; 1 disables guidance.  "
        "[default: the model's]",
    ),
    click.option(
        "--guidance-scale-2", type=float, help="Guidance scale of Wan 2.2's low-noise expert."
    ),
    click.option(
        "--flow-shift", type=float, help="Shift of the noise levels.  [default: the model's]"
    ),
    click.option("--height", type=int, help="Height in pixels.  [default: the model's]"),
    click.option("--width", type=int, help="Width in pixels.  [default: the model's]"),
    click.option("--num-frames", type=int, help="Frames.  [default: the model's]"),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of the noise."),
)


def open_pipeline(
    model: Path | None, dtype: str | None, flow_shift: float | None, mesh: Mesh | None = None
) -> "WanPipeline":
    """Opens the pipeline that the options of a command name, without reading weights."""
    from cinetile.models.wan import WanPipeline, small_checkpoint

    pipe = WanPipeline.from_pretrained(
        small_checkpoint() if model is None else model,
        dtype=dtype,
        keep_text_encoder=False,
        mesh=mesh,
    )
    if flow_shift is not None:
        pipe.scheduler = pipe.scheduler.with_shift(flow_shift)
    return pipe


def refuse_unused_negative_prompt(plan: "CallPlan") -> None:
    """Refuses --negative-prompt if no step is guided."""
    if plan.negative_prompts is None:
        refuse_without_effect(
            ("negative_prompt",), "has an effect only with a --guidance-scale above 1"
        )


def plan_in_words(plan: "CallPlan") -> str:
    """Describes the video to make; printed before a run, which may take long."""
    size, steps = plan.size, len(plan.schedule.timesteps)
    return (
        f"{counted(size.num_frames, 'frame')} of {size.width}x{size.height}, "
        f"{counted(size.grid.num_tokens, 'token')}, {counted(steps, 'step')}"
    )


def size_document(plan: "CallPlan") -> dict[str, Any]:
    """Returns the size of the video as JSON."""
    return dataclasses.asdict(plan.size) | {"tokens": plan.size.grid.num_tokens}


def size_facts(size: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the lines on the size for a table, from `size_document`."""
    return [
        ("video", f"{size['num_frames']} frames of {size['width']}x{size['height']}"),
        ("tokens", f"{size['tokens']:,}"),
    ]
