"""Text keys beyond a prompt whose length is known only at run time.

Most key orders put the text first, so the padding of a short prompt lies between the prompt and
the video.
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
        plan: gives the position of the text keys.
        key: key positions in the order of the plan's mask; NumPy or JAX.
        prompt_length: text tokens that are not padding.
    """
    start, stop = plan.mask.key_order.text_range(plan.grid)
    return (key < start + prompt_length) | (key >= stop)


def holds_text(plan: TilePlan, tile_kv: Int[np.ndarray, " tiles"]) -> Bool[np.ndarray, " tiles"]:
    """Which key tiles hold text; they must be masked if the prompt can be short."""
    start, stop = plan.mask.key_order.text_range(plan.grid)
    first, end = plan.geometry.key_range(tile_kv)
    return (first < stop) & (start < end)


def text_exists(
    grid: TokenGrid, prompt_lengths: Int[Array, " batch"]
) -> Bool[Array, "batch tokens"]:
    """Which tokens of each batch row are not padding, in frame-major order."""
    first_text = 0 if grid.text_first else grid.num_video_tokens
    number = jnp.arange(grid.num_tokens) - first_text
    return (number < prompt_lengths[:, None]) | (number >= grid.text_tokens)
