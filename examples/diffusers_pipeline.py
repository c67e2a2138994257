"""A video by a diffusers pipeline, with its own attention and with sparse attention.

With `--tiny` the weights are random and nothing is fetched.
"""

# diffusers exports its names lazily, which pyright does not follow.
# pyright: reportPrivateImportUsage=false

import argparse
import time
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

import cinetile as ct
import cinetile.integrations.diffusers as ctd


def tiny_pipeline() -> Any:
    """Wan's text-to-video pipeline with a small transformer of random weights and nothing else."""
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        text_dim=32,
        ffn_dim=64,
        num_layers=3,
        rope_max_seq_len=64,
    )
    scheduler: Any = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    nothing: Any = None
    return WanPipeline(
        tokenizer=nothing,
        text_encoder=nothing,
        vae=nothing,
        scheduler=scheduler,
        transformer=transformer.eval(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    parser.add_argument("--tiny", action="store_true", help="random weights, nothing is fetched")
    parser.add_argument("--prompt", default="a lighthouse in a storm")
    parser.add_argument("--policy", default="moderate", help="a preset, or a policy's file")
    parser.add_argument("--frames", type=int)
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()

    is_file = options.policy.endswith((".json", ".yaml", ".yml"))
    policy = ct.SparsityPolicy.from_file(options.policy) if is_file else options.policy
    call: dict[str, Any] = {"output_type": "np", "prompt": options.prompt}
    pipe: Any
    if options.tiny:
        pipe = tiny_pipeline()
        embeddings = torch.randn(2, 1, 8, 32)
        call = {
            "output_type": "latent",
            "prompt_embeds": embeddings[0],
            "negative_prompt_embeds": embeddings[1],
        }
        defaults = {"num_frames": 33, "height": 128, "width": 192, "num_inference_steps": 6}
    else:
        pipe = DiffusionPipeline.from_pretrained(options.model, torch_dtype=torch.bfloat16)
        defaults = {"num_frames": 81, "height": 480, "width": 832, "num_inference_steps": 50}
    given = (options.frames, options.height, options.width, options.steps)
    for (name, default), value in zip(defaults.items(), given, strict=True):
        call[name] = default if value is None else value

    def generate() -> tuple[np.ndarray, float]:
        started = time.perf_counter()
        video = pipe(**call, generator=torch.Generator().manual_seed(0)).frames[0]
        return np.asarray(video, np.float32), time.perf_counter() - started

    dense, dense_seconds = generate()
    with ctd.enable_sparse_attention(pipe, policy) as handle:
        sparse, sparse_seconds = generate()
    print(handle.summary())
    difference = np.sqrt(np.mean((sparse - dense) ** 2) / np.mean(dense**2))
    print(f"dense {dense_seconds:.1f} s, sparse {sparse_seconds:.1f} s")
    print(f"relative difference of the results: {difference:.3g}")


if __name__ == "__main__":
    main()
