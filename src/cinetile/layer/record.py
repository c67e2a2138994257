"""`LayerRecord`: what one attention call did, in JAX and in PyTorch alike."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from cinetile.grid import TokenGrid
from cinetile.layer.plans import PlanChoice

_AnyArray = Array | np.ndarray


_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class LayerRecord:
    """Where the heads of one call went, what each pattern would have cost, and what computed it.

    A pytree: it passes through `jax.jit`, and `jax.lax.scan` stacks it along leading axes. The
    fields from `component` on are known only where the call did not run under `jax.jit`, as in
    diffusers pipelines; they are None otherwise.

    Attributes:
        routes: index into `choices` of each head, `[batch, heads]`.
        errors: mean squared error of each of `patterns` on the sampled rows, float32,
            `[batch, heads, patterns]`; NaN where nothing was sampled, since the call was dense or
            the policy has one pattern.
        is_dense: whether the policy asked for dense attention.
        step: index of the denoising step.
        layer: index of the layer.
        choices: what a head can be routed to; the first one is dense.
        patterns: names of the policy's patterns, in the order of `errors`.
        shares: share of all pairs that each of `choices` visits; empty if not known.
        grid: the tokens; None if not known.
        implementation: what computed it, such as "xla" or "cpu (avx512)"; None if nothing did.
        component: attribute of the pipeline that holds the model.
        num_steps: steps of the schedule.
        forward: which of the model's calls in this run it belongs to; the calls of a guidance
            pair that run one after the other share the step.
        routing_seconds: time that routing took.
        attention_seconds: time that attention took.
    """

    routes: Int[_AnyArray, "*stack batch heads"]
    errors: Float[_AnyArray, "*stack batch heads patterns"]
    is_dense: Bool[_AnyArray, "*stack"] | bool
    step: Int[_AnyArray, "*stack"] | int
    layer: Int[_AnyArray, "*stack"] | int
    choices: tuple[PlanChoice, ...] = field(metadata=_STATIC)
    patterns: tuple[str, ...] = field(metadata=_STATIC)
    shares: tuple[float, ...] = field(default=(), metadata=_STATIC)
    grid: TokenGrid | None = field(default=None, metadata=_STATIC)
    implementation: str | None = field(default=None, metadata=_STATIC)
    component: str | None = field(default=None, metadata=_STATIC)
    num_steps: int | None = field(default=None, metadata=_STATIC)
    forward: int | None = field(default=None, metadata=_STATIC)
    routing_seconds: float | None = field(default=None, metadata=_STATIC)
    attention_seconds: float | None = field(default=None, metadata=_STATIC)

    @property
    def is_sampled(self) -> bool:
        """Whether heads were scored, so that `errors` holds numbers."""
        return not bool(np.isnan(np.asarray(self.errors)).all())

    @property
    def visited(self) -> float:
        """Share of all pairs that the call visited, as a mean over its heads.

        Raises:
            ValueError: the shares of the choices are not known.
        """
        if not self.shares:
            raise ValueError("shares must be known for the share of pairs that a call visited")
        return float(np.asarray(self.shares)[np.asarray(self.routes)].mean())

    @property
    def heads_by_choice(self) -> dict[str, int]:
        """How many heads, over the rows of the batch, went where."""
        counts = Counter(np.asarray(self.routes).reshape(-1).tolist())
        return {str(self.choices[route]): count for route, count in sorted(counts.items())}

    def rows(self) -> list[dict[str, Any]]:
        """Returns one dictionary per batch row and head, on the host.

        Its keys are step, layer, batch, head, pattern, density and errors; errors is a dictionary
        by pattern, None where nothing was sampled.
        """
        host = jax.device_get(self)
        step, layer, is_dense = map(np.asarray, (host.step, host.layer, host.is_dense))
        rows = []
        for index in np.ndindex(host.routes.shape):
            call = index[:-2]
            choice = self.choices[int(host.routes[index])]
            errors = dict(zip(self.patterns, map(float, host.errors[index]), strict=True))
            unknown = bool(is_dense[call]) or bool(np.isnan(host.errors[index]).all())
            rows.append(
                {
                    "step": int(step[call]),
                    "layer": int(layer[call]),
                    "batch": index[-2],
                    "head": index[-1],
                    "pattern": choice.pattern,
                    "density": choice.density,
                    "errors": None if unknown else errors,
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
