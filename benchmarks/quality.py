"""Quality against density on the small checkpoint: the table and the plot of docs/quality.md.

Held-out captions are rendered with dense attention and under policies that differ in density, in
what becomes of boundary tiles, in the masks, in the sink and in routing, from the same noise. Every
frame is compared with the dense one; the caption check says how many videos still show what their
captions ask for.

    python -m benchmarks.quality [--prompts 8] [--seeds 2] [--steps 20] [--json PATH]
        [--picture PNG]
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cinetile as ct
from cinetile.lab.bench import describe_machine
from cinetile.lab.canvas import Canvas, require_matplotlib
from cinetile.layer.layer_plan import plan_layer
from cinetile.models.wan import WanPipeline, small_checkpoint
from training.tiny_wan import caption_check, scenes

DENSITIES = (0.15, 0.25, 0.35, 0.5, 0.65)
ROUTED_ON_ALL_ROWS = 10**6
VARIANTS: dict[str, dict[str, Any]] = {
    "aligned": {},
    "split": {"mode": "split"},
    "aligned, no sink": {"sink_frames": 0},
    "split, no sink": {"mode": "split", "sink_frames": 0},
    "upstream masks": {"mode": "split", "patterns": ("svg-spatial", "svg-temporal")},
    "split, oracle routing": {"mode": "split", "num_samples": ROUTED_ON_ALL_ROWS},
    "split, all spatial": {"mode": "split", "patterns": ("spatial",)},
}
COLOURS = ("#0072b2", "#e69f00", "#56b4e9", "#f0a35c", "#009e73", "#cc79a7", "#9aa0a6")
COLUMNS = (
    "masks",
    "density",
    "pairs kept",
    "visited",
    "PSNR mean",
    "worst",
    "SSIM",
    "FLIP",
    "captions",
)


@dataclass(frozen=True)
class Row:
    """Figures of one policy; metrics are means over all frames of all videos.

    Attributes:
        variant: one of `VARIANTS`.
        density: of the bands.
        kept: share of all pairs that are kept in sparse calls, sink included.
        visited: pairs of the visited tiles, as a share of all, in sparse calls.
        saved: attention work that the whole run saves, warm-up included.
        psnr: decibels against the dense video.
        psnr_worst: of the worst frame of all videos.
        ssim: likewise, mean.
        flip: likewise, mean.
        captions: share of the five attributes of the captions that the videos show.
        time: denoising time over that of dense attention; means little on a model this small.
    """

    variant: str
    density: float
    kept: float
    visited: float
    saved: float
    psnr: float
    psnr_worst: float
    ssim: float
    flip: float
    captions: float
    time: float

    def line(self) -> str:
        cells = (
            self.variant,
            f"{self.density}",
            f"{self.kept:.0%}",
            f"{self.visited:.0%}",
            f"{self.psnr:.1f}",
            f"{self.psnr_worst:.1f}",
            f"{self.ssim:.3f}",
            f"{self.flip:.3f}",
            f"{self.captions:.0%}",
        )
        return "| " + " | ".join(cells) + " |"


class Videos:
    """Renders the chosen captions under a policy, several seeds in turn."""

    def __init__(self, prompts: int, seeds: int, steps: int) -> None:
        self.pipe = WanPipeline.from_pretrained(small_checkpoint())
        held_out = scenes.held_out_scenes()
        self.scenes = held_out[:: len(held_out) // prompts][:prompts]
        self.seeds, self.steps = seeds, steps
        self.plan = self.pipe.plan(scenes.caption(self.scenes[0]))

    def render(self, policy: ct.SparsityPolicy | None) -> tuple[np.ndarray, float]:
        """Videos `[seeds * prompts, frames, height, width, 3]`, and the time to denoise them."""
        videos, seconds = [], 0.0
        for seed in range(self.seeds):
            output = self.pipe(
                [scenes.caption(scene) for scene in self.scenes],
                num_inference_steps=self.steps,
                seed=seed,
                policy=policy,
                warm_up=seed == 0,
            )
            videos.append(np.asarray(output.frames))
            seconds += sum(output.step_seconds)
        return np.concatenate(videos), seconds

    def captions(self, videos: np.ndarray) -> float:
        """The share of the captions' attributes that the videos show."""
        shares = caption_check.score(videos, self.scenes * self.seeds)
        return float(np.mean([shares[name] for name in caption_check.ATTRIBUTES]))


