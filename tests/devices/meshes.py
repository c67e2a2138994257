"""Meshes over the virtual devices."""

import math

import jax
import numpy as np
from jax.sharding import Mesh


def mesh_of(**axes: int) -> Mesh:
    """A mesh over the first devices, its axes automatic."""
    count = math.prod(axes.values())
    return Mesh(np.array(jax.devices()[:count]).reshape(*axes.values()), tuple(axes))
