"""What every implementation must do: inherit `KernelSuite` and name it.

class TestXla(KernelSuite):
    implementation = "xla"
"""

import functools
from dataclasses import replace
from typing import Any, ClassVar

import brute_force
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import CASES, MEDIUM_CASES, SMALL, TEXT_LAST, KernelCase, MaskBuilder, find

import cinetile as ct
from cinetile.kernels.base import Implementation

# float16 has three bits more than bfloat16, in the output and in weights that are rounded to it.
TOLERANCES = {"float32": 2e-5, "bfloat16": 1.5e-2, "float16": 1.5e-2 / 8}
LSE_TOLERANCES = {"float32": 2e-5, "bfloat16": 1.5e-2, "float16": 1.5e-2 / 8}
HUGE = 1e30

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])


def hunyuan_mask(width: int) -> MaskBuilder:
    return functools.partial(ct.svg_mask, pattern="temporal", width=width, model="hunyuan")


class KernelSuite:
    """Tests of one implementation against attention in float64, pair by pair."""

    implementation: ClassVar[str | Implementation]
    tolerances: ClassVar[dict[str, float]] = TOLERANCES
    """Absolute and relative error of the output that is allowed, per dtype."""
    lse_tolerances: ClassVar[dict[str, float]] = LSE_TOLERANCES
    refused_dtypes: ClassVar[dict[str, str]] = {}
    """Dtypes that the implementation does not take, each with what its error says."""

    def attend(self, query: Any, key: Any, value: Any, plan: Any, **options: Any) -> Any:
        query, key, value = map(jnp.asarray, (query, key, value))
        return ct.attention(query, key, value, plan, implementation=self.implementation, **options)

    def attend_and_lse(
        self, query: Any, key: Any, value: Any, plan: Any, **options: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Output and log-sum-exp, widened to compare with."""
        output, lse = self.attend(query, key, value, plan, return_lse=True, **options)
        return np.asarray(output, np.float64), np.asarray(lse, np.float64)

    def check(self, found: Any, expected: Any, dtype: str = "float32", slack: float = 1.0) -> None:
        """Compares output and log-sum-exp with what they should be."""
        output, lse = (np.asarray(array, np.float64) for array in found)
        tolerance = slack * self.tolerances[dtype]
        np.testing.assert_allclose(output, expected[0], tolerance, tolerance, err_msg="output")
        tolerance = slack * self.lse_tolerances[dtype]
        np.testing.assert_allclose(lse, expected[1], tolerance, tolerance, err_msg="lse")
        error = np.linalg.norm(output - expected[0])
        assert error <= slack * self.tolerances[dtype] / 2 * np.linalg.norm(expected[0])

    @every_case
    def test_output_and_lse(self, case: KernelCase) -> None:
        arrays = case.arrays()
        if case.dtype in self.refused_dtypes:
            with pytest.raises(NotImplementedError, match=self.refused_dtypes[case.dtype]):
                self.attend(*arrays, case.plan)
            return
        found = self.attend_and_lse(*arrays, case.plan)
        self.check(found, expected_of(arrays, [case.plan]), case.dtype)

    @pytest.mark.parametrize("case", MEDIUM_CASES, ids=str)
    def test_sampled_rows_of_many_tiles(self, case: KernelCase) -> None:
        query, key, value = case.arrays()
        output, lse = self.attend_and_lse(query, key, value, case.plan)
        tokens = case.grid.num_tokens
        rows = np.unique(np.linspace(0, tokens - 1, 97, dtype=np.int64))
        expected = ct.reference_rows(query[0], key[0], value[0], case.plan, rows)
        self.check((output[0, rows], lse[0, rows]), expected, case.dtype)

    @every_dtype
    def test_output_has_the_dtype_of_query(self, dtype: str) -> None:
        if dtype in self.refused_dtypes:
            pytest.skip(f"{self.implementation} takes no {dtype}")
        query, key, value = find("batch-2-heads-3").arrays()
        query, key, value = (array.astype(dtype) for array in (query, key, value))
        output, lse = self.attend(query, key, value, find("ragged").plan, return_lse=True)
        assert (output.dtype, output.shape) == (dtype, query.shape)
        assert (lse.dtype, lse.shape) == (jnp.float32, query.shape[:3])

    def test_output_alone(self) -> None:
        case = find("ragged")
        alone = self.attend(*case.arrays(), case.plan)
        both = self.attend(*case.arrays(), case.plan, return_lse=True)
        assert isinstance(alone, jax.Array)
        np.testing.assert_array_equal(alone, both[0])

    @pytest.mark.parametrize(
        ("build", "mode", "dtype"),
        [
            (ct.spatial_mask, "split", "float32"),
            (ct.spatial_mask, "split", "bfloat16"),
            (ct.spatial_mask, "split", "float16"),
            (ct.spatial_mask, "naive", "float32"),
            (ct.spatial_mask, "dense", "float32"),
            (ct.temporal_mask, "aligned", "float32"),
            (ct.temporal_mask, "dense", "bfloat16"),
        ],
    )
    def test_density_one_is_dot_product_attention(self, build: Any, mode: Any, dtype: str) -> None:
        if dtype in self.refused_dtypes:
            pytest.skip(f"{self.implementation} takes no {dtype}")
        plan = ct.plan_tiles(build(SMALL, density=1.0), 16, 24, mode)
        query, key, value = KernelCase(
            "", SMALL, build, batch=2, heads=2, head_dim=32, dtype=dtype
        ).arrays(3)
        with jax.default_matmul_precision("highest"):
            expected = jax.nn.dot_product_attention(
                *(jnp.asarray(array, jnp.float32) for array in (query, key, value))
            )
        found = np.asarray(self.attend(query, key, value, plan), np.float64)
        tolerance = self.tolerances[dtype]
        np.testing.assert_allclose(found, expected, tolerance, tolerance)

    @pytest.mark.parametrize("scale", [1.0, 0.02, 3.0])
    def test_scale(self, scale: float) -> None:
        case = find("temporal-sink-1")
        arrays = case.arrays()
        found = self.attend_and_lse(*arrays, case.plan, scale=scale)
        self.check(found, expected_of(arrays, [case.plan], scale=scale), slack=4)

    @pytest.mark.parametrize("name", ["ragged", "temporal-sink-2", "hunyuan-padded-text"])
    def test_equal_logits_average_the_kept_values(self, name: str) -> None:
        case = find(name)
        query, key, value = case.arrays()
        output, lse = self.attend_and_lse(np.zeros_like(query), key, value, case.plan)
        kept = case.plan.mask_kept().astype(float)
        counts = kept.sum(axis=1)
        means = kept @ value[0, :, 0].astype(float) / counts[:, None]
        self.check((output[0, :, 0], lse[0, :, 0]), (means, np.log(counts)))

    @pytest.mark.parametrize("name", ["ragged", "temporal-sink-2", "aligned-balanced"])
    def test_equal_values_come_back(self, name: str) -> None:
        """Weights sum to one in every row."""
        case = find(name)
        query, key, value = case.arrays()
        output = self.attend(query, key, np.broadcast_to(value[:, :1], value.shape), case.plan)
        expected = np.broadcast_to(value[:, :1], value.shape)
        np.testing.assert_allclose(output, expected, rtol=2e-6, atol=2e-6)

    @pytest.mark.parametrize("magnitude", [1e2, 1e4])
    @pytest.mark.parametrize("name", ["ragged", "temporal-sink-2", "mode-naive", "aligned-row"])
    def test_large_logits(self, name: str, magnitude: float) -> None:
        case = find(name)
        query, key, value = case.arrays()
        query = query * (magnitude / np.abs(np.einsum("bqhd,bkhd->bhqk", query, key)).max())
        found = self.attend_and_lse(query, key, value, case.plan, scale=1.0)
        # A float32 logit of this size is right to a few units in the last place only.
        slack = max(1.0, magnitude * 1e-2)
        self.check(found, expected_of((query, key, value), [case.plan], scale=1.0), slack=slack)

    @pytest.mark.parametrize("offset", [-1e4, 1e4])
    @pytest.mark.parametrize("name", ["ragged", "temporal-sink-2", "mode-naive", "aligned-row"])
    def test_logits_far_from_zero(self, name: str, offset: float) -> None:
        """All logits of a row are alike and far off, so no start value may take part."""
        case = find(name)
        query, key, value = case.arrays()
        query, key = np.full_like(query, offset / case.head_dim), np.ones_like(key)
        output, lse = self.attend_and_lse(query, key, value, case.plan, scale=1.0)
        kept = case.plan.mask_kept().astype(float)
        counts = kept.sum(axis=1)
        means = kept @ value[0, :, 0].astype(float) / counts[:, None]
        expected = means, offset + np.log(counts)
        self.check((output[0, :, 0], lse[0, :, 0]), expected, slack=10)

    @pytest.mark.parametrize("magnitude", [1e2, 1e4])
    def test_large_logits_in_bfloat16_stay_averages(self, magnitude: float) -> None:
        case = find("ragged-bf16")
        query, key, value = case.arrays()
        query = query * jnp.bfloat16(magnitude / 16)
        output, lse = self.attend_and_lse(query, key, value, case.plan, scale=1.0)
        assert np.isfinite(lse).all()
        assert np.abs(output).max() <= np.abs(value.astype(np.float64)).max() * 1.01

    @pytest.mark.parametrize("sign", [-1, 1])
    @pytest.mark.parametrize("which", ["key", "value", "key and value"])
    @pytest.mark.parametrize(
        "name",
        [
            "ragged",
            "blocks-divide",
            "temporal-sink-2",
            "mode-naive",
            "aligned-balanced",
            "hunyuan-padded-text",
            "text-first-temporal",
            "width-0",
            "blocks-beyond-the-sequence",
        ],
    )
    def test_masked_pairs_do_not_leak(self, name: str, which: str, sign: int) -> None:
        """Rows that do not keep a huge key must not feel it, though others do keep it."""
        case = find(name)
        arrays = query, key, value = case.arrays()
        kept = case.plan.mask_kept()
        left_out = np.flatnonzero(~kept.all(axis=0))
        spoiled = left_out[left_out.size // 3 :: 31]
        safe = ~kept[:, spoiled].any(axis=1)
        assert safe.any(), "the case must have rows that keep none of these keys"
        assert spoiled.size, "the case must have keys that some rows leave out"
        bad_key, bad_value = key.copy(), value.copy()
        if "key" in which:
            bad_key[:, spoiled] = sign * HUGE
        if "value" in which:
            bad_value[:, spoiled] = sign * HUGE
        output, lse = self.attend_and_lse(query, bad_key, bad_value, case.plan)
        expected = expected_of(arrays, [case.plan])
        self.check((output[:, safe], lse[:, safe]), (expected[0][:, safe], expected[1][:, safe]))

    def test_keys_that_no_query_keeps(self) -> None:
        """An aligned plan of a diagonal keeps one key in six; the others may hold anything."""
        mask = ct.spatial_mask(SMALL, width=0, sink_frames=0)
        plan = ct.plan_tiles(mask, 6, 1, "aligned")
        query, key, value = arrays = find("ragged").arrays()
        unused = ~plan.mask_kept().any(axis=0)
        assert unused.sum() > 50
        bad_key, bad_value = key.copy(), value.copy()
        bad_key[:, unused] = bad_value[:, unused] = HUGE
        found = self.attend_and_lse(query, bad_key, bad_value, plan)
        self.check(found, expected_of(arrays, [plan]))

    @pytest.mark.parametrize("number", [np.nan, 1e30])
    def test_padding_beyond_the_prompt_may_hold_anything(self, number: float) -> None:
        plan = ct.plan_tiles(ct.spatial_mask(TEXT_LAST, width=9), 16, 16)
        query, key, value = KernelCase("", TEXT_LAST, ct.dense_mask).arrays()
        padding = np.arange(TEXT_LAST.num_tokens) >= TEXT_LAST.num_video_tokens + 4
        expected = self.attend_and_lse(query, key, value, plan, prompt_length=4)
        for array in (query, key, value):
            array[:, padding] = number
        found = self.attend_and_lse(query, key, value, plan, prompt_length=4)
        for arguments, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(arguments[:, ~padding], other[:, ~padding], 1e-6, 1e-6)

    def test_padded_text_feels_no_real_token(self) -> None:
        """Nor any real token the padding, whose values may be anything."""
        case = find("hunyuan-padded-text")
        query, key, value = arrays = case.arrays()
        padding = np.arange(case.grid.num_tokens) >= case.grid.num_video_tokens + 4
        bad_key, bad_value = key.copy(), value.copy()
        bad_key[:, padding] = bad_value[:, padding] = HUGE
        output, lse = self.attend_and_lse(query, bad_key, bad_value, case.plan)
        expected = expected_of(arrays, [case.plan])
        real = ~padding
        self.check((output[:, real], lse[:, real]), (expected[0][:, real], expected[1][:, real]))

    def test_batch_rows_and_heads_are_independent(self) -> None:
        case = find("batch-2-heads-3")
        arrays = case.arrays()
        output, lse = self.attend_and_lse(*arrays, case.plan)
        query, key, value = (array[1:, :, 2:] for array in arrays)
        alone, alone_lse = self.attend_and_lse(query, key, value, case.plan)
        np.testing.assert_allclose(output[1:, :, 2:], alone, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(lse[1:, :, 2:], alone_lse, rtol=1e-6, atol=1e-6)

    def test_inside_jit(self) -> None:
        case = find("temporal-sink-1")
        arrays = case.arrays()
        attend = jax.jit(functools.partial(self.attend, plan=case.plan, return_lse=True))
        self.check(attend(*arrays), expected_of(arrays, [case.plan]))

    def test_vmap(self) -> None:
        case = find("temporal-sink-1")
        stacked = [np.stack([case.arrays(seed)[i] for seed in range(3)]) for i in range(3)]
        attend = functools.partial(self.attend, plan=case.plan, return_lse=True)
        outputs, lses = jax.vmap(attend)(*stacked)
        for index, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
            arguments = [array[index] for array in stacked]
            self.check((output, lse), expected_of(arguments, [case.plan]))

    def test_vmap_over_the_query_alone(self) -> None:
        case = find("ragged")
        query, key, value = case.arrays()
        queries = np.stack([query, -query], axis=-1)
        attend = functools.partial(self.attend, plan=case.plan)
        outputs = jax.vmap(attend, in_axes=(-1, None, None), out_axes=-1)(queries, key, value)
        for index, sign in enumerate((1, -1)):
            expected, _ = expected_of((sign * query, key, value), [case.plan])
            np.testing.assert_allclose(outputs[..., index], expected, rtol=2e-5, atol=2e-5)

    PLANS: ClassVar[tuple[ct.TilePlan, ...]] = (
        ct.plan_tiles(ct.spatial_mask(SMALL, width=9), 16, 24),
        ct.plan_tiles(ct.temporal_mask(SMALL, width=5), 24, 8, "aligned"),
        ct.plan_tiles(ct.svg_mask(SMALL, "temporal", width=3), 10, 14, "naive"),
        ct.plan_tiles(ct.dense_mask(SMALL), 70, 35),
    )
    """Of different masks, orders, modes and tile sizes."""

    @pytest.mark.parametrize(
        "routes",
        [
            pytest.param([[0, 1, 2], [3, 0, 1]], id="mixed"),
            pytest.param([[3, 3, 3], [3, 3, 3]], id="the-last-for-all"),
            pytest.param([[0, 0, 0], [1, 1, 1]], id="by-batch-row"),
        ],
    )
    @pytest.mark.parametrize("as_array", [np.array, jnp.array], ids=["numpy", "jax"])
    def test_routes(self, routes: list[list[int]], as_array: Any) -> None:
        arrays = find("batch-2-heads-3").arrays()
        found = self.attend_and_lse(*arrays, self.PLANS, routes=as_array(routes))
        self.check(found, expected_of(arrays, self.PLANS, routes))

    def test_routes_with_text(self) -> None:
        """Masks may place the text differently: padding last, or first among the keys."""
        plans = [
            ct.plan_tiles(ct.spatial_mask(TEXT_LAST, width=9), 16, 16),
            find("hunyuan-padded-text-temporal").plan,
        ]
        arrays = KernelCase("", TEXT_LAST, ct.dense_mask, heads=2).arrays()
        found = self.attend_and_lse(*arrays, plans, routes=np.array([[1, 0]]))
        self.check(found, expected_of(arrays, plans, [[1, 0]]))

    def test_routes_of_a_single_plan(self) -> None:
        case = find("batch-2-heads-3")
        routed = self.attend(*case.arrays(), (case.plan,), routes=np.zeros((2, 3), np.int8))
        np.testing.assert_array_equal(routed, self.attend(*case.arrays(), case.plan))

    def test_traced_routes_do_not_recompile(self) -> None:
        arrays = find("batch-2-heads-3").arrays()
        traced = []

        @jax.jit
        def attend(query: Any, key: Any, value: Any, routes: Any) -> Any:
            traced.append(routes)
            return self.attend(query, key, value, self.PLANS, routes=routes, return_lse=True)

        for routes in ([[0, 1, 2], [3, 0, 1]], [[2, 2, 2], [0, 0, 3]], [[1, 3, 0], [1, 2, 0]]):
            found = attend(*arrays, jnp.array(routes))
            self.check(found, expected_of(arrays, self.PLANS, routes))
        assert len(traced) == 1

    def test_traced_routes_out_of_range_are_clamped(self) -> None:
        arrays = find("batch-2-heads-3").arrays()
        attend = jax.jit(
            lambda routes: self.attend(*arrays, self.PLANS, routes=routes, return_lse=True)
        )
        found = attend(jnp.array([[-1, 0, 4], [99, -99, 2]]))
        self.check(found, expected_of(arrays, self.PLANS, [[0, 0, 3], [3, 0, 2]]))

    def test_traced_routes_of_a_single_plan_are_clamped(self) -> None:
        case = find("batch-2-heads-3")
        arrays = case.arrays()
        attend = jax.jit(
            lambda routes: self.attend(*arrays, case.plan, routes=routes, return_lse=True)
        )
        found = attend(jnp.array([[-1, 0, 4], [99, -99, 2]]))
        self.check(found, expected_of(arrays, [case.plan]))

    PROMPT_CASES: ClassVar[dict[str, KernelCase]] = {
        **{name: find(name) for name in ("text-last", "text-last-temporal", "text-first")},
        "split-small-tiles": replace(find("text-last"), block_q=8, block_kv=4),
        "naive": replace(find("text-last-temporal"), mode="naive"),
        "dense": replace(find("text-last"), mode="dense"),
        "aligned": replace(find("text-last-temporal"), mode="aligned"),
        "dense-mask": replace(find("text-last"), build_mask=ct.dense_mask),
        "bf16": replace(find("text-last-temporal"), dtype="bfloat16"),
        "hunyuan": replace(find("text-last"), build_mask=hunyuan_mask(9)),
        "video keeps text alone": replace(find("text-last"), build_mask=hunyuan_mask(0)),
    }

    @pytest.mark.parametrize("lengths", [[9, 4], [1, 0]], ids=str)
    @pytest.mark.parametrize("name", PROMPT_CASES)
    def test_prompt_length(self, name: str, lengths: list[int]) -> None:
        """Keys of the padding may hold anything; its own rows may give anything finite."""
        case = replace(self.PROMPT_CASES[name], batch=2, heads=2)
        query, key, value = case.arrays()
        exists = text_exists(case.grid, lengths)
        for array, number in ((key, HUGE), (value, -HUGE)):
            array[~exists] = number
        attend = jax.jit(
            lambda query, key, value, lengths: self.attend(
                query, key, value, case.plan, prompt_length=lengths, return_lse=True
            )
        )
        output, lse = (
            np.asarray(array, np.float64) for array in attend(query, key, value, jnp.array(lengths))
        )
        kept = case.plan.mask_kept() & exists[:, None, :]
        assert np.isfinite(output).all()
        for row, head in np.ndindex(2, 2):
            safe_key, safe_value = (
                np.where(exists[row, :, None], array[row, :, head], 0) for array in (key, value)
            )
            some_key = kept[row].any(axis=1)
            assert not output[row, ~some_key, head].any()
            assert np.isneginf(lse[row, ~some_key, head]).all()
            real = exists[row] & some_key
            real_query = query[row, real, head]
            expected = brute_force.attention(real_query, safe_key, safe_value, kept[row][real])
            self.check((output[row, real, head], lse[row, real, head]), expected, case.dtype)

    def test_prompt_length_of_routed_heads(self) -> None:
        plans = [find(name).plan for name in ("text-last", "text-last-temporal")]
        case = replace(find("text-last"), heads=2)
        query, key, value = case.arrays()
        exists = text_exists(case.grid, [3])[0]
        found = self.attend_and_lse(
            query, key, value, plans, routes=np.array([[1, 0]]), prompt_length=3
        )
        for head, plan in enumerate(plans[::-1]):
            kept = plan.mask_kept()[exists] & exists
            expected = brute_force.attention(
                query[0, exists, head], key[0, :, head], value[0, :, head], kept
            )
            self.check([array[0, exists, head] for array in found], expected)


def text_exists(grid: ct.TokenGrid, lengths: list[int]) -> np.ndarray:
    """Which tokens, frame-major, each batch row has: all video, and text up to its length."""
    is_text, _, _ = brute_force.tokens(grid)
    number_of_text = np.cumsum(is_text) - 1
    return ~is_text | (number_of_text < np.array(lengths)[:, None])


def expected_of(
    arrays: Any, plans: Any, routes: Any = None, *, scale: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp of every batch row and head over the pairs that its plan keeps."""
    query, key, value = arrays
    batch, tokens, heads, _ = query.shape
    output, lse = np.empty(query.shape), np.empty((batch, tokens, heads))
    kept = [plan.mask_kept() for plan in plans]
    for row, head in np.ndindex(batch, heads):
        route = 0 if routes is None else routes[row][head]
        output[row, :, head], lse[row, :, head] = brute_force.attention(
            query[row, :, head], key[row, :, head], value[row, :, head], kept[route], scale
        )
    return output, lse
