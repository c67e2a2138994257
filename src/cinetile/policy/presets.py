"""The presets: policies with published values where there are any."""

from typing import Any

# Published: all of it. Sparse VideoGen rounds the dense steps and layers down.
_SVG: dict[str, Any] = {
    "dense_layers": ((0, 0.03),),
    "patterns": ("svg-spatial", "svg-temporal"),
    "mode": "split",
    "probe": "svg",
    "first_tokens": 10_000,
    "fraction_rounding": "down",
}

PRESETS: dict[str, dict[str, Any]] = {
    # Ours: half of the pairs, and a warm-up and exact masks on the safe side.
    "conservative": {
        "density": 0.5,
        "dense_steps": 0.4,
        "dense_layers": ((0, 1), (0.95, None)),
        "mode": "split",
    },
    # Published for Wan 2.2 by the port to TPUs: 0.50 and 0.20, sparse in steps 11 to 39 of 40 and
    # layers 1 to 39 of 40. Ours: 0.35 for models with one expert.
    "moderate": {
        "density": 0.35,
        "rules": (
            {"density": 0.5, "expert": "high_noise"},
            {"density": 0.2, "expert": "low_noise"},
        ),
        "dense_steps": 0.275,
        "dense_layers": 1,
    },
    # Published: 0.35 is the mask of the case study's kernels, which keeps 38.87 % of the pairs at
    # 720p. Ours: the warm-up, and 0.2 for the expert that takes it in "moderate" too.
    "aggressive": {
        "density": 0.35,
        "rules": ({"density": 0.2, "expert": "low_noise"},),
        "dense_steps": 0.1,
        "dense_layers": 1,
    },
    # As Sparse VideoGen ships it for Wan 14B at 720p.
    "svg": {**_SVG, "density": 0.3, "dense_steps": ((0, 0.2),)},
    # As Sparse VideoGen ships it for HunyuanVideo at 720p.
    "svg-hunyuan": {**_SVG, "density": 0.25, "dense_steps": ((0, 0.1),)},
}
