"""What the heads attend to: `python -m training.tiny_wan.heads STATE`.

For every layer and head at several noise levels: the share of attention on other tokens of the
own frame and on the same place in other frames, against even attention; and which of the library's
two masks of one density changes the head's output less.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import cinetile as ct
from training.tiny_wan import flow, model, scenes, text

NOISE_LEVELS = (0.97, 0.9, 0.7, 0.4, 0.15)
GRID = ct.TokenGrid(scenes.FRAMES, flow.TOKENS_A_SIDE, flow.TOKENS_A_SIDE)


def capture(
    system: flow.System, params: flow.Params, latents: Tensor, moment: Tensor, ids: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of self-attention by layer, [batch, heads, tokens, head_dim]."""
    layers = []

    def watching(
        weights: flow.Params,
        hidden: Tensor,
        modulation: Tensor,
        words: Tensor,
        cosines: Tensor,
        sines: Tensor,
        heads: int,
    ) -> Tensor:
        shift, scale = (weights["scale_shift_table"] + modulation)[:, :2].chunk(2, dim=1)
        inputs = model.self_attention_inputs(weights, hidden, shift, scale, cosines, sines, heads)
        query, key, value = (x.float().transpose(1, 2) for x in inputs)
        layers.append((query, key, value))
        return model.transformer_block(weights, hidden, modulation, words, cosines, sines, heads)

    replace(system, block=watching).velocity(params, latents, moment, ids)
    return layers


def table(
    system: flow.System, params: flow.Params, density: float, videos: int = 4
) -> list[dict[str, float]]:
    """One row for each noise level, layer and head.

    Args:
        system: everything but the weights.
        params: the weights.
        density: of both masks.
        videos: how many held-out videos the figures are means over.
    """
    rng = np.random.default_rng(0)
    chosen = scenes.held_out_scenes()[:: 48 // videos]
    rendered = np.stack([scenes.render(scene, rng, scenes.HARD) for scene in chosen])
    latents = torch.from_numpy(system.codec.encode(rendered)).float()
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
    ids = text.tokenize([scenes.caption(scene) for scene in chosen], system.words)

    tokens = torch.arange(GRID.num_tokens)
    frame, place = tokens // GRID.tokens_per_frame, tokens % GRID.tokens_per_frame
    others = ~torch.eye(GRID.num_tokens, dtype=torch.bool)
    own_frame = (frame[:, None] == frame) & others
    same_place = (place[:, None] == place) & others
    first_frame = (frame == 0).expand(GRID.num_tokens, -1)
    masks = {
        "spatial": torch.from_numpy(ct.spatial_mask(GRID, density=density).to_dense()),
        "temporal": torch.from_numpy(ct.temporal_mask(GRID, density=density).to_dense()),
    }
    rows = []
    for level in NOISE_LEVELS:
        mixed = (1 - level) * latents + level * noise
        layers = capture(system, params, mixed, torch.full((len(chosen),), level), ids)
        for layer, (query, key, value) in enumerate(layers):
            scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
            weights = scores.softmax(-1)
            dense = weights @ value
            errors = {
                name: (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value - dense)
                .square()
                .mean((0, 2, 3))
                for name, mask in masks.items()
            }
            shares = {
                name: (weights * area).sum(-1).mean((0, 2)) / area.float().mean()
                for name, area in (
                    ("own_frame", own_frame),
                    ("same_place", same_place),
                    ("first_frame", first_frame),
                )
            }
            for head in range(query.shape[1]):
                row = {"noise": level, "layer": layer, "head": head}
                row |= {name: float(share[head]) for name, share in shares.items()}
                row |= {name: float(error[head]) for name, error in errors.items()}
                rows.append(row)
    return rows


@torch.no_grad()
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state", type=Path, help="state.pt of a training run")
    parser.add_argument("--density", type=float, default=0.35)
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    params = torch.load(arguments.state)["average"]
    rows = table(flow.make_system(), params, arguments.density)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows) + "\n")
    print("shares are times even attention; error is that of a mask, spatial : temporal")
    for layer in range(flow.CONFIG.num_layers):
        for head in range(flow.CONFIG.num_attention_heads):
            mine = [row for row in rows if (row["layer"], row["head"]) == (layer, head)]
            picks = ["S" if row["spatial"] < row["temporal"] else "T" for row in mine]
            own, same, first = (
                float(np.mean([row[name] for row in mine]))
                for name in ("own_frame", "same_place", "first_frame")
            )
            ratio = float(np.exp(np.mean([np.log(r["spatial"] / r["temporal"]) for r in mine])))
            print(
                f"layer {layer} head {head}: own frame {own:.2f}, same place {same:.2f}, "
                f"first frame {first:.2f}, error {ratio:.2f}, picks {' '.join(picks)}"
            )
    temporal = float(np.mean([row["temporal"] < row["spatial"] for row in rows]))
    print(f"the temporal mask wins in {temporal:.0%} of heads and noise levels")


if __name__ == "__main__":
    main()
