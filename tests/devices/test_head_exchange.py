"""`SparseAttention` on a mesh: the same as on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from meshes import mesh_of

import cinetile as ct

# 105 tokens and 3 heads: what neither 2, 4 nor 8 divide.
GRID = ct.TokenGrid(5, 3, 7)
EVEN = ct.TokenGrid(5, 4, 6)
WITH_TEXT = ct.TokenGrid(6, 4, 5, text_tokens=7)
POLICY = ct.SparsityPolicy(
    0.5, dense_steps=((0, 1),), dense_layers=(), block_q=20, block_kv=10, width_multiple=4
)
KEY = jax.random.key(3)
MESHES = (
    {"sequence": 8},
    {"data": 2, "sequence": 4},
    {"data": 2, "heads": 4},
    {"data": 2, "sequence": 2, "heads": 2},
)


def layer_of(mesh: Mesh | None = None, **options: Any) -> ct.SparseAttention:
    options = {"grid": GRID, "policy": POLICY, "num_steps": 4, "num_layers": 3, **options}
    return ct.SparseAttention(options.pop("grid"), options.pop("policy"), mesh=mesh, **options)


def arrays_of(grid: ct.TokenGrid = GRID, heads: int = 3, seed: int = 0) -> tuple[Any, Any, Any]:
    shape = 2, grid.num_tokens, heads, 16
    query, key, value = np.random.default_rng(seed).standard_normal((3, *shape), np.float32)
    return query, key, value


def check(mesh: Mesh, grid: ct.TokenGrid = GRID, heads: int = 3, **options: Any) -> None:
    """Compares a call on a mesh with one on one device, its step traced."""
    call, sharding = options.pop("call", {}), options.pop("sharding", None)
    arrays = arrays_of(grid, heads)

    def run(layer: ct.SparseAttention, step: Any, index: Any) -> Any:
        return layer(*arrays, step=step, layer=index, rng=KEY, return_record=True, **call)

    alone, spread = (
        jax.jit(run, static_argnums=0)(layer, 2, 1)
        for layer in (
            layer_of(grid=grid, **options),
            layer_of(mesh, grid=grid, sharding=sharding, **options),
        )
    )
    np.testing.assert_allclose(spread[0], alone[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(spread[1].routes, alone[1].routes)
    np.testing.assert_allclose(spread[1].errors, alone[1].errors, rtol=1e-4, atol=1e-7)
    assert len(np.unique(alone[1].routes)) == len(POLICY.patterns)
    assert spread[1].rows()[0].keys() == alone[1].rows()[0].keys()


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_as_on_one_device(axes: dict[str, int]) -> None:
    check(mesh_of(**axes))


def test_portable_kernel() -> None:
    check(mesh_of(data=2, sequence=4), implementation="xla")


def test_explicit_axes() -> None:
    """What `jax.make_mesh` makes, where nothing moves unless somebody says so."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "sequence", "heads"))
    check(mesh)
    sharding = NamedSharding(mesh, PartitionSpec("data", "sequence"))
    query, key, value = (jax.device_put(array, sharding) for array in arrays_of(EVEN))
    alone = layer_of(grid=EVEN)(*arrays_of(EVEN), step=2, layer=1, rng=KEY)
    spread = layer_of(mesh, grid=EVEN)(query, key, value, step=2, layer=1, rng=KEY)
    np.testing.assert_allclose(spread, alone, rtol=1e-5, atol=1e-5)


def test_axes_of_any_name() -> None:
    """Tokens over two axes of the mesh at once."""
    check(mesh_of(x=2, y=2, z=2), sharding=PartitionSpec("y", ("x", "z")))


def test_dense_steps() -> None:
    arrays = arrays_of()
    alone, spread = (
        layer_of(mesh)(*arrays, step=0, layer=1, rng=KEY, return_record=True)
        for mesh in (None, mesh_of(sequence=8))
    )
    np.testing.assert_allclose(spread[0], alone[0], rtol=1e-5, atol=1e-5)
    assert bool(spread[1].is_dense)
    route = layer_of(mesh_of(sequence=8)).route(*arrays, step=0, layer=1, rng=KEY)
    np.testing.assert_array_equal(route.routes, spread[1].routes)
    assert {row["pattern"] for row in spread[1].rows()} == {"dense"}


