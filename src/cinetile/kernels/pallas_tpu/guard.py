"""When the softmax needs no running maximum.

With scores in base 2, `B = max|q| * max|k|` bounds every score of a head from both sides
(Cauchy-Schwarz), so the weights `2 ** s` lie in `[2 ** -B, 2 ** B]`. If `B <= MAX_BOUND`, the
smallest weight is a normal number: no kept weight underflows, each has the relative error that it
has in an online softmax, and the quotient of the sums is the same softmax. If `B` and the binary
logarithm of the largest value add up to at most `MAX_BOUND`, no sum over up to `MAX_KEYS` keys
overflows. Heads that violate either condition run the online kernel.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MAX_KEYS = 1 << 20
# 2 ** -104 is a normal number, and 2 ** (104 + 20) is below the largest float32, both with room
# for rounding.
MAX_BOUND = 104.0


def score_bounds(
    query: Float[Array, "heads tokens head_dim"],
    key: Float[Array, "heads tokens head_dim"],
    factor: float,
) -> Float[Array, " heads"]:
    """Bound of each head's base-2 scores `factor * query @ key`, float32."""
    return factor * _norms(query).max(axis=1) * _norms(key).max(axis=1)


def is_safe(
    bounds: Float[Array, " heads"], value: Float[Array, "heads tokens head_dim"]
) -> Bool[Array, " heads"]:
    """Which heads need no running maximum; False if an input is not finite."""
    largest = jnp.abs(value.astype(jnp.float32)).max(axis=(1, 2))
    few_keys = value.shape[1] <= MAX_KEYS
    return (bounds + jnp.log2(jnp.maximum(largest, 1)) <= MAX_BOUND) & few_keys


def _norms(rows: Float[Array, "heads tokens head_dim"]) -> Float[Array, "heads tokens"]:
    return jnp.sqrt(jnp.square(rows.astype(jnp.float32)).sum(axis=-1))
