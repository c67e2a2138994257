"""How query, key, value and output are sharded over a device mesh."""

import dataclasses
import math
import warnings
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
    """The mesh axes over which batch rows, tokens and heads are sharded.

    Attributes:
        mesh: the devices.
        batch: mesh axes over which batch rows are sharded; empty if they are replicated.
        tokens: mesh axes over which tokens are sharded; empty if they are replicated.
        heads: mesh axes over which heads are sharded; empty if they are replicated.
    """

    mesh: Mesh
    batch: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    @property
    def spec(self) -> PartitionSpec:
        """Partition spec of arrays `[batch, tokens, heads, head_dim]`."""
        return PartitionSpec(self.batch or None, self.tokens or None, self.heads or None)

    @property
    def head_spec(self) -> PartitionSpec:
        """Partition spec of arrays `[batch, heads, ...]`."""
        return PartitionSpec(self.batch or None, self.heads or None)

    @property
    def is_explicit(self) -> bool:
        """Whether the mesh has axes of type Explicit, on which only `jax.reshard` moves arrays."""
        return AxisType.Explicit in self.mesh.axis_types

    def size(self, axes: tuple[str, ...]) -> int:
        """Number of devices along the given mesh axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def fitting(
        self, shape: tuple[int, ...], axes: tuple[tuple[str, ...], ...] | None = None
    ) -> PartitionSpec:
        """Partition spec of an array; an axis that its devices do not divide is replicated.

        Args:
            shape: sizes of the leading axes, a prefix of `[batch, tokens, heads]`.
            axes: mesh axes for each entry of `shape`; by default `batch`, `tokens`, `heads`.
        """
        axes = (self.batch, self.tokens, self.heads)[: len(shape)] if axes is None else axes
        fit = [
            names if names and size % self.size(names) == 0 else None
            for size, names in zip(shape, axes, strict=False)
        ]
        return PartitionSpec(*fit)

    def constrained(self, array: Shaped[Array, "..."], spec: PartitionSpec) -> Shaped[Array, "..."]:
        """Constrains the array to `spec` (meshes with axes of type Auto)."""
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))

    def check_batch(self, batch: int) -> None:
        """Raises ValueError unless the devices of the batch axes divide the batch size.

        Heads and tokens are padded where they do not divide. Batch rows are not padded, because
        a device that holds only padding would be idle.
        """
        devices = self.size(self.batch)
        if batch % devices:
            raise ValueError(
                f"query must have a batch that the {devices} devices of mesh axis "
                f"{'/'.join(self.batch)} divide, got {batch}"
            )

    def laid_out(self, array: Shaped[Array, "..."], spec: PartitionSpec) -> Shaped[Array, "..."]:
        """Reshards the array to `spec` on a mesh with explicit axes; elsewhere returns it as is."""
        if not self.is_explicit:
            return array
        return jax.reshard(array, NamedSharding(self.mesh, spec))


def automatic(layout: ArrayLayout) -> ArrayLayout:
    """The same layout on a mesh with axes of type Auto, which the compiler shards by itself."""
    mesh = Mesh(layout.mesh.devices, layout.mesh.axis_names)
    return dataclasses.replace(layout, mesh=mesh)


def replicated(tree: Any, mesh: Mesh) -> Any:
    """Replicates each array of a pytree on all devices; all processes must pass equal values."""
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
        sharding: mesh axes over which `[batch, tokens, heads, head_dim]` are sharded, such as
            `PartitionSpec("data", "context", "tensor")` for a mesh with other names; by default
            the mesh axes named "data", "sequence" and "heads", as far as the mesh has them.

    Raises:
        TypeError: one of them has the wrong type.
        ValueError: the sharding names an axis that the mesh does not have, or one twice, or
            shards head_dim; or `sharding` is None and no mesh axis has a known name.

    Warns:
        UserWarning: `sharding` is None, and a mesh axis of several devices has none of the known
            names, so that all its devices compute the same.
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
        _warn_of_unused_axes(mesh)
        sharding = PartitionSpec(*present)
    if not isinstance(sharding, PartitionSpec):
        raise TypeError(
            f"sharding must be a jax.sharding.PartitionSpec, got {type(sharding).__name__}"
        )
    entries = [_axes(entry) for entry in sharding]
    if any(entries[len(_ARRAY_AXES) :]):
        raise ValueError(
            f"sharding must shard only {', '.join(_ARRAY_AXES)}, not head_dim, got {sharding}"
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


def _warn_of_unused_axes(mesh: Mesh) -> None:
    unused = {
        str(name): size
        for name, size in mesh.shape.items()
        if size > 1 and name not in DEFAULT_AXES
    }
    if unused:
        listed = ", ".join(f"{name!r} ({size} devices)" for name, size in unused.items())
        warnings.warn(
            f"mesh has axes that attention does not use, {listed}: their devices all compute the "
            f"same. By default the axes named {', '.join(DEFAULT_AXES)} are used; for other names "
            "pass sharding=PartitionSpec(batch axes, token axes, head axes)",
            stacklevel=3,
        )


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    if entry is PartitionSpec.UNCONSTRAINED:
        raise ValueError("sharding must be known for each axis, got UNCONSTRAINED")
    return (entry,) if isinstance(entry, str) else tuple(entry)