def test_prompt_length_of_each_row() -> None:
    policy = ct.SparsityPolicy(0.5, dense_steps=(), block_q=16, block_kv=8, width_multiple=4)
    call = {"prompt_length": jnp.array([5, 2])}
    check(mesh_of(sequence=4, heads=2), grid=WITH_TEXT, policy=policy, call=call)


def test_gradients() -> None:
    arrays = arrays_of()
    target = np.random.default_rng(9).standard_normal(arrays[0].shape, np.float32)

    def loss(layer: ct.SparseAttention, *arrays: Any) -> Any:
        return (layer(*arrays, step=2, layer=1, rng=KEY) * target).sum()

    gradient = jax.jit(jax.grad(loss, argnums=(1, 2, 3)), static_argnums=0)
    alone, spread = (
        gradient(layer_of(mesh), *arrays) for mesh in (None, mesh_of(data=2, sequence=4))
    )
    for found, expected in zip(spread, alone, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_one_compilation_for_all_steps() -> None:
    layer, traced = layer_of(mesh_of(sequence=4)), []

    @jax.jit
    def run(query: Any, key: Any, value: Any, step: Any) -> Any:
        traced.append(step)
        return layer(query, key, value, step=step, layer=1, rng=KEY)

    alone = layer_of()
    for step in (0, 3):
        expected = alone(*arrays_of(), step=step, layer=1, rng=KEY)
        np.testing.assert_allclose(run(*arrays_of(), step), expected, rtol=1e-5, atol=1e-5)
    assert len(traced) == 1


def test_sharded_arrays_stay_sharded() -> None:
    mesh = mesh_of(data=2, sequence=4)
    sharding = NamedSharding(mesh, PartitionSpec("data", "sequence"))
    query, key, value = (jax.device_put(array, sharding) for array in arrays_of(EVEN))
    output = layer_of(mesh, grid=EVEN)(query, key, value, step=2, layer=1, rng=KEY)
    assert output.sharding.is_equivalent_to(sharding, 4)


def test_batch_must_divide() -> None:
    with pytest.raises(ValueError, match="batch that the 4 devices of mesh axis data divide"):
        layer_of(mesh_of(data=4))(*arrays_of(), step=2, layer=1, rng=KEY)


class TestUnusedAxes:
    def test_an_axis_of_several_devices_that_is_not_used(self) -> None:
        message = (
            r"mesh has axes that attention does not use, 'context' \(4 devices\).* named "
            r"data, sequence, heads are used; for other names pass sharding="
        )
        with pytest.warns(UserWarning, match=message) as caught:
            layer_of(mesh_of(data=2, context=4))
        assert len(caught) == 1

    def test_axes_of_one_device_and_a_sharding_are_silent(self) -> None:
        layer_of(mesh_of(data=2, fsdp=1, sequence=4))
        layer_of(mesh_of(data=2, context=4), sharding=PartitionSpec("data"))

    def test_the_axes_of_maxdiffusion(self) -> None:
        mesh = mesh_of(data=2, fsdp=1, context=2, tensor=2)
        check(mesh, sharding=PartitionSpec(("data", "fsdp"), "context", "tensor"))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("mesh", "sharding", "error", "message"),
    [
        ("devices", None, TypeError, "mesh must be a jax.sharding.Mesh, got str"),
        ({"x": 2}, None, ValueError, "sharding must be given for a mesh with the axes"),
        ({"x": 2}, "x", TypeError, "sharding must be a jax.sharding.PartitionSpec, got str"),
        ({"x": 2}, PartitionSpec("y"), ValueError, "must name axes of the mesh, x, got y"),
        ({"x": 2}, PartitionSpec("x", "x"), ValueError, "no mesh axis twice"),
        ({"x": 2}, PartitionSpec(None, None, None, "x"), ValueError, "not head_dim"),
        (None, PartitionSpec("x"), ValueError, "sharding needs a mesh"),
    ],
    ids=str,
)
def test_bad_meshes(mesh: Any, sharding: Any, error: type[Exception], message: str) -> None:
    mesh = mesh_of(**mesh) if isinstance(mesh, dict) else mesh
    with pytest.raises(error, match=message):
        layer_of(mesh, sharding=sharding)
