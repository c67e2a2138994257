"""The diffusion transformer of Wan 2.1 and 2.2 (text to video)."""

import math
import os
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from cinetile import _checks
from cinetile.grid import TokenGrid
from cinetile.models.rotary import rotary_tables
from cinetile.models.wan.attention import DenseAttention, SelfAttention
from cinetile.models.wan.layers import Linear, layer_norm, random_weight, scan_layers
from cinetile.models.wan.transformer_config import WanTransformerConfig
from cinetile.models.wan.transformer_layers import Block, ConditionEmbedder, PatchEmbedding
from cinetile.models.wan.weights import Part, WeightFiles, load_model
from cinetile.parallel.layout import ArrayLayout

# Where the names of parameters in the files differ from the attributes here.
_RENAMES = {
    ".to_out.": ".to_out.0.",
    ".ffn.up.": ".ffn.net.0.proj.",
    ".ffn.down.": ".ffn.net.2.",
}


class WanTransformer3DModel(eqx.Module):
    """Predicts the flow of latents at a time step, given the embedding of a text.

    The parameters are named as in diffusers. The parameters of the blocks are stacked along a
    leading layer axis, and the forward pass scans over it, so compile time does not grow with
    depth. The constructor makes random weights; `load` reads trained weights.

    Args:
        config: the sizes.
        key: random key of the weights.
        dtype: "float32" or "bfloat16"; norms, modulation and the time embedding stay in float32.
    """

    class_name: ClassVar[str] = "WanTransformer3DModel"

    patch_embedding: PatchEmbedding
    condition_embedder: ConditionEmbedder
    blocks: Block
    proj_out: Linear
    scale_shift_table: Float[Array, "1 2 dim"]
    config: WanTransformerConfig = eqx.field(static=True)

    def __init__(
        self, config: WanTransformerConfig, *, key: PRNGKeyArray, dtype: str = "float32"
    ) -> None:
        kind = jnp.dtype(_checks.choice("dtype", dtype, ("float32", "bfloat16")))
        patch, condition, blocks, out, table = jax.random.split(key, 5)
        self.config = config
        self.patch_embedding = PatchEmbedding(config, key=patch, dtype=kind)
        self.condition_embedder = ConditionEmbedder(config, key=condition, dtype=kind)
        self.blocks = eqx.filter_vmap(lambda block_key: Block(config, key=block_key, dtype=kind))(
            jax.random.split(blocks, config.num_layers)
        )
        self.proj_out = Linear(
            config.dim, config.out_channels * math.prod(config.patch_size), key=out, dtype=kind
        )
        self.scale_shift_table = random_weight(
            table, (1, 2, config.dim), config.dim, jnp.dtype("float32")
        )

    @classmethod
    def deferred(
        cls, folder: str | os.PathLike[str], *, dtype: str | None = None
    ) -> "Part[WanTransformerConfig, WanTransformer3DModel]":
        """Like `load`, but reads only the configuration and the headers of the files for now."""
        config = WanTransformerConfig.read(folder)
        files = WeightFiles(folder)
        chosen = files.compute_dtype if dtype is None else dtype
        load = load_model(
            lambda: cls(config, key=jax.random.key(0), dtype=chosen),
            files,
            stacked="blocks",
            renames=_RENAMES,
        )
        return Part(config, chosen, load)

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], *, dtype: str | None = None
    ) -> "WanTransformer3DModel":
        """Loads `config.json` and the safetensors of a folder that diffusers wrote.

        Args:
            folder: the pipeline's `transformer` folder.
            dtype: "float32" or "bfloat16"; by default as stored. Tensors are cast while reading.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: the configuration is not implemented, a file is damaged, or a tensor is
                missing, unknown or misshapen.
        """
        return cls.deferred(folder, dtype=dtype).get()

    @property
    def dtype(self) -> str:
        """Compute dtype."""
        return str(self.patch_embedding.weight.dtype)

    def grid(self, latent_shape: tuple[int, ...]) -> TokenGrid:
        """The token grid of latents `[batch, channels, frames, height, width]`.

        Raises:
            ValueError: the number of channels differs, or a size is not a multiple of the patch
                size, or is too large.
        """
        if len(latent_shape) != 5 or latent_shape[1] != self.config.in_channels:
            raise ValueError(
                f"hidden_states must be [batch, {self.config.in_channels}, frames, height, width], "
                f"got shape {tuple(latent_shape)}"
            )
        sizes = []
        for name, size, step in zip(
            ("frames", "height", "width"), latent_shape[2:], self.config.patch_size, strict=True
        ):
            most = self.config.rope_max_seq_len * step
            if size % step or not 0 < size <= most:
                raise ValueError(
                    f"hidden_states' {name} must be a multiple of {step} from {step} to {most}, "
                    f"got {size}"
                )
            sizes.append(size // step)
        return TokenGrid(*sizes)

    def __call__(
        self,
        hidden_states: Float[Array, "batch channels frames height width"],
        timestep: Float[Array, " batch"] | Int[Array, " batch"],
        encoder_hidden_states: Float[Array, "batch text text_dim"],
        *,
        attention: SelfAttention | None = None,
        step: int | Int[Array, ""] = 0,
        rng: PRNGKeyArray | None = None,
        return_record: bool = False,
        layout: ArrayLayout | None = None,
    ) -> Any:
        """Predicts the flow.

        Args:
            hidden_states: noisy latents.
            timestep: time step of each batch row, in [0, 1000].
            encoder_hidden_states: text embeddings, zero where the prompt is padded.
            attention: the self-attention; dense by default.
            step: index of the denoising step, for `attention`; may be traced.
            rng: random key for `attention`, the same at every layer; a fixed key by default.
            return_record: whether to return what `attention` recorded, stacked over the layers.
            layout: how the tokens are sharded over a mesh; None for one device. The weights and
                `attention` must be on the same mesh.

        Returns:
            The flow in the compute dtype, `[batch, out_channels, frames, height, width]`; with
            `return_record` also the records.

        Raises:
            ValueError: a shape does not fit the model.
        """
        grid = self.grid(hidden_states.shape)
        attend = DenseAttention.on(grid, self.dtype) if attention is None else attention
        rng = jax.random.key(0) if rng is None else rng
        cosine, sine = rotary_tables(
            grid.frames,
            grid.height,
            grid.width,
            self.config.attention_head_dim,
            self.config.rope_theta,
        )
        rotary = (jnp.asarray(cosine), jnp.asarray(sine))
        text = encoder_hidden_states.astype(self.dtype)
        time, modulation, text = self.condition_embedder(timestep.astype(jnp.float32), text)

        def spread(x: Array) -> Array:
            return x if layout is None else layout.constrained(x, layout.fitting(x.shape[:2]))

        def run_block(x: Array, layer: Array, block: Block) -> tuple[Array, Any]:
            def attend_here(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
                output = attend(
                    query,
                    key,
                    value,
                    step=jnp.asarray(step, jnp.int32),
                    layer=layer,
                    rng=rng,
                    return_record=return_record,
                )
                return output if return_record else (output, None)

            x, record = block(spread(x), text, modulation, rotary, attend_here, layout)
            return spread(x), record

        x, records = scan_layers(
            run_block, spread(self.patch_embedding(hidden_states)), self.blocks
        )
        shift, scale = jnp.split(self.scale_shift_table + time[:, None], 2, axis=1)
        normal = (layer_norm(x, self.config.eps) * (1 + scale) + shift).astype(self.dtype)
        flow = self._unpatchify(self.proj_out(normal), grid)
        return (flow, records) if return_record else flow

    def _unpatchify(
        self, tokens: Float[Array, "batch tokens features"], grid: TokenGrid
    ) -> Float[Array, "batch channels frames height width"]:
        sizes, patch = (grid.frames, grid.height, grid.width), self.config.patch_size
        pieces = tokens.reshape(tokens.shape[0], *sizes, *patch, -1)
        whole = (size * step for size, step in zip(sizes, patch, strict=True))
        return pieces.transpose(0, 7, 1, 4, 2, 5, 3, 6).reshape(tokens.shape[0], -1, *whole)
