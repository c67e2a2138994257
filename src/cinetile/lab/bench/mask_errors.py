"""What leaving pairs out does to the output, whichever kernel runs it."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from cinetile.lab.bench.reference import relative_error


@dataclass(frozen=True)
class MaskErrors:
    """Relative errors between exact outputs under different masks, on sampled rows.

    Both outputs come from the float64 reference, so the errors hold for every kernel.

    Attributes:
        input: the input in words.
        aligned_vs_exact: what rounding boundary tiles costs.
        exact_vs_dense: what the mask costs.
        aligned_vs_dense: what both cost together.
    """

    input: str
    aligned_vs_exact: float
    exact_vs_dense: float
    aligned_vs_dense: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_masks(
    description: str, references: dict[str, Float[np.ndarray, "batch rows heads head_dim"]]
) -> MaskErrors:
    """Compares the reference outputs of the modes "dense", "split" and "aligned"."""
    dense, exact, aligned = (references[mode] for mode in ("dense", "split", "aligned"))
    return MaskErrors(
        description,
        aligned_vs_exact=relative_error(aligned, exact),
        exact_vs_dense=relative_error(exact, dense),
        aligned_vs_dense=relative_error(aligned, dense),
    )
