"""The float64 reference that every other implementation is tested against."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cinetile.kernels.base import Implementation
from cinetile.kernels.padding import key_exists
from cinetile.plans import TilePlan

# Logits are computed for as many rows at a time as fit into this many of them.
_MAX_LOGITS = 1 << 23


def reference_rows(
    query: Float[np.ndarray, "tokens heads head_dim"],
    key: Float[np.ndarray, "tokens heads head_dim"],
    value: Float[np.ndarray, "tokens heads head_dim"],
    plan: TilePlan,
    rows: Int[np.ndarray, " rows"],
    *,
    scale: float | None = None,
    prompt_length: int | None = None,
) -> tuple[Float[np.ndarray, "rows heads head_dim"], Float[np.ndarray, "rows heads"]]:
    """Attention of some query rows over the pairs that a plan keeps, in plain float64.

    Memory is O(tokens) for any number of rows, so sampled rows of large inputs can be checked.

    Args:
        query: queries; all arrays are in frame-major order.
        key: keys.
        value: values.
        plan: says which keys each row keeps.
        rows: query positions.
        scale: factor on the logits; `1 / sqrt(head_dim)` by default.
        prompt_length: text tokens that are not padding; all by default.

    Returns:
        Output and natural log-sum-exp of each row, float64; zeros and minus infinity for a row
        that keeps no key.

    Raises:
        ValueError: shapes do not fit the plan's grid or each other, or a row does not exist.
    """
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 3 or array.shape != query.shape or len(array) != plan.grid.num_tokens:
            raise ValueError(
                f"{name} must be [tokens, heads, head_dim] with the tokens of {plan.grid}, and all "
                f"three alike, got {array.shape}"
            )
    num_tokens, num_heads, head_dim = query.shape
    factor = head_dim**-0.5 if scale is None else scale
    rows = np.asarray(rows, np.int64)
    if rows.size and not (rows.min() >= 0 and rows.max() < num_tokens):
        raise ValueError(f"rows must lie in [0, {num_tokens}), got {rows.min()} to {rows.max()}")
    placed_row = np.argsort(plan.mask.query_order.indices(plan.grid))[rows]
    key_order = plan.mask.key_order.indices(plan.grid)
    output = np.empty((rows.size, num_heads, head_dim))
    lse = np.empty((rows.size, num_heads))
    step = max(1, _MAX_LOGITS // num_tokens)
    if prompt_length is None:
        prompt_length = plan.grid.text_tokens
    exists = key_exists(plan, np.arange(num_tokens), prompt_length)
    for head in range(num_heads):
        placed_key, placed_value = (
            np.asarray(array[key_order, head], np.float64) for array in (key, value)
        )
        for start in range(0, rows.size, step):
            part = slice(start, start + step)
            logits = factor * (np.asarray(query[rows[part], head], np.float64) @ placed_key.T)
            kept = plan.kept_keys(placed_row[part]) & exists
            maximum = logits.max(axis=1, keepdims=True, where=kept, initial=-np.inf)
            weights = np.exp(logits - maximum, out=np.zeros_like(logits), where=kept)
            total = weights.sum(axis=1, keepdims=True)
            some_key = kept.any(axis=1, keepdims=True)
            output[part, head] = weights @ placed_value / np.where(some_key, total, 1.0)
            lse[part, head] = (maximum + np.log(np.where(some_key, total, 1.0)))[:, 0]
    return output, lse


class ReferenceImplementation(Implementation):
    """Runs `reference_rows` on the host for every row."""

    name: ClassVar[str] = "reference"
    requirements: ClassVar[str] = "nothing; float64 on the host, for checks"
    automatic: ClassVar[bool] = False

    def unavailable(self) -> str | None:
        return None

    def default_blocks(self, num_tokens: int, dtype: str) -> tuple[int, int]:
        del num_tokens, dtype
        return 128, 128

    def attend(
        self,
        query: Float[Array, "batch tokens heads head_dim"],
        key: Float[Array, "batch tokens heads head_dim"],
        value: Float[Array, "batch tokens heads head_dim"],
        routes: Int[Array, "batch heads"] | None,
        *,
        plans: tuple[TilePlan, ...],
        scale: float,
        prompt_lengths: Int[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch tokens heads head_dim"], Float[Array, "batch tokens heads"]]:
        batch, num_tokens, heads, _ = query.shape
        dtype = query.dtype

        def on_host(
            query: Array, key: Array, value: Array, routes: Array, prompt_lengths: Array | None
        ) -> tuple[np.ndarray, np.ndarray]:
            output = np.empty(query.shape, dtype)
            lse = np.empty((batch, num_tokens, heads), np.float32)
            rows = np.arange(num_tokens)
            for row, head in np.ndindex(batch, heads):
                one_head = (row, slice(None), slice(head, head + 1))
                output[one_head], lse[one_head] = reference_rows(
                    np.asarray(query)[one_head],
                    np.asarray(key)[one_head],
                    np.asarray(value)[one_head],
                    plans[int(routes[row, head])],
                    rows,
                    scale=scale,
                    prompt_length=None if prompt_lengths is None else int(prompt_lengths[row]),
                )
            return output, lse

        if routes is None:
            routes = jnp.zeros((batch, heads), jnp.int32)
        shapes = (
            jax.ShapeDtypeStruct(query.shape, dtype),
            jax.ShapeDtypeStruct((batch, num_tokens, heads), jnp.float32),
        )
        return jax.pure_callback(
            on_host, shapes, query, key, value, routes, prompt_lengths, vmap_method="sequential"
        )
