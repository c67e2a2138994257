"""How much attention work a policy saves over a whole run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpectedWork:
    """Attention work of a run, counted in query-key pairs of the tiles that kernels visit.

    Pairs that a visited tile masks out count, since they are computed; where heads go is not
    known beforehand, so patterns count alike. Routing, placement and everything that is not
    self-attention are left out, so a whole model gains less.

    Attributes:
        saved: share of the pairs of an all-dense run that is not computed.
        sparse_calls: share of the attention calls (steps x layers) that run sparsely.
        visited: share of all pairs that sparse calls visit, on average; None without any.
    """

    saved: float
    sparse_calls: float
    visited: float | None

    def __str__(self) -> str:
        if self.visited is None:
            return "all attention is dense"
        return (
            f"{self.sparse_calls:.1%} of the attention calls are sparse and visit "
            f"{self.visited:.1%} of the pairs: {self.saved:.1%} of the attention work is saved"
        )
