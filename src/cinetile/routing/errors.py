"""What each pattern would get wrong on sampled rows of one head."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from cinetile.kernels import xla_cpu

_LOG2_E = math.log2(math.e)
# Where all that a row keeps weighs less than this against the row's maximum, its weights are
# computed again against a maximum of their own, before they lose digits.
_SMALLEST_TOTAL = 2.0**-64


def pattern_errors(
    query: Float[Array, "rows head_dim"],
    key: Float[Array, "tokens head_dim"],
    value: Float[Array, "tokens head_dim"],
    kept: Bool[Array, "patterns rows tokens"],
    exists: Bool[Array, " tokens"] | None,
    rows_exist: Bool[Array, " rows"] | None,
    scale: float,
) -> Float[Array, " patterns"]:
    """Mean squared error of each pattern's output against dense attention, float32.

    Scores and exponentials are computed once for all patterns, and one product with the values
    gives the outputs of all of them.

    Args:
        query: sampled queries.
        key: all keys.
        value: all values.
        kept: keys that each row keeps under each pattern.
        exists: keys that are no padding; None for all. Padding may hold anything, inf and NaN
            included: neither its keys nor its values count.
        rows_exist: sampled rows that are no padding, over which the mean runs; None for all.
        scale: factor on the logits, above 0.
    """
    dtype = value.dtype
    if rows_exist is not None:
        query = jnp.where(rows_exist[:, None], query, jnp.zeros((), query.dtype))
    scores = _product(query, key.T) * (scale * _LOG2_E)
    dense = jnp.ones((1, *scores.shape), bool)
    if exists is not None:
        dense = dense & exists
        kept = kept & exists
        value = jnp.where(exists[:, None], value, jnp.zeros((), dtype))  # 0 * NaN is NaN
        scores = jnp.where(exists, scores, -jnp.inf)
    kept = jnp.concatenate([dense, kept])

    def weights_of(maximum: Float[Array, " rows"]) -> Array:
        weights = xla_cpu.exp2(scores - maximum[:, None])
        # Without the barrier XLA computes the exponential once for each of its uses.
        return jax.lax.optimization_barrier(xla_cpu.pack(weights.astype(dtype)))

    def outputs_of(
        weights: Array, kept: Bool[Array, "patterns rows tokens"]
    ) -> tuple[Float[Array, "patterns rows head_dim"], Float[Array, "patterns rows"]]:
        kept_weights = xla_cpu.unpack(jnp.where(kept, weights, jnp.zeros((), weights.dtype)))
        totals = kept_weights.sum(axis=-1, dtype=jnp.float32)
        product = _product(kept_weights.reshape(-1, value.shape[0]), value)
        outputs = product.reshape(*totals.shape, -1)
        return outputs / jnp.where(totals > 0.0, totals, 1.0)[..., None], totals

    def pattern_by_pattern() -> Float[Array, "patterns rows head_dim"]:
        def one_pattern(kept: Bool[Array, "rows tokens"]) -> Float[Array, "rows head_dim"]:
            maximum = jnp.where(kept, scores, -jnp.inf).max(axis=1)
            weights = weights_of(jnp.where(kept.any(axis=1), maximum, 0.0))
            return outputs_of(weights, kept[None])[0][0]

        return jax.lax.map(one_pattern, kept)

    outputs, totals = outputs_of(weights_of(scores.max(axis=1)), kept)
    outputs = jax.lax.cond(totals.min() < _SMALLEST_TOTAL, pattern_by_pattern, lambda: outputs)
    squares = (outputs[1:] - outputs[0]) ** 2
    if rows_exist is None:
        return jnp.mean(squares, axis=(1, 2))
    of_rows = jnp.where(rows_exist, jnp.mean(squares, axis=2), 0.0)
    return of_rows.sum(axis=1) / jnp.maximum(rows_exist.sum(), 1)


def _product(left: Float[Array, "m k"], right: Float[Array, "k n"]) -> Float[Array, "m n"]:
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jnp.matmul(left, right, precision=precision, preferred_element_type=jnp.float32)
