"""One transformer block of Wan 1.3B's shape in diffusers: PyTorch's attention against sparse.

The block has 12 heads of 128, width 1,536 and a feed-forward of 8,960; random weights and latents,
bfloat16. Its self-attention runs by `torch.nn.functional.scaled_dot_product_attention` and then,
in the same process and in turn, under `enable_sparse_attention` (density 0.35, two
patterns, aligned tiles). Sizes: 81 frames of 832x480 (32,760 tokens) and 1280x720 (75,600).

    python -m benchmarks.diffusers_block [480p] [720p] [--threads 2] [--repeats 1] [--json PATH]

720p takes minutes and 8 GiB.
"""

# diffusers exports its names lazily, which pyright does not follow.
# pyright: reportPrivateImportUsage=false

import argparse
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from torch.overrides import TorchFunctionMode

import cinetile as ct
import cinetile.integrations.diffusers as ctd
from cinetile.lab.bench.machine import describe_machine

SIZES = {"480p": (81, 480, 832), "720p": (81, 720, 1280)}
POLICY = ct.SparsityPolicy(0.35, dense_steps=(), dense_layers=())
COLUMNS = (
    "size",
    "tokens",
    "SDPA s",
    "sparse s",
    "routing s",
    "SDPA / sparse",
    "SDPA / (sparse + routing)",
    "block s",
    "sparse block s",
    "gain of the block",
    "pairs visited",
)


class TimedAttention(TorchFunctionMode):
    """Adds up the time that large calls of PyTorch's attention take: cross-attention is small."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        started = time.perf_counter()
        output = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            query, key = kwargs.get("query"), kwargs.get("key")
            if query.shape == key.shape:
                self.seconds += time.perf_counter() - started
        return output


def measure(size: str, repeats: int) -> dict[str, Any]:
    """Times of one size: medians over the repeats, in seconds."""
    num_frames, height, width = SIZES[size]
    grid = ct.TokenGrid.from_video(num_frames, height, width)
    torch.manual_seed(0)
    transformer: Any = WanTransformer3DModel(
        num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=1, text_dim=4096
    )
    transformer = transformer.to(torch.bfloat16).eval()
    pipe = SimpleNamespace(transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler())
    pipe.scheduler.set_timesteps(1)
    call = {
        "hidden_states": torch.randn(1, 16, grid.frames, 2 * grid.height, 2 * grid.width).to(
            torch.bfloat16
        ),
        "timestep": pipe.scheduler.timesteps[:1],
        "encoder_hidden_states": torch.randn(1, 512, 4096).to(torch.bfloat16),
    }
    block_times: list[float] = []
    started = [0.0]
    transformer.blocks[0].register_forward_pre_hook(
        lambda *_: started.__setitem__(0, time.perf_counter())
    )
    transformer.blocks[0].register_forward_hook(
        lambda *_: block_times.append(time.perf_counter() - started[0])
    )

    rounds: list[dict[str, float]] = []
    implementation = ""
    with ctd.enable_sparse_attention(pipe, POLICY), torch.no_grad():
        transformer(**call)  # makes plans and compiles the routing
    for _ in range(repeats):
        block_times.clear()
        with torch.no_grad(), TimedAttention() as timed:
            transformer(**call)
        with ctd.enable_sparse_attention(pipe, POLICY) as handle, torch.no_grad():
            transformer(**call)
        (sparse,) = handle.summary().calls
        implementation = sparse.implementation
        rounds.append(
            {
                "sdpa_s": timed.seconds,
                "sparse_s": sparse.attention_seconds or 0.0,
                "routing_s": sparse.routing_seconds or 0.0,
                "block_s": block_times[0],
                "sparse_block_s": block_times[1],
                "visited": sparse.visited,
            }
        )
    medians = {name: statistics.median(entry[name] for entry in rounds) for name in rounds[0]}
    return {
        "size": size,
        "tokens": grid.num_tokens,
        **medians,
        "call_speedup": medians["sdpa_s"] / medians["sparse_s"],
        "call_speedup_with_routing": medians["sdpa_s"]
        / (medians["sparse_s"] + medians["routing_s"]),
        "block_speedup": medians["block_s"] / medians["sparse_block_s"],
        "implementation": implementation,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", help=f"some of {', '.join(SIZES)}; all by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = tuple(options.sizes) or tuple(SIZES)
    if set(sizes) - set(SIZES):
        parser.error(f"sizes must be some of {', '.join(SIZES)}, got {', '.join(sizes)}")
    torch.set_num_threads(options.threads)
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    results = []
    for size in sizes:
        result = measure(size, options.repeats)
        results.append(result)
        cells = (
            size,
            f"{result['tokens']:,}",
            *(f"{result[name]:.2f}" for name in ("sdpa_s", "sparse_s", "routing_s")),
            f"{result['call_speedup']:.2f}",
            f"{result['call_speedup_with_routing']:.2f}",
            *(f"{result[name]:.2f}" for name in ("block_s", "sparse_block_s", "block_speedup")),
            f"{result['visited']:.1%}",
        )
        print("| " + " | ".join(cells) + " |", flush=True)
    implementations = ", ".join(sorted({entry["implementation"] for entry in results}))
    print(f"\n{implementations}, {options.threads} threads, torch {torch.__version__}")
    if options.json:
        report = {
            "machine": describe_machine().to_dict(),
            "threads": options.threads,
            "rows": results,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
