"""`halo_attention` on a mesh, and the bytes that both exchanges move."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from meshes import mesh_of

import cinetile as ct
from cinetile.parallel import ExchangeScheme, collectives, exchange_report, halo_attention

# 105 tokens and 3 heads: what neither 4 nor 8 divide.
GRID = ct.TokenGrid(5, 3, 7)
EVEN = ct.TokenGrid(5, 4, 4)
MASKS = {
    "spatial": ct.spatial_mask(GRID, width=9),
    "temporal": ct.temporal_mask(GRID, width=9),
    "temporal, wide": ct.temporal_mask(GRID, width=60, sink_frames=2),
    "upstream": ct.svg_mask(GRID, "temporal", width=9),
}


def arrays_of(grid: ct.TokenGrid = GRID) -> tuple[Any, Any, Any]:
    shape = 2, grid.num_tokens, 3, 16
    query, key, value = np.random.default_rng(0).standard_normal((3, *shape), np.float32)
    return query, key, value


def check(mask: ct.Mask, mesh: Mesh, **options: Any) -> None:
    arrays = arrays_of()
    expected = ct.attention(*arrays, ct.plan_tiles(mask, 16, 8))
    found = halo_attention(*arrays, mask, mesh=mesh, block_q=16, block_kv=8, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_as_on_one_device(mask: ct.Mask) -> None:
    check(mask, mesh_of(sequence=8))


def test_with_other_axes_and_queries_that_stay() -> None:
    check(MASKS["spatial"], mesh_of(data=2, sequence=4), balanced=False)
    check(MASKS["spatial"], mesh_of(heads=4, sequence=2), implementation=("xla",))


def test_tokens_must_be_spread() -> None:
    with pytest.raises(ValueError, match="sharding must shard tokens"):
        halo_attention(*arrays_of(), MASKS["spatial"], mesh=mesh_of(data=2))


def sent(run: Any, mesh: Mesh, spec: PartitionSpec) -> Counter[str]:
    """Bytes that a device sends by each kind of collective, off the compiled program."""
    shape = 2, EVEN.num_tokens, 4, 16
    array = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    counts: Counter[str] = Counter()
    compiled = jax.jit(run).lower(array, array, array).compile()
    for collective in collectives(compiled.as_text() or ""):
        counts[collective.kind] += collective.sent_bytes
    return counts


def as_told(scheme: ExchangeScheme) -> Counter[str]:
    kinds = {
        "all-to-all": scheme.all_to_all,
        "collective-permute": scheme.permute,
        "all-reduce": scheme.all_reduce,
        "all-gather": scheme.all_gather,
    }
    return Counter({kind: size for kind, size in kinds.items() if size})


@pytest.mark.parametrize(
    ("build", "balanced"),
    [(ct.spatial_mask, True), (ct.spatial_mask, False), (ct.temporal_mask, True)],
)
def test_bytes_of_the_halo(build: Any, balanced: bool) -> None:
    mask, mesh = build(EVEN, width=21), mesh_of(data=2, sequence=4)

    def run(query: Any, key: Any, value: Any) -> Any:
        return halo_attention(
            query, key, value, mask, mesh=mesh, block_q=16, block_kv=8, balanced=balanced
        )

    schemes = exchange_report(mask, devices=4, heads=4, head_dim=16, dtype="float32")
    assert sent(run, mesh, PartitionSpec("data", "sequence")) == as_told(schemes[3 - balanced])


def test_bytes_of_the_head_exchange() -> None:
    policy = ct.SparsityPolicy(
        0.5, dense_steps=(), dense_layers=(), block_q=16, block_kv=8, width_multiple=4
    )
    mesh = mesh_of(sequence=4)
    layer = ct.SparseAttention(EVEN, policy, mesh=mesh)

    def run(query: Any, key: Any, value: Any) -> Any:
        rng = jax.random.key(0)
        return layer(query, key, value, step=1, layer=1, rng=rng, return_record=True)

    mask = ct.spatial_mask(EVEN, 0.5)
    scheme = exchange_report(mask, devices=4, heads=4, head_dim=16, batch=2, dtype="float32")[1]
    assert sent(run, mesh, PartitionSpec(None, "sequence")) == as_told(scheme)
