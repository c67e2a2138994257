"""How the transformer's weights are sharded over a mesh: all rules in one place."""

import re
from collections.abc import Callable
from typing import Literal

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from cinetile import _checks
from cinetile.parallel.layout import ArrayLayout

WeightSharding = Literal["fsdp", "tensor"]
WEIGHT_SHARDINGS: tuple[str, ...] = ("fsdp", "tensor")

# Mesh axes of a parameter's last axes: "heads", or "rest" for all other mesh axes. Projections into
# heads and into the feed-forward's hidden channels are sharded by output features, projections
# out of them by input features, so that no exchange is needed between the two.
_RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"\.(to_q|to_k|to_v|up)\.weight$", ("heads", "rest")),
    (r"\.(to_q|to_k|to_v|up)\.bias$", ("heads",)),
    (r"\.(to_out|down)\.weight$", ("rest", "heads")),
    (r"(linear_1|linear_2|time_proj|proj_out)\.weight$", ("rest", None)),
)


def weight_spec(
    name: str, shape: tuple[int, ...], layout: ArrayLayout, weights: WeightSharding = "fsdp"
) -> PartitionSpec:
    """Partition spec of a parameter.

    Args:
        name: dotted path of the parameter in the transformer.
        shape: shape of the parameter; a layer axis, if any, comes first.
        layout: mesh axes of attention's batch rows, tokens and heads.
        weights: sharding of the weights. "tensor" shards over the axis of the heads only; "fsdp"
            also shards over all other axes and gathers a layer's weights when it runs.
    """
    axes = {"heads": layout.heads, "rest": layout.batch + layout.tokens, None: ()}
    if _checks.choice("weights", weights, WEIGHT_SHARDINGS) == "tensor":
        axes["rest"] = ()
    roles = next((roles for pattern, roles in _RULES if re.search(pattern, name)), ())
    spread = (None,) * (len(shape) - len(roles)) + roles
    return layout.fitting(shape, tuple(axes[role] for role in spread))


def place_weights(
    layout: ArrayLayout, weights: WeightSharding = "fsdp"
) -> Callable[[str, Array | np.ndarray], Array]:
    """Returns `put(name, value)`, which shards a parameter so that each device holds its part."""

    def put(name: str, value: Array | np.ndarray) -> Array:
        spec = weight_spec(name, value.shape, layout, weights)
        sharding = NamedSharding(layout.mesh, spec)
        if isinstance(value, jax.Array):
            return jax.device_put(value, sharding)
        # Each process has read the whole tensor; each device takes its part.
        return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)

    return put
