"""`route_heads` assigns each head the pattern that changes its output least."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from cinetile import _checks
from cinetile.grid import TokenGrid
from cinetile.kernels.arguments import AnyArray, check_arrays, check_prompt_length, check_scale
from cinetile.kernels.padding import text_exists
from cinetile.masks import Mask
from cinetile.plans import TilePlan
from cinetile.routing.errors import pattern_errors
from cinetile.routing.probes import kept_keys

AnyKey = Key[Array, ""] | UInt32[Array, "2"]


class HeadRoutes(NamedTuple):
    """The pattern of each head and the error of each candidate pattern.

    Attributes:
        routes: index of the pattern with the smallest finite error, `[batch, heads]`; 0 where no
            error is finite.
        errors: mean squared error of each pattern's output against dense attention on the
            sampled rows, float32, `[batch, heads, patterns]`. Not finite where query, key or value
            hold inf or NaN outside of the padding, or values so large that squares overflow.
    """

    routes: Int[Array, "batch heads"]
    errors: Float[Array, "batch heads patterns"]

    @property
    def are_known(self) -> Bool[Array, "batch heads"]:
        """Whether any pattern of a head has a finite error; otherwise its route is arbitrary."""
        return jnp.isfinite(self.errors).any(axis=-1)


def route_heads(
    query: Float[AnyArray, "batch tokens heads head_dim"],
    key: Float[AnyArray, "batch tokens heads head_dim"],
    value: Float[AnyArray, "batch tokens heads head_dim"],
    masks: Sequence[Mask | TilePlan],
    *,
    num_samples: int = 64,
    rows: Int[AnyArray, " rows"] | None = None,
    rng: AnyKey | None = None,
    first_tokens: int | None = None,
    scale: float | None = None,
    prompt_length: int | Int[AnyArray, "*batch"] | None = None,
) -> HeadRoutes:
    """Finds the pattern of each head from the attention of a few sampled query rows.

    The scores of the sampled rows are computed once; dense attention and each pattern use them.
    The pattern whose output has the smallest mean squared error wins, the first one in a tie.
    Padding (see `prompt_length`) is ignored, whatever it holds. Heads run one after the other:
    time is that of dense attention on the sampled rows, memory O(samples x tokens). No gradient
    flows through the routes.

    Args:
        query: queries in frame-major order, as for `attention`.
        key: keys, of the same shape and dtype.
        value: values, of the same shape.
        masks: candidates on one grid. A mask is scored by its pairs, a tile plan by the pairs that
            it runs, which differ from its mask's pairs in aligned mode.
        num_samples: number of query rows to sample, one from each of as many equal parts of
            the video.
        rows: query rows to use instead of a sample, frame-major positions; `rng` and `first_tokens`
            are then ignored. May be traced; rows out of range are then clipped.
        rng: key of the sample; equal keys give equal routes. Not needed with `rows`.
        first_tokens: samples are drawn only from this many first video tokens, as upstream does
            from 10,000; from all of them by default.
        scale: factor on the logits; `1 / sqrt(head_dim)` by default.
        prompt_length: as for `attention`.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes do not fit each other or the grid, or a value is out of range.
    """
    masks = _check_masks(masks)
    grid = masks[0].grid
    check_arrays(query, key, value, grid)
    batch, _, _, head_dim = query.shape
    bare = [mask.mask if isinstance(mask, TilePlan) else mask for mask in masks]
    prompt_lengths = check_prompt_length(prompt_length, batch, bare)
    scale = check_scale(scale, head_dim)
    rows = sample_rows(grid, num_samples, rng, first_tokens) if rows is None else _rows(rows, grid)
    arrays = (jnp.asarray(array) for array in (query, key, value))
    return route_checked(*arrays, rows, prompt_lengths, masks, scale)


def sample_rows(
    grid: TokenGrid, num_samples: int, rng: AnyKey | None, first_tokens: int | None = None
) -> Int[Array, " rows"]:
    """Draws one video token from each of `num_samples` equal parts, in frame-major positions."""
    num_samples = _checks.integer("num_samples", num_samples, minimum=1)
    end = grid.num_video_tokens
    if first_tokens is not None:
        end = min(end, _checks.integer("first_tokens", first_tokens, minimum=1))
    if rng is None:
        raise ValueError("rng must be a key of jax.random where rows are to be sampled, got None")
    bounds = np.arange(min(num_samples, end) + 1, dtype=np.int64) * end // min(num_samples, end)
    bounds = bounds.astype(np.int32) + (grid.text_tokens if grid.text_first else 0)
    return jax.random.randint(rng, (bounds.size - 1,), bounds[:-1], bounds[1:], jnp.int32)


@functools.partial(jax.jit, static_argnums=(5, 6))
@jax.named_scope("cinetile_routing")
def route_checked(
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch tokens heads head_dim"],
    value: Float[Array, "batch tokens heads head_dim"],
    rows: Int[Array, " rows"],
    prompt_lengths: Int[Array, " batch"] | None,
    masks: tuple[Mask | TilePlan, ...],
    scale: float,
) -> HeadRoutes:
    """Routes heads with arguments that the public edge has checked; see `route_heads`."""
    query, key, value = (jax.lax.stop_gradient(array) for array in (query, key, value))
    batch, _, heads, _ = query.shape
    kept = jnp.stack([kept_keys(mask, rows) for mask in masks])
    sampled = query[:, rows]
    exists = None if prompt_lengths is None else text_exists(masks[0].grid, prompt_lengths)
    rows_exist = None if exists is None else exists[:, rows]

    def one_head(arguments: tuple[Array, Array]) -> Float[Array, " patterns"]:
        row, head = arguments
        return pattern_errors(
            sampled[row, :, head],
            key[row, :, head],
            value[row, :, head],
            kept,
            None if exists is None else exists[row],
            None if rows_exist is None else rows_exist[row],
            scale,
        )

    row, head = (index.reshape(-1) for index in jnp.indices((batch, heads)))
    errors = jax.lax.map(one_head, (row, head)).reshape(batch, heads, len(masks))
    finite = jnp.where(jnp.isfinite(errors), errors, jnp.inf)
    return HeadRoutes(jnp.argmin(finite, axis=-1).astype(jnp.int32), errors)


def _check_masks(masks: Sequence[Mask | TilePlan]) -> tuple[Mask | TilePlan, ...]:
    masks = tuple(masks) if isinstance(masks, Sequence) else (masks,)
    if not masks:
        raise ValueError("masks must be a non-empty sequence of masks or tile plans, got none")
    for mask in masks:
        if not isinstance(mask, Mask | TilePlan):
            raise TypeError(f"masks must hold masks or tile plans, got {type(mask).__name__}")
        if mask.grid != masks[0].grid:
            raise ValueError(f"masks must be on one grid, got {masks[0].grid}, {mask.grid}")
    return masks


def _rows(rows: Int[AnyArray, " rows"], grid: TokenGrid) -> Int[Array, " rows"]:
    if not hasattr(rows, "dtype"):
        rows = np.asarray(rows)
    if not jnp.issubdtype(rows.dtype, jnp.integer):
        raise TypeError(f"rows must be integers, got {rows.dtype}")
    if rows.ndim != 1 or rows.size == 0:
        raise ValueError(f"rows must be a list of at least one position, got shape {rows.shape}")
    if not isinstance(rows, jax.core.Tracer):
        lowest, highest = int(np.asarray(rows).min()), int(np.asarray(rows).max())
        if lowest < 0 or highest >= grid.num_tokens:
            raise ValueError(f"rows must lie in [0, {grid.num_tokens}), got {lowest} to {highest}")
    return jnp.clip(jnp.asarray(rows, jnp.int32), 0, grid.num_tokens - 1)
