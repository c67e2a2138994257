"""Gradients through the portable kernel against those of plain dense attention with a mask."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import cinetile as ct

GRID = ct.TokenGrid(4, 3, 5, text_tokens=3)
SPATIAL = ct.spatial_mask(GRID, width=7)
TEMPORAL = ct.temporal_mask(GRID, width=4)
SCALE = 0.3


def arrays(batch: int, heads: int, head_dim: int, count: int) -> list[Array]:
    shape = (count, batch, GRID.num_tokens, heads, head_dim)
    return list(jax.random.normal(jax.random.key(0), shape))


def masked_attention(query: Array, key: Array, value: Array, kept: Array) -> tuple[Array, Array]:
    """Output and log-sum-exp; `kept` is [batch, heads, queries, keys]."""
    logits = SCALE * jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest")
    logits = jnp.where(kept, logits, -jnp.inf)
    weights = jax.nn.softmax(logits, axis=-1)
    output = jnp.einsum("bhqk,bkhd->bqhd", weights, value, precision="highest")
    return output, jax.nn.logsumexp(logits, axis=-1).swapaxes(1, 2)


def assert_same_gradients(plans: Any, routes: np.ndarray, *, jit: bool = False) -> None:
    batch, heads = routes.shape
    query, key, value, output_gradient = arrays(batch, heads, 16, 4)
    lse_gradient = output_gradient[..., 0]
    kept = jnp.asarray(np.stack([plan.mask_kept() for plan in plans])[routes])

    def sparse(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        return ct.attention(
            query,
            key,
            value,
            plans,
            routes=routes,
            scale=SCALE,
            return_lse=True,
            implementation="xla",
        )

    def gradients(function: Any) -> Any:
        return jax.vjp(function, query, key, value)[1]((output_gradient, lse_gradient))

    actual = gradients(jax.jit(sparse) if jit else sparse)
    expected = gradients(lambda q, k, v: masked_attention(q, k, v, kept))
    for gradient, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(gradient, other, atol=1e-5)


@pytest.mark.parametrize("mask", [SPATIAL, TEMPORAL], ids=["spatial", "temporal"])
@pytest.mark.parametrize("mode", ["dense", "naive", "split", "aligned"])
@pytest.mark.parametrize("blocks", [(8, 12), (16, 7), (100, 100)], ids=str)
def test_one_plan(mask: ct.Mask, mode: Any, blocks: tuple[int, int]) -> None:
    assert_same_gradients((ct.plan_tiles(mask, *blocks, mode),), np.zeros((1, 2), int))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_routed_heads(jit: bool) -> None:
    plans = (
        ct.plan_tiles(SPATIAL, 8, 12),
        ct.plan_tiles(TEMPORAL, 16, 8, "aligned"),
        ct.plan_tiles(ct.dense_mask(GRID), 32, 32, "dense"),
    )
    assert_same_gradients(plans, np.array([[0, 1, 2], [1, 1, 0]]), jit=jit)


def test_keys_that_no_query_keeps_get_no_gradient() -> None:
    grid = ct.TokenGrid(2, 4, 4, text_tokens=8)
    mask = ct.svg_mask(grid, "spatial", width=3, model="hunyuan", prompt_length=5)
    plan = ct.plan_tiles(mask, 8, 8)
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, grid.num_tokens, 1, 8))

    def real_rows(key: Array, value: Array) -> Array:
        output = ct.attention(query, key, value, plan, implementation="xla")
        return jnp.sum(output[:, : grid.num_tokens - 3])

    for gradient in jax.grad(real_rows, argnums=(0, 1))(key, value):
        assert not gradient[:, -3:].any()
        assert gradient[:, :-3].all()


@pytest.mark.parametrize("mode", ["dense", "naive", "split", "aligned"])
@pytest.mark.parametrize("length", [3, 1, 0])
def test_run_time_prompt_length(mode: Any, length: int) -> None:
    """Padding gets no gradient, and what it holds changes none."""
    plan = ct.plan_tiles(TEMPORAL, 8, 2, mode)
    query, key, value, output_gradient = arrays(1, 2, 16, 4)
    exists = np.arange(GRID.num_tokens) < GRID.num_video_tokens + length
    real = exists & (plan.mask_kept() & exists).any(axis=1)
    output_gradient = output_gradient * real[:, None, None]
    key, value = (jnp.where(exists[:, None, None], array, 1e4) for array in (key, value))

    def sparse(query: Array, key: Array, value: Array) -> Array:
        return ct.attention(
            query, key, value, plan, scale=SCALE, implementation="xla", prompt_length=length
        )

    # Rows without any key would make plain softmax divide by zero.
    kept = jnp.asarray(plan.mask_kept() & exists | ~real[:, None])

    def gradients(function: Any) -> Any:
        return jax.vjp(function, query, key, value)[1](output_gradient)

    actual = gradients(sparse)
    expected = gradients(lambda q, k, v: masked_attention(q, k, v, kept)[0])
    for gradient, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(gradient, other, atol=1e-5)


def test_bfloat16_gradients_have_the_dtype_of_their_arrays() -> None:
    plan = ct.plan_tiles(SPATIAL, 16, 16)
    query, key, value = (array.astype(jnp.bfloat16) for array in arrays(1, 1, 16, 3))

    def loss(query: Array, key: Array, value: Array) -> Array:
        output = ct.attention(query, key, value, plan, implementation="xla")
        return jnp.sum(output.astype(jnp.float32) ** 2)

    narrow = jax.grad(loss, argnums=(0, 1, 2))(query, key, value)
    wide = jax.grad(loss, argnums=(0, 1, 2))(
        *(array.astype(jnp.float32) for array in (query, key, value))
    )
    for gradient, other in zip(narrow, wide, strict=True):
        assert gradient.dtype == jnp.bfloat16
        np.testing.assert_allclose(gradient.astype(jnp.float32), other, atol=0.05, rtol=0.05)


def test_memory_is_linear_in_the_tokens() -> None:
    def temporaries(frames: int) -> int:
        grid = ct.TokenGrid(frames, 16, 16)
        plan = ct.plan_tiles(ct.spatial_mask(grid, width=256), 256, 256)
        shape = jax.ShapeDtypeStruct((1, grid.num_tokens, 1, 64), jnp.float32)

        def loss(query: Array, key: Array, value: Array) -> Array:
            return jnp.sum(ct.attention(query, key, value, plan, implementation="xla"))

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporaries(32) < 2.5 * temporaries(16)


def test_forward_mode_raises() -> None:
    plan = ct.plan_tiles(SPATIAL, 16, 16)
    query, key, value = arrays(1, 1, 8, 3)

    def attend(query: Array) -> Array:
        return ct.attention(query, key, value, plan, implementation="xla")

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(attend, (query,), (query,))
