"""Errors of outputs against the float64 reference, on sampled query rows."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from cinetile.kernels import reference_rows
from cinetile.lab.inputs import Inputs
from cinetile.plans import TilePlan

Arrays = Float[np.ndarray, "batch tokens heads head_dim"]
Rows = Float[np.ndarray, "batch rows heads head_dim"]


@dataclass(frozen=True, eq=False)
class RoundedInputs:
    """Query, key and value as a kernel sees them: rounded to its dtype, held in float32."""

    query: Arrays
    key: Arrays
    value: Arrays

    @classmethod
    def of(cls, inputs: Inputs, dtype: str) -> "RoundedInputs":
        """Rounds inputs, so that the reference measures a kernel and not the rounding."""
        query, key, value = (
            np.asarray(array.astype(jnp.dtype(dtype)), np.float32)
            for array in (inputs.query, inputs.key, inputs.value)
        )
        return cls(query, key, value)


def sample_rows(num_tokens: int, count: int, seed: int) -> Int[np.ndarray, " rows"]:
    """Draws query rows that cover the whole sequence, the first and the last among them.

    One row is drawn from each of `count` equal stretches, so no part goes unseen.
    """
    if count >= num_tokens:
        return np.arange(num_tokens)
    edges = np.arange(count + 1) * num_tokens // count
    rows = np.random.default_rng(seed).integers(edges[:-1], edges[1:])
    rows[0] = 0
    rows[-1] = num_tokens - 1
    return np.unique(rows)


def reference_output(inputs: RoundedInputs, plan: TilePlan, rows: Int[np.ndarray, " rows"]) -> Rows:
    """Exact attention of some rows over the pairs that a plan keeps, float64."""
    return np.stack(
        [
            reference_rows(inputs.query[row], inputs.key[row], inputs.value[row], plan, rows)[0]
            for row in range(inputs.query.shape[0])
        ]
    )


def max_abs_error(output: Rows, reference: Rows) -> float:
    """Largest difference of any element."""
    return float(np.max(np.abs(output - reference)))


def relative_error(output: Rows, reference: Rows) -> float:
    """Norm of the difference over the norm of the reference, over all rows and heads.

    Only the norm of the difference if the reference is zero everywhere.
    """
    difference = float(np.linalg.norm((output - reference).ravel()))
    return difference / (float(np.linalg.norm(reference.ravel())) or 1.0)