def measure(videos: Videos, variants: list[str]) -> tuple[list[Row], float]:
    """The rows, and the dense videos' share of right attributes."""
    dense, dense_seconds = videos.render(None)
    frames = dense.reshape(-1, *dense.shape[2:])
    rows = []
    for variant in variants:
        for density in DENSITIES:
            policy = ct.SparsityPolicy(density, **VARIANTS[variant])
            sparse, seconds = videos.render(policy)
            grid, steps = videos.plan.size.grid, videos.steps
            layers = videos.pipe.transformer.config.num_layers
            work = ct.expected_work(policy, grid, num_steps=steps, num_layers=layers)
            plans = plan_layer(policy, grid, num_steps=steps, num_layers=layers).plans[1:]
            changed = sparse.reshape(frames.shape)
            psnr = ct.metrics.psnr(changed, frames)
            rows.append(
                Row(
                    variant,
                    density,
                    float(np.mean([plan.stats.kept_fraction for plan in plans])),
                    work.visited or 1.0,
                    work.saved,
                    float(psnr.mean()),
                    float(psnr.min()),
                    float(ct.metrics.ssim(changed, frames).mean()),
                    float(ct.metrics.flip(changed, frames).mean()),
                    videos.captions(sparse),
                    seconds / dense_seconds,
                )
            )
            print(rows[-1].line(), flush=True)
    return rows, videos.captions(dense)


def draw(rows: list[Row], dense_captions: float, path: Path) -> None:
    """Quality over the share of pairs that are kept, one line for each variant."""
    require_matplotlib()
    canvas = Canvas(11.0, 5.0)
    panels = (
        ("psnr", "PSNR against dense, dB", 0.8),
        ("flip", "FLIP against dense (0: equal)", 4.3),
        ("captions", "attributes of the caption shown", 7.8),
    )
    for name, label, left in panels:
        axes = canvas.axes(left, 0.6, 2.75, 2.9)
        axes.set_title(label, fontsize=10, loc="left")
        for variant, colour in zip(VARIANTS, COLOURS, strict=True):
            mine = [row for row in rows if row.variant == variant]
            if mine:
                axes.plot(
                    [row.kept for row in mine],
                    [getattr(row, name) for row in mine],
                    color=colour,
                    marker="o",
                    markersize=3.5,
                    linestyle="--" if "no sink" in variant else "-",
                    label=variant,
                )
        if name == "captions":
            axes.axhline(dense_captions, color="#111111", linewidth=0.8, label="dense")
        axes.set_xlabel("pairs kept in sparse calls", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    handles, labels = canvas.figure.axes[-1].get_legend_handles_labels()
    canvas.figure.legend(
        handles,
        labels,
        loc="lower center",
        bbox_to_anchor=canvas.point(canvas.width / 2, canvas.height - 0.1),
        ncols=4,
        fontsize=9,
        frameon=False,
    )
    canvas.save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--variants", default=";".join(VARIANTS), help="names with ; between them")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    variants = arguments.variants.split(";")
    for variant in variants:
        if variant not in VARIANTS:
            parser.error(f"--variants must hold names of {'; '.join(VARIANTS)}, got {variant!r}")
    if arguments.picture:
        require_matplotlib()
    ct.metrics.require_metrics()
    videos = Videos(arguments.prompts, arguments.seeds, arguments.steps)
    machine = describe_machine()
    print(
        f"{videos.plan.size.grid}, {arguments.prompts} captions x {arguments.seeds} seeds, "
        f"{arguments.steps} steps; {machine.cpu}",
        file=sys.stderr,
    )
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    rows, dense_captions = measure(videos, variants)
    print(f"dense: {dense_captions:.0%} of the captions' attributes")
    if arguments.json:
        document = {
            "machine": machine.to_dict(),
            "dense_captions": dense_captions,
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    if arguments.picture:
        draw(rows, dense_captions, arguments.picture)


if __name__ == "__main__":
    main()
