"""Checks of the arguments that `attention`, routing and layers share."""

from collections.abc import Sequence

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from cinetile import _checks
from cinetile.grid import TokenGrid
from cinetile.masks import Mask

AnyArray = Array | np.ndarray

_DTYPES = ("float32", "bfloat16", "float16")
_AXES = ("batch", "tokens", "heads", "head_dim")


def check_arrays(query: AnyArray, key: AnyArray, value: AnyArray, grid: TokenGrid) -> None:
    """Checks the query, key and value of self-attention on `grid`.

    Raises:
        TypeError: one is no array, or has a dtype that attention does not take.
        ValueError: shapes or dtypes do not fit each other or the grid.
    """
    for name, array in (("query", query), ("key", key), ("value", value)):
        if not isinstance(array, jax.Array | np.ndarray):
            raise TypeError(f"{name} must be an array, got {type(array).__name__}")
        if array.ndim != 4:
            raise ValueError(f"{name} must have the axes {_AXES}, got shape {array.shape}")
        if str(array.dtype) not in _DTYPES:
            raise TypeError(f"{name} must be one of {', '.join(_DTYPES)}, got {array.dtype}")
        if array.shape[1] != query.shape[1]:
            raise ValueError(
                f"{name} must have as many tokens as query, {query.shape[1]:,}, got "
                f"{array.shape[1]:,}; only self-attention can be sparse"
            )
        if array.shape != query.shape or array.dtype != query.dtype:
            raise ValueError(
                f"{name} must have the shape and dtype of query, {query.shape} {query.dtype}, "
                f"got {array.shape} {array.dtype}"
            )
        if 0 in array.shape:
            raise ValueError(f"{name} must not be empty, got shape {array.shape}")
    if query.shape[1] != grid.num_tokens:
        raise ValueError(
            f"query, key and value must have the tokens of the plan's grid, {grid}, "
            f"got {query.shape[1]:,}; only self-attention can be sparse"
        )


def check_scale(scale: float | None, head_dim: int) -> float:
    """Returns the factor on the logits, by default one over the root of the head size.

    Raises:
        TypeError: it is no number.
        ValueError: it is not from 1e-30 to 1e30, beyond which float32 logits vanish or overflow.
    """
    if scale is None:
        return head_dim**-0.5
    number = _checks.positive("scale", scale)
    if not 1e-30 <= number <= 1e30:
        raise ValueError(f"scale must lie in [1e-30, 1e30], got {number}")
    return number


def check_prompt_length(
    prompt_length: int | Int[AnyArray, "*batch"] | None, batch: int, masks: Sequence[Mask]
) -> Int[Array, " batch"] | None:
    """Returns the prompt length of each batch row; None if `prompt_length` is None.

    Args:
        prompt_length: one number, or one for each batch row.
        batch: rows of the batch.
        masks: the masks of the call, all on one token grid.

    Raises:
        TypeError: the length is no integer.
        ValueError: it is out of range, has another shape, or the masks have no text or padded
            text of their own.
    """
    if prompt_length is None:
        return None
    text_tokens = masks[0].grid.text_tokens
    if not text_tokens:
        raise ValueError(f"prompt_length needs a grid with text tokens, got {masks[0].grid}")
    for mask in masks:
        if mask.key_order.padded_text:
            raise ValueError(
                f"prompt_length must be None for the {mask.name} mask, which was built with "
                "padded text; build it for the whole text"
            )
    if not hasattr(prompt_length, "dtype"):
        _checks.integer("prompt_length", prompt_length, minimum=0, maximum=text_tokens)
        return jnp.full(batch, prompt_length, jnp.int32)
    lengths = jnp.asarray(prompt_length)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"prompt_length must be integers, got {lengths.dtype}")
    if lengths.shape not in ((), (batch,)):
        raise ValueError(f"prompt_length must have the shape {(batch,)}, got {lengths.shape}")
    if not isinstance(prompt_length, jax.core.Tracer):
        known = np.asarray(prompt_length)  # jnp would trace it inside jit
        lowest, highest = int(known.min()), int(known.max())
        if lowest < 0 or highest > text_tokens:
            raise ValueError(
                f"prompt_length must lie in [0, {text_tokens}], got {lowest} to {highest}"
            )
    return jnp.broadcast_to(jnp.clip(lengths, 0, text_tokens).astype(jnp.int32), (batch,))
