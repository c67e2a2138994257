"""What a candidate keeps for sampled query rows, and the candidates that upstream probes."""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from cinetile.grid import TokenGrid
from cinetile.masks import Mask, svg_mask
from cinetile.masks.mask import keeps
from cinetile.placement import restore
from cinetile.plans import TilePlan
from cinetile.plans.picture import FULL, SKIPPED

_FRAMES_OF_UPSTREAM = {"wan": 2.0, "hunyuan": 1.5, "cogvideox": 1.5}


def svg_probe_masks(
    grid: TokenGrid, model: Literal["wan", "hunyuan", "cogvideox"] = "wan"
) -> tuple[Mask, Mask]:
    """The bands that Sparse VideoGen probes with, whatever it then runs, as exact masks.

    Bands of two frames for Wan and of one and a half for HunyuanVideo and CogVideoX, with the sink
    and the text of `svg_mask`. They are not upstream's bit for bit: upstream keeps whole blocks of
    128 x 128 tokens whose block indices differ by less than `width // 128`, so its band ends 1 to
    255 tokens earlier, by where the query stands in its block. For CogVideoX upstream also counts
    the spatial blocks from the first text token, and its temporal probe has no text at all.

    Args:
        grid: the tokens.
        model: "wan", "hunyuan" or "cogvideox".
    """
    width = int(_FRAMES_OF_UPSTREAM[model] * grid.tokens_per_frame)
    return (
        svg_mask(grid, "spatial", width=width, model=model),
        svg_mask(grid, "temporal", width=width, model=model),
    )


def kept_keys(candidate: Mask | TilePlan, rows: Int[Array, " rows"]) -> Bool[Array, "rows tokens"]:
    """Which keys some query rows keep; rows and keys in frame-major order.

    Args:
        candidate: a mask keeps its own pairs, a plan those that it computes.
        rows: query positions; may be traced.
    """
    mask = candidate.mask if isinstance(candidate, TilePlan) else candidate
    grid, num_tokens = mask.grid, mask.num_tokens
    query_position = np.empty(num_tokens, np.int32)
    query_position[mask.query_order.indices(grid)] = np.arange(num_tokens, dtype=np.int32)
    edges = jnp.asarray(np.stack(candidate.row_edges(query_position), axis=1))[rows]
    prefix, low, high = (edges[:, column, None] for column in range(3))
    kept = keeps(jnp.arange(num_tokens), prefix, low, high)
    if isinstance(candidate, TilePlan):
        query_tile = jnp.asarray(query_position)[rows] // candidate.block_q
        tiles = jnp.asarray(candidate.tile_map())[query_tile]
        states = jnp.repeat(tiles, candidate.block_kv, axis=1)[:, :num_tokens]
        kept = (states != SKIPPED) & (kept | (states == FULL))
    return restore(kept, mask.key_order, grid, axis=1)
