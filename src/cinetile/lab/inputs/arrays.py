"""The container of attention inputs, and the simplest way to fill it."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from cinetile import _checks


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs of one self-attention call, and where they came from.

    Attributes:
        query: Float32 queries `[batch, tokens, heads, head_dim]`, tokens in frame-major order.
        key: Keys, shaped like `query`.
        value: Values, shaped like `query`.
        description: The source in words, for tables: `"random normal, seed 0"`.
    """

    query: Float[np.ndarray, "batch tokens heads head_dim"]
    key: Float[np.ndarray, "batch tokens heads head_dim"]
    value: Float[np.ndarray, "batch tokens heads head_dim"]
    description: str


def random_inputs(num_tokens: int, heads: int, head_dim: int, seed: int = 0) -> Inputs:
    """Draws query, key and value from the standard normal distribution.

    Args:
        num_tokens: Tokens of the sequence.
        heads: Attention heads.
        head_dim: Channels of one head.
        seed: Seed of the generator; equal arguments give equal arrays.

    Returns:
        Inputs of batch 1.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: A size is under 1, the seed is negative, or the arrays do not fit in memory.
    """
    shape = (
        1,
        _checks.integer("num_tokens", num_tokens, minimum=1),
        _checks.integer("heads", heads, minimum=1),
        _checks.integer("head_dim", head_dim, minimum=1),
    )
    seed = _checks.integer("seed", seed, minimum=0)
    require_memory(*shape[1:])
    rng = np.random.default_rng(seed)
    query, key, value = (rng.standard_normal(shape, dtype=np.float32) for _ in range(3))
    return Inputs(query, key, value, f"random normal, seed {seed}")


def require_memory(num_tokens: int, heads: int, head_dim: int, batch: int = 1) -> None:
    """Raises ValueError if float32 query, key and value of these sizes do not fit in memory."""
    _checks.memory(
        f"query, key and value of {num_tokens:,} tokens, {heads:,} heads of {head_dim:,} in "
        "float32",
        3 * 4 * batch * num_tokens * heads * head_dim,
    )
