"""Layers that the Wan models share; parameters have the names that diffusers uses."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from cinetile.kernels.xla_cpu import pack, unpack

# A uniform distribution on [-b, b] has variance b^2 / 3.
_INIT_SCALE = 3.0**0.5


def random_weight(
    key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int, dtype: jnp.dtype
) -> Float[Array, "..."]:
    """Uniform random weights of variance `1 / fan_in`; equal up to rounding in each dtype."""
    bound = _INIT_SCALE * fan_in**-0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)


def pack_layers(layers: Any) -> Any:
    """Packs stacked parameters for `scan_layers` so that they need the least memory.

    On CPUs, bfloat16 is packed as raw bits: XLA's CPU backend would otherwise widen all layers to
    float32 before the loop, twice the memory of the weights. Raw bits have no gradient.
    """
    return jax.tree.map(pack, layers) if jax.default_backend() == "cpu" else layers


def scan_layers(
    run: Callable[[Any, Any, Any], tuple[Any, Any]], x: Any, layers: Any
) -> tuple[Any, Any]:
    """Runs layers in sequence with one compiled body.

    Args:
        run: `run(x, layer_index, parameters)` returns the layer's output and a pytree to stack.
        x: input of the first layer.
        layers: parameters with a leading layer axis, optionally packed by `pack_layers`.

    Returns:
        The output of the last layer, and the stacked pytrees.
    """

    def run_layer(x: Any, index_and_layer: tuple[Array, Any]) -> tuple[Any, Any]:
        # Without the barrier, XLA would unpack all layers before the first one runs.
        index, layer = jax.lax.optimization_barrier(index_and_layer)
        return run(x, index, jax.tree.map(unpack, layer))

    count = jax.tree.leaves(layers)[0].shape[0]
    return jax.lax.scan(run_layer, x, (jnp.arange(count, dtype=jnp.int32), layers))


class Linear(eqx.Module):
    """`x @ weight.T + bias` over the last axis, in the weight's dtype."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"] | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        key: PRNGKeyArray,
        dtype: jnp.dtype,
        use_bias: bool = True,
    ) -> None:
        self.weight = random_weight(key, (out_features, in_features), in_features, dtype)
        self.bias = jnp.zeros((out_features,), dtype) if use_bias else None

    def __call__(self, x: Float[Array, "*axes in"]) -> Float[Array, "*axes out"]:
        y = x.astype(self.weight.dtype) @ self.weight.T
        return y if self.bias is None else y + self.bias


class RMSNorm(eqx.Module):
    """Root-mean-square norm over the last axis: float32 inside, the input's dtype outside."""

    weight: Float[Array, " features"]
    eps: float = eqx.field(static=True)

    def __init__(self, features: int, eps: float, *, dtype: jnp.dtype) -> None:
        self.weight = jnp.ones((features,), dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "*axes features"]) -> Float[Array, "*axes features"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normal = wide * jax.lax.rsqrt(mean_square + self.eps)
        return (normal * self.weight.astype(jnp.float32)).astype(x.dtype)


def layer_norm(x: Float[Array, "*axes features"], eps: float) -> Float[Array, "*axes features"]:
    """Layer norm without parameters; computes and returns float32."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + eps)


class LayerNorm(eqx.Module):
    """Layer norm with parameters; computes and returns float32."""

    weight: Float[Array, " features"]
    bias: Float[Array, " features"]
    eps: float = eqx.field(static=True)

    def __init__(self, features: int, eps: float) -> None:
        self.weight = jnp.ones((features,), jnp.float32)
        self.bias = jnp.zeros((features,), jnp.float32)
        self.eps = eps

    def __call__(self, x: Float[Array, "*axes features"]) -> Float[Array, "*axes features"]:
        return layer_norm(x, self.eps) * self.weight + self.bias
