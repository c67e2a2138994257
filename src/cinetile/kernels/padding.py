"""Text keys beyond a prompt whose length is known at run time alone.

Masks put the text where their key order wants it, mostly in front, so what a short prompt leaves
unused is a hole among the keys: from the prompt's end to the text's.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from cinetile.grid import TokenGrid
from cinetile.plans import TilePlan


def key_exists(plan: TilePlan, key: Any, prompt_length: Any) -> Any:
    """Whether a key is video or one of the first `prompt_length` text tokens.

    Args:
        plan: says where the text keys stand.
        key: key positions in the order of the plan's mask; NumPy or JAX.
        prompt_length: text tokens that exist.
    """
    start, stop = plan.mask.key_order.text_range(plan.grid)
    return (key < start + prompt_length) | (key >= stop)


def holds_text(plan: TilePlan, tile_kv: Int[np.ndarray, " tiles"]) -> Bool[np.ndarray, " tiles"]:
    """Which key tiles hold text, and so must be masked where a prompt may be short."""
    start, stop = plan.mask.key_order.text_range(plan.grid)
    first, end = plan.geometry.key_range(tile_kv)
    return (first < stop) & (start < end)


def text_exists(
    grid: TokenGrid, prompt_lengths: Int[Array, " batch"]
) -> Bool[Array, "batch tokens"]:
    """Which tokens of each batch row are no padding, in frame-major order."""
    first_text = 0 if grid.text_first else grid.num_video_tokens
    number = jnp.arange(grid.num_tokens) - first_text
    return (number < prompt_lengths[:, None]) | (number >= grid.text_tokens)
