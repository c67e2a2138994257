"""How the arrays of attention lie on a mesh of devices."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

DEFAULT_AXES = ("data", "sequence", "heads")
_ARRAY_AXES = ("batch", "tokens", "heads")


@dataclass(frozen=True)
class ArrayLayout:
    """Over which axes of a mesh batch rows, tokens and heads are spread.

    Attributes:
        mesh: the devices.
        batch: names of the mesh axes over which batch rows are spread; empty for none.
        tokens: likewise for tokens.
        heads: likewise for heads.
    """

    mesh: Mesh
    batch: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    @property
    def spec(self) -> PartitionSpec:
        """Of arrays `[batch, tokens, heads, head_dim]`."""
        return PartitionSpec(self.batch or None, self.tokens or None, self.heads or None)

    @property
    def head_spec(self) -> PartitionSpec:
        """Of arrays `[batch, heads, ...]`."""
        return PartitionSpec(self.batch or None, self.heads or None)

    @property
    def is_explicit(self) -> bool:
        """Whether arrays on the mesh move only where somebody says so."""
        return AxisType.Explicit in self.mesh.axis_types

    def size(self, axes: tuple[str, ...]) -> int:
        """Devices along some axes of the mesh."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def fitting(
        self, shape: tuple[int, ...], axes: tuple[tuple[str, ...], ...] | None = None
    ) -> PartitionSpec:
        """Of an array of this shape; an axis that does not divide by its devices stays whole.

        Args:
            shape: leading axes `[batch, tokens, heads]`, as many as there are.
            axes: mesh axes for each axis of the array instead of those.
        """
        axes = (self.batch, self.tokens, self.heads)[: len(shape)] if axes is None else axes
        fit = [
            names if names and size % self.size(names) == 0 else None
            for size, names in zip(shape, axes, strict=False)
        ]
        return PartitionSpec(*fit)

    def constrained(self, array: Shaped[Array, "..."], spec: PartitionSpec) -> Shaped[Array, "..."]:
        """The array, which the compiler is to lay out so; on meshes with automatic axes."""
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))

    def check_batch(self, batch: int) -> None:
        """Raises ValueError unless the batch rows divide by the devices that they are spread over.

        Unlike heads and tokens, rows are never padded: a device without rows would be idle.
        """
        devices = self.size(self.batch)
        if batch % devices:
            raise ValueError(
                f"query must have a batch that the {devices} devices of mesh axis "
                f"{'/'.join(self.batch)} divide, got {batch}"
            )

    def laid_out(self, array: Shaped[Array, "..."], spec: PartitionSpec) -> Shaped[Array, "..."]:
        """The array in a layout, where the mesh's axes are explicit and nobody else moves it."""
        if not self.is_explicit:
            return array
        return jax.reshard(array, NamedSharding(self.mesh, spec))


def automatic(layout: ArrayLayout) -> ArrayLayout:
    """The same layout on a mesh whose axes the compiler may use as it sees fit."""
    mesh = Mesh(layout.mesh.devices, layout.mesh.axis_names)
    return dataclasses.replace(layout, mesh=mesh)


def replicated(tree: Any, mesh: Mesh) -> Any:
    """Every array of a pytree, whole on every device; all processes must have the same."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def put(array: Any) -> Array:
        if isinstance(array, jax.Array) and array.sharding == everywhere:
            return array
        if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            data = put(jax.random.key_data(array))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, everywhere, host.__getitem__)

    return jax.tree.map(put, tree)


def array_layout(mesh: Any, sharding: Any = None) -> ArrayLayout:
    """Checks a mesh and a sharding of query, key, value and output.

    Args:
        mesh: the devices.
        sharding: which mesh axes the axes `[batch, tokens, heads, head_dim]` are spread over; by
            default the mesh axes named "data", "sequence" and "heads", as far as there are such.

    Raises:
        TypeError: one of them has the wrong type.
        ValueError: the sharding names an axis that the mesh does not have, or one twice, or
            spreads the features of a head; or there is none and no axis has a known name.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    names = tuple(mesh.axis_names)
    if AxisType.Manual in mesh.axis_types:
        raise ValueError("mesh must have no manual axes; call from outside of jax.shard_map")
    if sharding is None:
        present = [axis if axis in names else None for axis in DEFAULT_AXES]
        if not any(present):
            raise ValueError(
                f"sharding must be given for a mesh with the axes {names}, none of which is named "
                f"{', '.join(DEFAULT_AXES)}"
            )
        sharding = PartitionSpec(*present)
    if not isinstance(sharding, PartitionSpec):
        raise TypeError(
            f"sharding must be a jax.sharding.PartitionSpec, got {type(sharding).__name__}"
        )
    entries = [_axes(entry) for entry in sharding]
    if any(entries[len(_ARRAY_AXES) :]):
        raise ValueError(
            f"sharding must spread {', '.join(_ARRAY_AXES)} alone, never a head's features, "
            f"got {sharding}"
        )
    used = [axis for entry in entries for axis in entry]
    unknown = [axis for axis in used if axis not in names]
    if unknown:
        raise ValueError(
            f"sharding must name axes of the mesh, {', '.join(names)}, got {', '.join(unknown)}"
        )
    if len(set(used)) < len(used):
        raise ValueError(f"sharding must name no mesh axis twice, got {sharding}")
    return ArrayLayout(mesh, *entries[: len(_ARRAY_AXES)])


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    if entry is PartitionSpec.UNCONSTRAINED:
        raise ValueError("sharding must be known for each axis, got UNCONSTRAINED")
    return (entry,) if isinstance(entry, str) else tuple(entry)
