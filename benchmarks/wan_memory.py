"""Memory of one denoising step of Wan at a video size, with random weights.

`python -m benchmarks.wan_memory` compiles the step of Wan 2.1 1.3B for 81 frames of 832x480 pixels
and prints what the compiler plans; with `--run` it also runs the step and prints the peak of the
process. `--layers` makes the model shorter: only the weights grow with the layers.
"""

import argparse
import resource
import time

import equinox as eqx
import jax
import jax.numpy as jnp

from cinetile import TokenGrid
from cinetile.wan import DenseAttention, WanTransformer3DModel, WanTransformerConfig
from cinetile.wan.layers import pack_layers

_GIB = 2**30
_TEXT_TOKENS = 512


def main() -> None:
    """Measures, and prints lines of text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--video", type=int, nargs=3, default=(81, 480, 832))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--run", action="store_true")
    arguments = parser.parse_args()

    config = WanTransformerConfig(num_attention_heads=12, ffn_dim=8960, num_layers=arguments.layers)
    frames, height, width = arguments.video
    grid = TokenGrid.from_video(frames, height, width)
    attention = DenseAttention.on(grid, arguments.dtype)

    def step(
        model: WanTransformer3DModel, latents: jax.Array, timestep: jax.Array, text: jax.Array
    ) -> jax.Array:
        return model(latents, timestep, text, attention=attention)

    @jax.jit
    def build() -> WanTransformer3DModel:
        model = WanTransformer3DModel(config, key=jax.random.key(0), dtype=arguments.dtype)
        return eqx.tree_at(lambda one: one.blocks, model, pack_layers(model.blocks))

    model = build() if arguments.run else jax.eval_shape(build)
    inputs = (
        jnp.zeros((1, 16, grid.frames, 2 * grid.height, 2 * grid.width), jnp.float32),
        jnp.full((1,), 900.0),
        jnp.zeros((1, _TEXT_TOKENS, config.text_dim), jnp.float32),
    )
    compiled = jax.jit(step).lower(model, *inputs).compile()
    analysis = compiled.memory_analysis()
    print(f"{grid}; {arguments.layers} layers, {arguments.dtype}")
    print(f"weights and inputs {analysis.argument_size_in_bytes / _GIB:.2f} GiB")
    print(f"intermediate       {analysis.temp_size_in_bytes / _GIB:.2f} GiB")
    if arguments.run:
        started = time.perf_counter()
        compiled(model, *inputs).block_until_ready()
        print(f"step               {time.perf_counter() - started:.0f} s")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"peak of the process {peak:.2f} GiB")


if __name__ == "__main__":
    main()
