"""Normalizing latents channel by channel to the mean 0 and variance 1 that Wan expects."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

AnyArray = Array | np.ndarray


def normalize(
    latents: Float[AnyArray, "batch channels *sizes"],
    mean: Sequence[float],
    std: Sequence[float],
) -> Float[Array, "batch channels *sizes"]:
    """Subtracts each channel's mean and divides by its standard deviation; float32."""
    means, stds = _columns(mean, latents.ndim), _columns(std, latents.ndim)
    return (jnp.asarray(latents, jnp.float32) - means) / stds


def denormalize(
    latents: Float[AnyArray, "batch channels *sizes"],
    mean: Sequence[float],
    std: Sequence[float],
) -> Float[Array, "batch channels *sizes"]:
    """The inverse of `normalize`."""
    means, stds = _columns(mean, latents.ndim), _columns(std, latents.ndim)
    return jnp.asarray(latents, jnp.float32) * stds + means


def _columns(values: Sequence[float], ndim: int) -> Float[np.ndarray, "channels *ones"]:
    """Reshapes one value per channel to broadcast along the second axis of an array."""
    return np.asarray(values, np.float32).reshape(-1, *(1,) * (ndim - 2))
