"""The reference implementation, itself checked against plain dot-product attention."""

from typing import Any

import jax
import jax.numpy as jnp
import kernel_cases
import numpy as np
import pytest
from kernel_cases import KernelCase, find
from kernel_suite import KernelSuite

import cinetile as ct


class TestReference(KernelSuite):
    implementation = "reference"


def dot_product_attention(case: KernelCase, arrays: Any) -> np.ndarray:
    """The attention of jax itself with an explicit mask, in float32 at the highest precision."""
    kept = case.plan.mask_kept()
    with jax.default_matmul_precision("highest"):
        output = jax.nn.dot_product_attention(
            *(jnp.asarray(array, jnp.float32) for array in arrays),
            mask=jnp.asarray(kept)[None, None],
        )
    return np.asarray(output)


@pytest.mark.parametrize(
    "name",
    [
        "ragged",
        "ragged-bf16",
        "one-token",
        "density-1",
        "temporal-sink-2",
        "text-first-temporal",
        "hunyuan-padded-text",
        "cogvideox",
        "mode-dense-temporal",
        "mode-naive",
        "aligned-row",
        "head-dim-80",
        "batch-2-heads-3",
    ],
)
def test_against_jax(name: str) -> None:
    """Some of the cases; the suite compares all of them with brute force."""
    case = find(name)
    arrays = case.arrays(seed=1)
    output = ct.attention(*arrays, case.plan, implementation="reference")
    tolerance = 1e-2 if case.dtype == "bfloat16" else 1e-5
    expected = dot_product_attention(case, arrays)
    np.testing.assert_allclose(np.asarray(output, np.float32), expected, tolerance, tolerance)


@pytest.mark.parametrize("name", ["ragged", "temporal-sink-2", "mode-naive", "hunyuan-padded-text"])
def test_exact_modes_against_the_mask_itself(name: str) -> None:
    """`to_dense` knows nothing of tiles."""
    case = find(name)
    arrays = case.arrays(seed=2)
    with jax.default_matmul_precision("highest"):
        expected = jax.nn.dot_product_attention(
            *map(jnp.asarray, arrays), mask=jnp.asarray(case.mask.to_dense())[None, None]
        )
    output = ct.attention(*arrays, case.plan, implementation="reference")
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)


class TestReferenceRows:
    @pytest.mark.parametrize("name", ["batch-2-heads-3", "aligned-balanced", "text-first-temporal"])
    def test_sampled_rows_are_rows_of_the_whole(self, name: str) -> None:
        case = find(name)
        query, key, value = (array[0] for array in case.arrays())
        rows = np.array([7, 3, 3, 0, case.grid.num_tokens - 1])
        whole = ct.reference_rows(query, key, value, case.plan, np.arange(case.grid.num_tokens))
        sampled = ct.reference_rows(query, key, value, case.plan, rows)
        np.testing.assert_allclose(sampled[0], whole[0][rows], rtol=1e-12)
        np.testing.assert_allclose(sampled[1], whole[1][rows], rtol=1e-12)
        assert {array.dtype for array in sampled} == {np.dtype(np.float64)}

    def test_no_rows(self) -> None:
        case = find("ragged")
        query, key, value = (array[0] for array in case.arrays())
        output, lse = ct.reference_rows(query, key, value, case.plan, np.arange(0))
        assert (output.shape, lse.shape) == ((0, 1, 16), (0, 1))

    def test_scale(self) -> None:
        case = find("ragged")
        query, key, value = (array[0] for array in case.arrays())
        rows = np.arange(5)
        doubled = ct.reference_rows(2 * query, key, value, case.plan, rows, scale=0.1)
        scaled = ct.reference_rows(query, key, value, case.plan, rows, scale=0.2)
        np.testing.assert_allclose(doubled[0], scaled[0], rtol=1e-6)
        np.testing.assert_allclose(doubled[1], scaled[1], rtol=1e-6)

    def test_rows_of_a_real_size(self) -> None:
        """Uniform keys: each row averages as many values as it keeps keys."""
        grid = ct.TokenGrid(21, 30, 52)
        mask = ct.spatial_mask(grid, 0.35)
        plan = ct.plan_tiles(mask, 3328, 1536)
        zeros = np.zeros((grid.num_tokens, 1, 2), np.float32)
        value = zeros + np.arange(grid.num_tokens, dtype=np.float32)[:, None, None]
        rows = np.array([0, 1559, 1560, 16_000, 32_759])
        output, lse = ct.reference_rows(zeros, zeros, value, plan, rows)
        keys = np.arange(grid.num_tokens)
        for index, row in enumerate(rows):
            kept = (np.abs(keys - row) <= mask.width) | (keys < 1560)
            assert lse[index, 0] == pytest.approx(np.log(kept.sum()), rel=1e-12)
            assert output[index, 0, 0] == pytest.approx(keys[kept].mean(), rel=1e-12)


@pytest.mark.parametrize("case", kernel_cases.HUGE_CASES, ids=str)
def test_huge_cases_can_be_planned(case: KernelCase) -> None:
    stats = case.plan.stats
    assert stats.kept_fraction == pytest.approx(
        1.0 if case.mode == "dense" else case.mask.density, rel=0.005
    )


class TestBadRows:
    PLAN = ct.plan_tiles(ct.dense_mask(ct.TokenGrid(1, 2, 3)), 4, 4)

    def test_other_token_count(self) -> None:
        array = np.zeros((5, 1, 4), np.float32)
        with pytest.raises(ValueError, match=r"query must be .* got \(5, 1, 4\)"):
            ct.reference_rows(array, array, array, self.PLAN, np.array([0]))

    @pytest.mark.parametrize("row", [-1, 6])
    def test_row_that_does_not_exist(self, row: int) -> None:
        array = np.zeros((6, 1, 4), np.float32)
        with pytest.raises(ValueError, match=r"rows must lie in \[0, 6\)"):
            ct.reference_rows(array, array, array, self.PLAN, np.array([row]))
