"""What a sparse attention call did, as a pytree that passes through jit."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from cinetile.layer.plans import PlanChoice

_AnyArray = Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class RoutingRecord:
    """Where the heads of one call went, and what each pattern would have got wrong there.

    Attributes:
        routes: index into `choices` of each head, `[batch, heads]`.
        errors: mean squared error of each of `patterns` on the sampled rows, float32,
            `[batch, heads, patterns]`; NaN where the call was dense and nothing was sampled.
        is_dense: whether the policy asked for dense attention.
        step: index of the denoising step.
        layer: index of the layer.
        choices: what a head can be routed to; the first one is dense.
        patterns: the policy's patterns, in the order of `errors`.
    """

    routes: Int[_AnyArray, "*stack batch heads"]
    errors: Float[_AnyArray, "*stack batch heads patterns"]
    is_dense: Bool[_AnyArray, "*stack"]
    step: Int[_AnyArray, "*stack"]
    layer: Int[_AnyArray, "*stack"]
    choices: tuple[PlanChoice, ...] = dataclasses.field(metadata={"static": True})
    patterns: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary for each batch row and head, on the host.

        A record may be stacked along leading axes, as `jax.lax.scan` over layers gives it.
        """
        host = jax.device_get(self)
        rows = []
        for index in np.ndindex(host.routes.shape):
            call = index[:-2]
            choice = self.choices[int(host.routes[index])]
            errors = dict(zip(self.patterns, map(float, host.errors[index]), strict=True))
            dense = bool(host.is_dense[call])
            rows.append(
                {
                    "step": int(host.step[call]),
                    "layer": int(host.layer[call]),
                    "batch": index[-2],
                    "head": index[-1],
                    "pattern": choice.pattern,
                    "density": choice.density,
                    "errors": None if dense else errors,
                }
            )
        return rows

    def __str__(self) -> str:
        lines = []
        for row in self.rows():
            line = "step {step}, layer {layer}, row {batch}, head {head}: {pattern}".format(**row)
            if row["errors"] is not None:
                errors = ", ".join(f"{name} {error:.3g}" for name, error in row["errors"].items())
                line += f" {row['density']:g} (errors: {errors})"
            lines.append(line)
        return "\n".join(lines)
