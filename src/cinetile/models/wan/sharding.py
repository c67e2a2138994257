"""How the transformer's weights lie on a mesh: all rules in one place."""

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

# What the last axes of a parameter are spread over: "heads", or "rest", all other axes of the
# mesh. Projections into heads and into the feed-forward's hidden channels are cut by their
# outputs, those out of them by their inputs, so that nothing is exchanged between the two.
_RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"\.(to_q|to_k|to_v|up)\.weight$", ("heads", "rest")),
    (r"\.(to_q|to_k|to_v|up)\.bias$", ("heads",)),
    (r"\.(to_out|down)\.weight$", ("rest", "heads")),
    (r"(linear_1|linear_2|time_proj|proj_out)\.weight$", ("rest", None)),
)


def weight_spec(
    name: str, shape: tuple[int, ...], layout: ArrayLayout, weights: WeightSharding = "fsdp"
) -> PartitionSpec:
    """Which mesh axes a parameter is spread over.

    Args:
        name: path of the parameter in the transformer, with dots.
        shape: its shape; layers, if any, come first.
        layout: how the arrays of attention lie on the mesh.
        weights: "tensor" spreads over the axis of the heads alone; "fsdp" also over all other
            axes, and a layer's weights are gathered when it runs.
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
    """A function of a parameter's name and value that puts each device's part on it alone."""

    def put(name: str, value: Array | np.ndarray) -> Array:
        spec = weight_spec(name, value.shape, layout, weights)
        sharding = NamedSharding(layout.mesh, spec)
        if isinstance(value, jax.Array):
            return jax.device_put(value, sharding)
        # Every process has read the whole tensor; each device takes its part.
        return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)

    return put
