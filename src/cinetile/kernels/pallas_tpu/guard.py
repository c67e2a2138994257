"""The row bound that replaces the softmax's running maximum, and when it is safe.

With scores in base 2, `B = |q| * max|k|` bounds every score of a row from both sides
(Cauchy-Schwarz), so the weights `2 ** (s - B + RECENTRE)` lie in `[2 ** (RECENTRE - 2 B),
2 ** RECENTRE]`. If `B <= MAX_BOUND`, the smallest weight is a normal number: no kept weight
underflows, each has the relative error that it has in an online softmax, and the quotient of the
sums is the same softmax. If values are at most `MAX_VALUE`, no sum over up to `2 ** 20` keys
overflows. Heads that violate either condition run the online kernel.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

RECENTRE = 60.0
# 2 * 92 - 60 = 124: two powers of 2 above the smallest normal float32, for rounding.
MAX_BOUND = 92.0
# 2 ** (60 + 20 + 40) = 2 ** 120, below the largest float32.
MAX_VALUE = 2.0**40
MAX_KEYS = 1 << 20


def row_bounds(
    query: Float[Array, "heads tokens head_dim"], key: Float[Array, "heads tokens head_dim"]
) -> Float[Array, "heads tokens"]:
    """`|q| * max|k|` of each row, float32; the queries are already scaled to base-2 scores."""
    return _norms(query) * _norms(key).max(axis=1, keepdims=True)


def is_safe(
    bounds: Float[Array, "heads tokens"], value: Float[Array, "heads tokens head_dim"]
) -> Bool[Array, " heads"]:
    """Which heads may use the fixed bound; False if an input is not finite."""
    largest = jnp.abs(value.astype(jnp.float32)).max(axis=(1, 2))
    few_keys = value.shape[1] <= MAX_KEYS
    return (bounds.max(axis=1) <= MAX_BOUND) & (largest <= MAX_VALUE) & few_keys


def _norms(rows: Float[Array, "heads tokens head_dim"]) -> Float[Array, "heads tokens"]:
    return jnp.sqrt(jnp.square(rows.astype(jnp.float32)).sum(axis=-1))
