"""The TPU kernel in pallas' interpreter, which runs anywhere but slowly: a part of the suite."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from kernel_cases import MEDIUM_CASES, SMALL, KernelCase, find
from kernel_suite import KernelSuite, expected_of

import cinetile as ct
from cinetile.kernels.base import AttentionRequest, Implementation, ImplementationChoice
from cinetile.kernels.pallas_tpu import PallasTpuImplementation, PallasTpuTwoKernels, call, guard
from cinetile.kernels.pallas_tpu.config import KINDS, SMEM_LIMIT_BYTES, KernelConfig
from cinetile.kernels.pallas_tpu.kernel import unit_cases
from cinetile.kernels.pallas_tpu.routing import order_heads
from cinetile.kernels.pallas_tpu.tables import step_tables, unit_extremes

INTERPRETED = (PallasTpuImplementation(interpret=True), PallasTpuTwoKernels(interpret=True))
CHECKED = PallasTpuImplementation(
    pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
    )
)
CASE_NAMES = (
    "ragged",
    "blocks-beyond-the-sequence",
    "one-token",
    "width-0",
    "temporal-sink-2",
    "text-first-temporal",
    "hunyuan-padded-text",
    "cogvideox",
    "mode-dense-temporal",
    "mode-naive",
    "aligned-balanced",
    "head-dim-80",
    "batch-2-heads-3",
    "ragged-bf16",
    "mode-naive-bf16",
    "head-dim-128-bf16",
    "ragged-f16",
)


class TestPallasTpu(KernelSuite):
    implementation = INTERPRETED[0]
    # Products of bfloat16 numbers are exact, so only weights and values are rounded.
    lse_tolerances: ClassVar[dict[str, float]] = {"float32": 2e-5, "bfloat16": 1e-4}
    refused_dtypes: ClassVar[dict[str, str]] = {"float16": "TPUs multiply bfloat16 and float32"}

    @pytest.mark.parametrize("case", [find(name) for name in CASE_NAMES], ids=str)
    def test_output_and_lse(self, case: KernelCase) -> None:
        super().test_output_and_lse(case)

    @pytest.mark.parametrize("case", [MEDIUM_CASES[1]], ids=str)
    def test_sampled_rows_of_many_tiles(self, case: KernelCase) -> None:
        super().test_sampled_rows_of_many_tiles(case)

    @pytest.mark.parametrize("sign", [1])
    @pytest.mark.parametrize("which", ["key and value"])
    @pytest.mark.parametrize("name", ["mode-naive", "hunyuan-padded-text"])
    def test_masked_pairs_do_not_leak(self, name: str, which: str, sign: int) -> None:
        super().test_masked_pairs_do_not_leak(name, which, sign)

    @pytest.mark.parametrize("magnitude", [1e4])
    @pytest.mark.parametrize("name", ["ragged"])
    def test_large_logits(self, name: str, magnitude: float) -> None:
        super().test_large_logits(name, magnitude)

    @pytest.mark.parametrize("offset", [-1e4])
    @pytest.mark.parametrize("name", ["ragged"])
    def test_logits_far_from_zero(self, name: str, offset: float) -> None:
        super().test_logits_far_from_zero(name, offset)

    @pytest.mark.parametrize("magnitude", [1e4])
    def test_large_logits_in_bfloat16_stay_averages(self, magnitude: float) -> None:
        super().test_large_logits_in_bfloat16_stay_averages(magnitude)

    @pytest.mark.parametrize(
        ("build", "mode", "dtype"),
        [(ct.spatial_mask, "split", "bfloat16"), (ct.temporal_mask, "aligned", "float32")],
    )
    def test_density_one_is_dot_product_attention(self, build: Any, mode: Any, dtype: str) -> None:
        super().test_density_one_is_dot_product_attention(build, mode, dtype)

    @pytest.mark.parametrize("scale", [3.0])
    def test_scale(self, scale: float) -> None:
        super().test_scale(scale)

    @pytest.mark.parametrize("name", ["temporal-sink-2"])
    def test_equal_logits_average_the_kept_values(self, name: str) -> None:
        super().test_equal_logits_average_the_kept_values(name)

    @pytest.mark.parametrize("name", ["temporal-sink-2"])
    def test_equal_values_come_back(self, name: str) -> None:
        super().test_equal_values_come_back(name)

    @pytest.mark.parametrize("routes", [[[0, 1, 2], [3, 0, 1]]], ids=["mixed"])
    @pytest.mark.parametrize("as_array", [jnp.array])
    def test_routes(self, routes: list[list[int]], as_array: Any) -> None:
        super().test_routes(routes, as_array)

    @pytest.mark.parametrize("lengths", [[4, 0]], ids=str)
    @pytest.mark.parametrize("name", KernelSuite.PROMPT_CASES)
    def test_prompt_length(self, name: str, lengths: list[int]) -> None:
        super().test_prompt_length(name, lengths)

    @pytest.mark.parametrize("number", [np.nan])
    def test_padding_beyond_the_prompt_may_hold_anything(self, number: float) -> None:
        super().test_padding_beyond_the_prompt_may_hold_anything(number)


class TestTwoKernels:
    """One kernel for full tiles, one for masked ones, merged."""

    @pytest.mark.parametrize("name", ["ragged", "mode-naive", "one-token"])
    def test_output_and_lse(self, name: str) -> None:
        case = find(name)
        arrays = case.arrays()
        found = attend(arrays, case.plan, implementation=INTERPRETED[1])
        check(found, expected_of(arrays, [case.plan]))

    def test_prompt_length(self) -> None:
        """Tiles that hold text belong to the kernel of masked tiles."""
        case = find("text-last")
        arrays = case.arrays()
        found, expected = (
            attend(arrays, case.plan, implementation=implementation, prompt_length=4)
            for implementation in (INTERPRETED[1], INTERPRETED[0])
        )
        real = np.arange(case.grid.num_tokens) < case.grid.num_video_tokens + 4
        check([array[:, real] for array in found], [array[:, real] for array in expected])


class TestAccuracy:
    """In bfloat16 the error is that of rounding weights, values and output, whatever the scale."""

    @pytest.mark.parametrize(("deviation", "limit"), [(1.0, 2.5e-3), (8.0, 2e-3)])
    def test_relative_error(self, deviation: float, limit: float) -> None:
        case = KernelCase("", SMALL, ct.dense_mask, 32, 32, heads=2, head_dim=128, dtype="bfloat16")
        query, key, value = case.arrays()
        query = (query * np.float32(deviation)).astype(query.dtype)
        found, _ = attend((query, key, value), case.plan)
        expected, _ = expected_of((query, key, value), [case.plan])
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error < limit


def attend(
    arrays: Any, plan: Any, implementation: Implementation = INTERPRETED[0], **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    query, key, value = map(jnp.asarray, arrays)
    output, lse = ct.attention(
        query, key, value, plan, implementation=implementation, return_lse=True, **options
    )
    return np.asarray(output, np.float64), np.asarray(lse, np.float64)


def check(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(found[0], expected[0], tolerance, tolerance, err_msg="output")
    np.testing.assert_allclose(found[1], expected[1], tolerance, tolerance, err_msg="lse")


def heads_are_safe(arrays: Any, scale: float) -> list[bool]:
    """What the guard says of each head of one batch row."""
    query, key, value = (jnp.asarray(array)[0].swapaxes(0, 1) for array in arrays)
    bounds = guard.score_bounds(query, key, scale / np.log(2))
    return guard.is_safe(bounds, value).tolist()


class TestGuard:
    """Inputs that are hostile to a bound in place of a maximum."""

    CASE = KernelCase("", SMALL, lambda grid: ct.spatial_mask(grid, width=9), 16, 24, heads=2)

    def compare(self, arrays: Any, safe: list[bool], scale: float = 0.25) -> None:
        assert heads_are_safe(arrays, scale) == safe
        found = attend(arrays, self.CASE.plan, scale=scale)
        check(found, expected_of(arrays, [self.CASE.plan], scale=scale), 5e-5)

    def test_ordinary_heads_are_safe(self) -> None:
        self.compare(self.CASE.arrays(), [True, True])

    def test_heads_fall_back_one_by_one(self) -> None:
        query, key, value = self.CASE.arrays()
        query[:, :, 1] *= 40
        self.compare((query, key, value), [True, False])

    def test_one_huge_key(self) -> None:
        query, key, value = self.CASE.arrays()
        key[:, 33] *= 1e3
        self.compare((query, key, value), [False, False])

    def test_scores_at_both_ends_of_the_bound(self) -> None:
        """Every row has a score at minus its bound, some keep nothing else but such scores."""
        query, key, value = self.CASE.arrays()
        direction = np.ones(16) / 4
        room = guard.MAX_BOUND - np.log2(np.abs(value).max())
        query[:] = direction * np.float32(room * 0.999 * np.log(2))
        key[:] = -direction
        key[:, ::7] = direction
        self.compare((query, key, value), [True, True], scale=1.0)
        key[:] = -direction
        key[:, 0] = direction
        self.compare((query, key, value), [True, True], scale=1.0)

    def test_just_past_the_bound(self) -> None:
        query, key, value = self.CASE.arrays()
        room = guard.MAX_BOUND - np.log2(np.abs(value).max(axis=(0, 1, 3)))[:, None]
        query[:] = np.float32(room * 1.001 * np.log(2) / 4)
        key[:] = 0.25
        self.compare((query, key, value), [False, False], scale=1.0)

    def test_huge_values_take_the_online_kernel(self) -> None:
        query, key, value = self.CASE.arrays()
        value[:, 5, 0] = 1e30
        assert heads_are_safe((query, key, value), 0.25) == [False, True]
        output, _ = attend((query, key, value), self.CASE.plan, scale=0.25)
        expected, _ = expected_of((query, key, value), [self.CASE.plan], scale=0.25)
        np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("number", [0.0, -0.0, 1e-40, -1e-45, 1.0])
    def test_equal_rows_of_special_numbers(self, number: float) -> None:
        query, key, value = self.CASE.arrays()
        query[:] = number
        key[:] = np.float32(number)
        self.compare((query, key, value), [True, True])

    @pytest.mark.parametrize("number", [np.inf, np.nan])
    def test_what_is_not_finite_is_not_safe(self, number: float) -> None:
        for which in range(3):
            arrays = self.CASE.arrays()
            arrays[which][0, 3, 1] = number
            assert heads_are_safe(arrays, 0.25) == [True, False]

    def test_weights_stay_normal_numbers(self) -> None:
        smallest, largest_sum = 2.0**-guard.MAX_BOUND, 2.0**guard.MAX_BOUND * guard.MAX_KEYS
        assert smallest >= 4 * np.finfo(np.float32).tiny
        assert largest_sum < np.finfo(np.float32).max / 4

    def test_values_count_among_what_may_overflow(self) -> None:
        query, key, value = self.CASE.arrays()
        query[:], key[:] = np.float32(80 * np.log(2) / 4), 0.25
        value[:, :, 0] *= 2.0**10
        value[:, :, 1] *= 2.0**30
        assert heads_are_safe((query, key, value), 1.0) == [True, False]
        output, _ = attend((query, key, value), self.CASE.plan, scale=1.0)
        expected, _ = expected_of((query, key, value), [self.CASE.plan], scale=1.0)
        np.testing.assert_allclose(output, expected, rtol=1e-4, atol=2.0**30 * 2e-6)


class TestUnits:
    """Groups and spans, which small tiles do not have by themselves."""

    @pytest.mark.parametrize("softmax", ["fixed", "online"])
    @pytest.mark.parametrize("ranges", [1, 3])
    def test_tiles_of_many_units(self, softmax: Any, ranges: int) -> None:
        plans = [
            ct.plan_tiles(ct.spatial_mask(GRID, width=60), 80, 64),
            ct.plan_tiles(ct.spatial_mask(GRID, width=25, sink_frames=0), 80, 64, "naive"),
            ct.plan_tiles(ct.dense_mask(GRID), 80, 64),
        ]
        config = KernelConfig(80, 64, 16, 16, 32, 32, 48, softmax)
        query, key, value = (
            jnp.asarray(np.random.default_rng(n).standard_normal((4, 210, 16), np.float32))
            for n in range(3)
        )
        routes = np.array([1, 0, 2, 1])
        inputs = call.KernelInputs(query * 2, key, call.transpose_value(value, 64))
        limit = SMEM_LIMIT_BYTES if ranges == 1 else 600
        tables = step_tables(plans, config, 4, limit=limit)
        assert len(tables.words) == ranges
        order = order_heads(jnp.asarray(routes), jnp.array([True, True, False, True]))
        outputs = call.empty_outputs(inputs.query, 240)
        found = jax.jit(
            lambda inputs, order, outputs: call.run(
                inputs, order, tables, config, outputs, factor=0.5, interpret=True
            )
        )(inputs, order, outputs)
        assert not np.asarray(found.output[2]).any()
        for head in (0, 1, 3):
            kept = plans[routes[head]].mask_kept()
            exact = np.asarray(query[head], float) @ np.asarray(key[head], float).T
            scores = np.where(kept, exact, -np.inf)
            weights = np.exp2(scores - scores.max(1, keepdims=True))
            sums = weights.sum(1, keepdims=True)
            np.testing.assert_allclose(
                found.output[head, :210], weights @ value[head] / sums, 2e-5, 2e-5
            )
            lse = (scores.max(1) + np.log2(sums[:, 0])) * np.log(2)
            np.testing.assert_allclose(found.lse[head, 0, :210], lse, 2e-5, 2e-5)

    @pytest.mark.parametrize("padding", [(0, 0), (32, 40), (0, 224), (100, 101), (96, 128)])
    def test_padding_takes_the_units_that_it_overlaps(self, padding: tuple[int, int]) -> None:
        plan = ct.plan_tiles(ct.spatial_mask(GRID, width=40), 80, 64)
        extremes = list(np.moveaxis(unit_extremes(plan, CONFIG), -1, 0))
        for key_start in np.arange(0, 224, 32):
            arguments = extremes, key_start, 32, np.False_
            without, cases = (
                unit_cases(*arguments),
                unit_cases(*arguments, tuple(map(np.int64, padding))),
            )
            overlaps = max(padding[0], key_start) < min(padding[1], key_start + 32)
            computed = functools.reduce(np.logical_or, [without[kind] for kind in KINDS])
            np.testing.assert_array_equal(cases["padded"], computed & overlaps)
            for kind in KINDS[:-1]:
                np.testing.assert_array_equal(cases[kind], without[kind] & (not overlaps))

    @pytest.mark.parametrize("build", [ct.spatial_mask, ct.temporal_mask])
    def test_kinds_are_right_and_cheapest(self, build: Any) -> None:
        plan = ct.plan_tiles(build(GRID, width=40), 80, 64)
        config, extremes = CONFIG, unit_extremes(plan, CONFIG)
        kept = plan.kept_keys(np.arange(210))
        prefix, low, high = (edge[:, None] for edge in plan.row_edges())
        keys = np.arange(224)
        for row, group, first in np.ndindex(3, config.groups, 7):
            start = row * 80 + group * 32
            rows = slice(start, min(start + min(32, 80 - group * 32), 210))
            if start >= 210:
                continue
            key_start = first * 32
            cases = unit_cases(list(extremes[row, group]), np.int64(key_start), 32, np.False_)
            kinds = [kind for kind in KINDS if cases[kind]]
            inside = keys[key_start : key_start + 32]
            real = inside < 210
            wanted = kept[rows][:, inside[real]]
            assert len(kinds) == wanted.any(), "an empty unit is skipped, others have one kind"
            if not kinds:
                continue
            edge = {
                "full": np.ones((1, inside.size), bool),
                "lower": inside >= low[rows],
                "upper": inside < (prefix if cases["sink"] else high)[rows],
                "window": (inside >= low[rows]) & (inside < high[rows]),
                "general": (inside < prefix[rows])
                | ((inside >= low[rows]) & (inside < high[rows])),
            }[kinds[0]]
            np.testing.assert_array_equal(
                np.broadcast_to(edge, (wanted.shape[0], inside.size))[:, real], wanted
            )
            if wanted.all() and real.all():
                assert kinds == ["full"]


GRID = ct.TokenGrid(7, 5, 6)
CONFIG = KernelConfig(80, 64, 16, 16, 32, 32, 48)


class TestInterpreterChecks:
    """Races, uninitialised memory and reads out of bounds, by the TPU interpreter."""

    @pytest.mark.parametrize(
        ("name", "prompt_length"), [("ragged", None), ("batch-2-heads-3", None), ("text-last", 4)]
    )
    def test_nothing_is_found(self, name: str, prompt_length: int | None) -> None:
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call

        case = find(name)
        arrays = case.arrays()
        found = attend(arrays, case.plan, CHECKED, prompt_length=prompt_length)
        if prompt_length is None:
            check(found, expected_of(arrays, [case.plan]))
        assert interpret_pallas_call.races is not None
        assert not interpret_pallas_call.races.races_found


class TestProfiles:
    """What a profile shows of a call."""

    def lowered(self, name: str, implementation: PallasTpuImplementation) -> str:
        case = find(name)
        attend = functools.partial(ct.attention, plan=case.plan, implementation=implementation)
        return jax.jit(attend).lower(*map(jnp.asarray, case.arrays())).as_text(debug_info=True)

    def test_parts_have_names(self) -> None:
        case = find("ragged")
        lowered = self.lowered("ragged", PallasTpuImplementation(interpret=True))
        for part in ("placement", "guard", "transposition"):
            assert f"cinetile_{part}" in lowered
        for softmax in ("fixed", "online"):
            assert f"cinetile_kernel_{softmax}_all_tiles_{case.plan.stats.tiles_visited}" in lowered

    def test_two_kernels_are_told_apart(self) -> None:
        lowered = self.lowered("ragged", PallasTpuTwoKernels(interpret=True))
        for name in ("kernel_fixed_full_tiles", "kernel_fixed_masked_tiles", "merge"):
            assert f"cinetile_{name}" in lowered


class TestLimits:
    @pytest.mark.parametrize("chunks", range(1, 25))
    def test_full_tiles_are_cut_evenly(self, chunks: int) -> None:
        """A remainder would be one piece of code with what stands before it."""
        config = KernelConfig.for_blocks(256 * chunks, 1536)
        assert config.block_q % config.full_group == 0
        assert config.full_group >= min(config.block_q, 5 * 256)

    def request(self, plan: ct.TilePlan, head_dim: int = 128) -> AttentionRequest:
        return AttentionRequest(1, 10, head_dim, "bfloat16", (plan,))

    def test_needs_a_tpu(self) -> None:
        assert "not on a TPU" in str(PallasTpuImplementation().unavailable())

    @pytest.mark.parametrize(
        ("head_dim", "blocks", "reason"),
        [
            (512, (128, 128), "at most 256"),
            (128, (100, 128), "multiples of 128"),
            (128, (128, 72), "multiples of 128"),
            (256, (32768, 8192), "vector memory"),
        ],
    )
    def test_says_what_it_cannot_take(
        self, head_dim: int, blocks: tuple[int, int], reason: str
    ) -> None:
        plan = ct.plan_tiles(ct.spatial_mask(ct.TokenGrid(21, 45, 80), 0.35), *blocks)
        unsupported = PallasTpuImplementation().unsupported(self.request(plan, head_dim))
        assert reason in str(unsupported)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize("tokens", [1, 70, 4096, 75_600, 302_400])
    def test_default_blocks_are_supported(self, tokens: int, dtype: str) -> None:
        implementation = PallasTpuImplementation()
        grid = ct.TokenGrid(1, 1, tokens)
        plan = ct.plan_tiles(ct.dense_mask(grid), *implementation.default_blocks(tokens, dtype))
        request = AttentionRequest(1, 10, 256, dtype, (plan,))
        assert implementation.unsupported(request) is None

    def test_scalar_memory_is_bounded_at_1440p(self) -> None:
        """302,400 tokens in tiles of 1,024 x 512, four plans, one of them dense."""
        grid = ct.TokenGrid(21, 90, 160)
        masks = ct.spatial_mask(grid, 0.35), ct.temporal_mask(grid, 0.35)
        plans = [ct.plan_tiles(mask, 1024, 512) for mask in masks]
        plans += [ct.plan_tiles(masks[0], 1024, 512, mode) for mode in ("aligned", "dense")]
        tables = step_tables(plans, KernelConfig.for_blocks(1024, 512), 40)
        assert tables.smem_bytes(40) <= SMEM_LIMIT_BYTES
        assert tables.lengths.sum() == sum(plan.stats.tiles_visited for plan in plans)

    def test_gradients_are_those_of_the_portable_kernel(self) -> None:
        case = find("temporal-sink-1")

        def gradients(implementation: ImplementationChoice) -> Any:
            def loss(query: Any, key: Any, value: Any) -> Any:
                output = ct.attention(query, key, value, case.plan, implementation=implementation)
                return (output**2).sum()

            return jax.grad(loss, (0, 1, 2))(*map(jnp.asarray, case.arrays()))

        for own, portable in zip(gradients(INTERPRETED[0]), gradients("xla"), strict=True):
            np.testing.assert_allclose(own, portable, 2e-4, 2e-4)
