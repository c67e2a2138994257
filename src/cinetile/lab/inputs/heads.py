"""Heads: fixed random projections of token features to query, key and value."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from cinetile.models.rotary import axis_dims, rotate

# Share of the energy of the query's projection that the key's has in common.
_SHARED = 0.8
# Size of the anchor beside content: at 0.8 a mask of a third of the pairs keeps some 95 % of the
# attention of a head of its kind, and about half of that of the other kind.
_ANCHOR = 0.8
_TEMPERATURES = (1.0, 1.5)
_EPSILON = np.float32(1e-6)


@dataclass(frozen=True, eq=False)
class Head:
    """The fixed parameters of one head.

    Attributes:
        query: Projection of features to queries.
        key: Projection of features to keys; partly equal to `query`'s.
        value: Projection of features to values.
        anchor: What every query and key has in common, so that near tokens attend to each other
            along the axes whose channels it fills.
        temperature: Root mean square of the queries; that of the keys is 1.
    """

    query: Float[np.ndarray, "features head_dim"]
    key: Float[np.ndarray, "features head_dim"]
    value: Float[np.ndarray, "features head_dim"]
    anchor: Float[np.ndarray, " head_dim"]
    temperature: float


def draw_head(num_features: int, head_dim: int, seed: int, index: int) -> Head:
    """Draws head `index`; it is the same however many heads there are.

    Even heads are spatial, anchored to their frame; odd ones are temporal, anchored to their
    row and column.

    Args:
        num_features: Features of a token.
        head_dim: Channels of the head, even.
        seed: Seed of all heads.
        index: Number of this head, from 0.
    """
    rng = np.random.default_rng((seed, index))
    shared, query, key, value = rng.standard_normal((4, num_features, head_dim), np.float32) / (
        np.sqrt(np.float32(num_features))
    )
    own = np.float32(np.sqrt(1 - _SHARED))
    shared *= np.float32(np.sqrt(_SHARED))
    return Head(
        query=shared + own * query,
        key=shared + own * key,
        value=value,
        anchor=_anchor(head_dim, temporal=index % 2 == 1),
        temperature=float(rng.uniform(*_TEMPERATURES)),
    )


def project(
    features: Float[np.ndarray, "tokens features"],
    head: Head,
    cosine: Float[np.ndarray, "tokens pairs"],
    sine: Float[np.ndarray, "tokens pairs"],
) -> tuple[
    Float[np.ndarray, "tokens head_dim"],
    Float[np.ndarray, "tokens head_dim"],
    Float[np.ndarray, "tokens head_dim"],
]:
    """Returns one head's query, key and value: projection, QK norm, rotary embedding."""
    query = head.temperature * rms_normalise(features @ head.query + head.anchor)
    key = rms_normalise(features @ head.key + head.anchor)
    return rotate(query, cosine, sine), rotate(key, cosine, sine), features @ head.value


def rms_normalise(
    vectors: Float[np.ndarray, "tokens head_dim"],
) -> Float[np.ndarray, "tokens head_dim"]:
    """Scales every vector to a root mean square of 1."""
    square = np.mean(np.square(vectors), axis=1, keepdims=True)
    return vectors / np.sqrt(square + _EPSILON)


def _anchor(head_dim: int, *, temporal: bool) -> Float[np.ndarray, " head_dim"]:
    """Fills the fastest third of the pairs of the head's axes; slow ones tell no places apart."""
    pieces = []
    for axis, dim in enumerate(axis_dims(head_dim)):
        fast = np.arange(dim) < 2 * -(-dim // 6)
        pieces.append(fast & ((axis > 0) == temporal))
    filled = np.concatenate(pieces)
    return (filled * _ANCHOR * np.sqrt(head_dim / max(filled.sum(), 1))).astype(np.float32)
