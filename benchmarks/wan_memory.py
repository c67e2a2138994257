"""Memory of Wan 2.1 1.3B at a video size, with random weights, as XLA's compiler plans it.

`python -m benchmarks.wan_memory` compiles one denoising step and one chunk of the VAE's decoder for
81 frames of 832x480 pixels; with `--run` it also runs the step and prints the peak of the process.
`--layers` makes the transformer shorter: only the weights grow with the layers.
"""

import argparse
import resource
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from cinetile import TokenGrid
from cinetile.models.wan import (
    AutoencoderKLWan,
    AutoencoderKLWanConfig,
    DenseAttention,
    Tiling,
    WanTransformer3DModel,
    WanTransformerConfig,
)
from cinetile.models.wan.layers import pack_layers
from cinetile.models.wan.vae import decode_chunk

_GIB = 2**30
_TEXT_TOKENS = 512


def show(name: str, compiled: Any) -> None:
    """Prints what a compiled program needs."""
    plan = compiled.memory_analysis()
    weights, temporary = (
        size / _GIB for size in (plan.argument_size_in_bytes, plan.temp_size_in_bytes)
    )
    print(f"{name:32} weights and inputs {weights:.2f} GiB, intermediate {temporary:.2f} GiB")


def denoising(grid: TokenGrid, layers: int, dtype: str, run: bool) -> None:
    """Compiles one step of the transformer, and runs it if asked to."""
    config = WanTransformerConfig(num_attention_heads=12, ffn_dim=8960, num_layers=layers)
    attention = DenseAttention.on(grid, dtype)

    @jax.jit
    def build() -> WanTransformer3DModel:
        model = WanTransformer3DModel(config, key=jax.random.key(0), dtype=dtype)
        return eqx.tree_at(lambda transformer: transformer.blocks, model, pack_layers(model.blocks))

    @jax.jit
    def step(
        model: WanTransformer3DModel, latents: jax.Array, timestep: jax.Array, text: jax.Array
    ) -> jax.Array:
        return model(latents, timestep, text, attention=attention)

    model = build() if run else jax.eval_shape(build)
    inputs = (
        jnp.zeros((1, 16, grid.frames, 2 * grid.height, 2 * grid.width), jnp.float32),
        jnp.full((1,), 900.0),
        jnp.zeros((1, _TEXT_TOKENS, config.text_dim), jnp.float32),
    )
    compiled = step.lower(model, *inputs).compile()
    show(f"step, {layers} layers, {dtype}", compiled)
    if run:
        started = time.perf_counter()
        compiled(model, *inputs).block_until_ready()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"ran in {time.perf_counter() - started:.0f} s, peak of the process {peak:.2f} GiB")


def decoding(height: int, width: int) -> None:
    """Compiles one chunk after the first of the decoder, for so many latents."""
    config = AutoencoderKLWanConfig()
    vae = eqx.filter_eval_shape(lambda: AutoencoderKLWan(config, key=jax.random.key(0)))
    chunk = jax.ShapeDtypeStruct((1, 1, height, width, config.z_dim), jnp.float32)

    def decode(vae: AutoencoderKLWan, x: jax.Array, kept: Any) -> Any:
        return decode_chunk((vae, x), kept)

    _, kept = jax.eval_shape(decode, vae, chunk, None)
    name = f"decoding, {config.scale_factor_spatial * width}x{config.scale_factor_spatial * height}"
    show(f"{name}, float32", jax.jit(decode).lower(vae, chunk, kept).compile())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--video", type=int, nargs=3, default=(81, 480, 832))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--run", action="store_true")
    arguments = parser.parse_args()

    grid = TokenGrid.from_video(*arguments.video)
    print(grid)
    denoising(grid, arguments.layers, arguments.dtype, arguments.run)
    tile = Tiling().divided(8)
    for size in ((tile.height, tile.width), (2 * grid.height, 2 * grid.width)):
        decoding(*size)


if __name__ == "__main__":
    main()
