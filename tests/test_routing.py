"""Which pattern a head gets: errors against float64, and heads whose right pattern is known."""

import functools
from typing import Any

import brute_force
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from hypothesis import given, settings
from kernel_suite import text_exists

import cinetile as ct
from cinetile.routing.probes import kept_keys
from cinetile.routing.route import sample_rows

GRID = ct.TokenGrid(6, 4, 5)
WITH_TEXT = ct.TokenGrid(6, 4, 5, text_tokens=7)
TEXT_FIRST = ct.TokenGrid(6, 4, 5, text_tokens=7, text_first=True)
KEY = jax.random.key(7)


def masks_on(grid: ct.TokenGrid, width: int = 20, **options: Any) -> tuple[ct.Mask, ct.Mask]:
    build = (ct.spatial_mask, ct.temporal_mask)
    spatial, temporal = (item(grid, width=width, **options) for item in build)
    return spatial, temporal


def random_arrays(shape: tuple[int, ...], seed: int = 0) -> tuple[Any, Any, Any]:
    generator = np.random.default_rng(seed)
    query, key, value = (generator.standard_normal(shape, np.float32) for _ in range(3))
    return query, key, value


def expected_errors(
    arrays: Any, kept: list[np.ndarray], rows: np.ndarray, exists: np.ndarray | None = None
) -> np.ndarray:
    """Errors by their definition, in float64; `kept` are matrices in frame-major order.

    Rows that do not exist count for nothing.
    """
    query, key, value = (np.asarray(array, np.float64) for array in arrays)
    batch, tokens, heads, _ = query.shape
    if exists is None:
        exists = np.ones((batch, tokens), bool)
    errors = np.empty((batch, heads, len(kept)))
    for row, head in np.ndindex(batch, heads):
        sampled = rows[exists[row, rows]]
        outputs = [
            brute_force.attention(
                query[row, sampled, head],
                key[row, :, head],
                value[row, :, head],
                matrix[sampled] & exists[row],
            )[0]
            for matrix in (np.ones((tokens, tokens), bool), *kept)
        ]
        errors[row, head] = [np.mean((item - outputs[0]) ** 2) for item in outputs[1:]]
    return errors


class TestErrors:
    ROWS = np.array([0, 3, 17, 40, 41, 99, 119])

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("grid", [GRID, WITH_TEXT, TEXT_FIRST], ids=str)
    def test_masks(self, grid: ct.TokenGrid, dtype: str) -> None:
        masks = (
            *masks_on(grid),
            ct.spatial_mask(grid, width=0, sink_frames=0),
            ct.dense_mask(grid),
        )
        shape = 2, grid.num_tokens, 3, 16
        query, key, value = (array.astype(dtype) for array in random_arrays(shape))
        found = ct.route_heads(query, key, value, masks, rows=self.ROWS)
        expected = expected_errors(
            (query, key, value), [item.to_dense() for item in masks], self.ROWS
        )
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(found.errors, expected, rtol=tolerance, atol=tolerance / 10)
        np.testing.assert_array_equal(found.routes, 3)
        assert found.errors.dtype == jnp.float32
        assert found.routes.dtype == jnp.int32

    @pytest.mark.parametrize("mode", ["dense", "naive", "split", "aligned"])
    @pytest.mark.parametrize("blocks", [(16, 16), (7, 24), (200, 130)], ids=str)
    def test_plans_keep_what_they_will_run(self, mode: Any, blocks: tuple[int, int]) -> None:
        plans = [ct.plan_tiles(mask, *blocks, mode) for mask in masks_on(WITH_TEXT)]
        arrays = query, key, value = random_arrays((1, WITH_TEXT.num_tokens, 2, 16), 1)
        found = ct.route_heads(query, key, value, plans, rows=self.ROWS)
        expected = expected_errors(arrays, [plan.mask_kept() for plan in plans], self.ROWS)
        np.testing.assert_allclose(found.errors, expected, rtol=1e-5, atol=1e-9)

    @pytest.mark.parametrize("padding", [1e30, np.inf, -np.inf, np.nan])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("grid", [WITH_TEXT, TEXT_FIRST], ids=str)
    def test_prompt_length(self, grid: ct.TokenGrid, dtype: str, padding: float) -> None:
        """Padding takes no part, whatever it holds."""
        masks = masks_on(grid)
        shape = 2, grid.num_tokens, 2, 16
        query, key, value = (array.astype(dtype) for array in random_arrays(shape, 2))
        exists = text_exists(grid, [5, 0])
        rows = np.append(self.ROWS, [3, 123, 125])  # text that exists and text that does not
        expected = expected_errors(
            (query, key, value), [item.to_dense() for item in masks], rows, exists
        )
        query[~exists] = key[~exists] = value[~exists] = padding
        found = ct.route_heads(query, key, value, masks, rows=rows, prompt_length=np.array([5, 0]))
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(found.errors, expected, rtol=tolerance)
        np.testing.assert_array_equal(found.routes, expected.argmin(axis=-1))

    def test_errors_that_are_not_finite_never_win(self) -> None:
        """A NaN that the first pattern alone keeps: argmin of NaN would choose it."""
        masks = masks_on(GRID, width=8, sink_frames=0)
        query, key, value = random_arrays((1, GRID.num_tokens, 3, 16), 3)
        value[0, 60, 1] = np.nan
        value[0, :, 2] *= 1e25  # squares overflow
        found = ct.route_heads(query, key, value, masks, rows=self.ROWS)
        np.testing.assert_array_equal(found.are_known, [[True, False, False]])
        np.testing.assert_array_equal(found.routes[0, 1:], 0)
        assert np.isfinite(found.errors[0, 0]).all()

    def test_rows_that_are_all_padding(self) -> None:
        arrays = random_arrays((1, WITH_TEXT.num_tokens, 1, 16))
        rows = np.array([124, 126])
        found = ct.route_heads(*arrays, masks_on(WITH_TEXT), rows=rows, prompt_length=2)
        np.testing.assert_array_equal(found.errors, 0.0)

    def test_scale(self) -> None:
        query, key, value = random_arrays((1, GRID.num_tokens, 1, 16))
        masks = masks_on(GRID)
        found = ct.route_heads(query, key, value, masks, rows=self.ROWS, scale=0.5)
        scaled = ct.route_heads(2 * query, key, value, masks, rows=self.ROWS, scale=0.25)
        other = ct.route_heads(query, key, value, masks, rows=self.ROWS)
        np.testing.assert_allclose(found.errors, scaled.errors, rtol=1e-5)
        assert not np.allclose(found.errors, other.errors, rtol=1e-2)

    @pytest.mark.parametrize("gap", [30.0, 80.0, 300.0, 5000.0])
    def test_kept_keys_far_below_the_maximum(self, gap: float) -> None:
        """A pattern's weights must not vanish beside a key that it leaves out."""
        masks = masks_on(GRID, width=8, sink_frames=0)
        query, key, value = random_arrays((1, GRID.num_tokens, 2, 16), 3)
        key[..., 0], query[..., 0] = 0.0, 4.0
        loud = 60  # one key that every query hears above all others
        key[:, loud, :, 0] = gap
        rows = np.array([0, 5, 110, 60])
        found = ct.route_heads(query, key, value, masks, rows=rows)
        expected = expected_errors((query, key, value), [item.to_dense() for item in masks], rows)
        assert expected.min() > 1e-2
        np.testing.assert_allclose(found.errors, expected, rtol=1e-4)

    def test_rows_without_any_key(self) -> None:
        """Text alone is kept and there is no prompt: the pattern's output is zero."""
        mask = ct.svg_mask(WITH_TEXT, "spatial", width=0, model="hunyuan")
        query, key, value = random_arrays((1, WITH_TEXT.num_tokens, 1, 16))
        found = ct.route_heads(query, key, value, [mask], rows=self.ROWS, prompt_length=0)
        exists = text_exists(WITH_TEXT, [0])[0]
        dense = brute_force.attention(
            query[0, self.ROWS, 0], key[0, :, 0], value[0, :, 0], np.tile(exists, (7, 1))
        )[0]
        np.testing.assert_allclose(found.errors[0, 0, 0], np.mean(dense**2), rtol=1e-5)

    @settings(max_examples=25)  # each is compiled
    @given(strategies.examples)
    def test_kept_keys_of_any_mask(self, example: strategies.Example) -> None:
        rows = jnp.arange(example.mask.num_tokens)
        np.testing.assert_array_equal(kept_keys(example.mask, rows), example.kept)

    @settings(max_examples=25)
    @given(strategies.tilings())
    def test_kept_keys_of_any_plan(self, tiling: tuple[strategies.Example, int, int]) -> None:
        example, block_q, block_kv = tiling
        plan = ct.plan_tiles(example.mask, block_q, block_kv, "aligned")
        rows = jnp.arange(example.mask.num_tokens)
        np.testing.assert_array_equal(kept_keys(plan, rows), plan.mask_kept())


def known_heads(grid: ct.TokenGrid, patterns: list[list[str]]) -> tuple[Any, Any, Any]:
    """Arrays whose heads attend to their own frame ("spatial") or place ("temporal") alone."""
    _, frame, place = brute_force.tokens(grid)
    wanted = {"spatial": np.eye(grid.frames)[frame], "temporal": np.eye(20)[place]}
    size = 32
    features = {
        name: np.pad(item, ((0, 0), (0, size - item.shape[1]))) for name, item in wanted.items()
    }
    query = np.stack([np.stack([features[p] for p in row], axis=1) for row in patterns])
    value = np.random.default_rng(0).standard_normal(query.shape)
    query, value = query.astype(np.float32), value.astype(np.float32)
    return 60 * query, query, value


class TestRoutes:
    PATTERNS = (
        ["spatial", "temporal", "temporal"],
        ["temporal", "temporal", "spatial"],
    )
    ROUTES = np.array([[0, 1, 1], [1, 1, 0]])

    @pytest.mark.parametrize("planned", [False, True], ids=["masks", "aligned plans"])
    def test_heads_go_where_they_belong(self, planned: bool) -> None:
        """In each batch row by itself, as the two rows of a guidance pair may differ."""
        candidates: Any = masks_on(GRID)
        if planned:
            candidates = [ct.plan_tiles(mask, 20, 10, "aligned") for mask in candidates]
        query, key, value = known_heads(GRID, list(self.PATTERNS))
        found = ct.route_heads(query, key, value, candidates, rng=KEY)
        np.testing.assert_array_equal(found.routes, self.ROUTES)
        swapped = ct.route_heads(query, key, value, candidates[::-1], rng=KEY)
        np.testing.assert_array_equal(swapped.routes, 1 - self.ROUTES)
        np.testing.assert_array_equal(swapped.errors[..., ::-1], found.errors)

    def test_more_than_two_patterns(self) -> None:
        narrow = ct.spatial_mask(GRID, width=2, sink_frames=0)
        masks = narrow, *masks_on(GRID)
        found = ct.route_heads(*known_heads(GRID, list(self.PATTERNS)), masks, rng=KEY)
        np.testing.assert_array_equal(found.routes, 1 + self.ROUTES)
        assert found.errors.shape == (2, 3, 3)

    def test_few_samples_see_it_too(self) -> None:
        query, key, value = known_heads(GRID, list(self.PATTERNS))
        found = ct.route_heads(query, key, value, masks_on(GRID), rng=KEY, num_samples=3)
        np.testing.assert_array_equal(found.routes, self.ROUTES)

    @pytest.mark.parametrize(
        "masks",
        [masks_on(GRID, width=120), (ct.temporal_mask(GRID, width=9),) * 2],
        ids=["all is kept", "the same twice"],
    )
    def test_ties_go_to_the_first(self, masks: Any) -> None:
        found = ct.route_heads(*random_arrays((2, 120, 4, 16)), masks, rng=KEY)
        np.testing.assert_array_equal(found.routes, 0)
        np.testing.assert_array_equal(found.errors[..., 0], found.errors[..., 1])

    def test_equal_keys_give_equal_routes(self) -> None:
        arrays = random_arrays((1, 120, 2, 16))
        route = functools.partial(ct.route_heads, *arrays, masks_on(GRID), num_samples=8)
        first, again, other = (route(rng=jax.random.key(seed)) for seed in (1, 1, 2))
        np.testing.assert_array_equal(first.errors, again.errors)
        assert not np.array_equal(first.errors, other.errors)

    def test_raw_keys(self) -> None:
        arrays = random_arrays((1, 120, 2, 16))
        found = ct.route_heads(*arrays, masks_on(GRID), rng=jax.random.PRNGKey(7))
        typed = ct.route_heads(*arrays, masks_on(GRID), rng=KEY)
        np.testing.assert_array_equal(found.errors, typed.errors)

    def test_new_rows_keys_and_lengths_compile_nothing(self) -> None:
        traced = []

        @jax.jit
        def route(query: Any, key: Any, value: Any, rng: Any, length: Any) -> ct.HeadRoutes:
            traced.append(rng)
            masks = masks_on(WITH_TEXT)
            return ct.route_heads(query, key, value, masks, rng=rng, prompt_length=length)

        arrays = random_arrays((1, 127, 2, 16))
        for seed, length in ((0, 3), (1, 7), (2, 0)):
            found = route(*arrays, jax.random.key(seed), jnp.array([length]))
            assert isinstance(found, ct.HeadRoutes)
        assert len(traced) == 1

    def test_no_gradient(self) -> None:
        query, key, value = random_arrays((1, 120, 2, 16))
        gradient = jax.grad(
            lambda query: ct.route_heads(query, key, value, masks_on(GRID), rng=KEY).errors.sum()
        )(query)
        assert not gradient.any()


class TestUpstreamProbes:
    @pytest.mark.parametrize(
        ("model", "width", "text"), [("wan", 256, 0), ("hunyuan", 192, 9), ("cogvideox", 192, 9)]
    )
    def test_their_bands(self, model: Any, width: int, text: int) -> None:
        """Two frames for Wan, one and a half for the others, whatever the density."""
        grid = ct.TokenGrid(7, 8, 16, text_tokens=text, text_first=model == "cogvideox")
        probes = ct.svg_probe_masks(grid, model)
        for mask, pattern in zip(probes, strategies.PATTERNS, strict=True):
            expected = brute_force.upstream_mask(grid, pattern, model, width)
            np.testing.assert_array_equal(mask.to_dense(), expected)

    @pytest.mark.parametrize(("height", "width"), [(8, 16), (5, 29), (13, 20)])
    def test_how_far_upstream_blocks_differ(self, height: int, width: int) -> None:
        """Every row of upstream's block band ends 1 to 255 tokens before the exact one."""
        grid = ct.TokenGrid(9, height, width)
        tokens, reach = np.arange(grid.num_tokens), 2 * grid.tokens_per_frame
        blocks = np.abs(tokens[:, None] // 128 - tokens // 128) < reach // 128
        middle = tokens[reach : -reach - 1]
        for row in middle:
            kept = np.flatnonzero(blocks[row])
            for distance in (row - kept.min(), kept.max() - row):
                assert 1 <= reach - distance <= 255

    def test_they_route(self) -> None:
        query, key, value = known_heads(GRID, [["temporal", "spatial"]])
        probes = ct.svg_probe_masks(GRID)
        found = ct.route_heads(query, key, value, probes, rng=KEY, first_tokens=10_000)
        np.testing.assert_array_equal(found.routes, [[1, 0]])


class TestSampledRows:
    @pytest.mark.parametrize("samples", [1, 7, 64, 119, 120])
    def test_one_from_each_part(self, samples: int) -> None:
        rows = np.asarray(sample_rows(GRID, samples, KEY))
        bounds = np.arange(samples + 1) * 120 // samples
        np.testing.assert_array_equal(
            np.searchsorted(bounds, rows, "right"), 1 + np.arange(samples)
        )

    def test_no_more_than_there_are(self) -> None:
        np.testing.assert_array_equal(sample_rows(GRID, 500, KEY), np.arange(120))

    def test_text_is_no_part(self) -> None:
        np.testing.assert_array_equal(sample_rows(WITH_TEXT, 500, KEY), np.arange(120))
        np.testing.assert_array_equal(sample_rows(TEXT_FIRST, 500, KEY), np.arange(7, 127))

    def test_first_tokens(self) -> None:
        seen = {
            int(row)
            for seed in range(40)
            for row in sample_rows(GRID, 4, jax.random.key(seed), first_tokens=10)
        }
        assert seen == set(range(10))
        assert sample_rows(GRID, 4, KEY, first_tokens=10_000).max() > 90

    def test_every_token_can_be_drawn(self) -> None:
        seen = {
            int(row) for seed in range(200) for row in sample_rows(GRID, 7, jax.random.key(seed))
        }
        assert seen == set(range(120))


def test_memory_is_linear_in_the_tokens() -> None:
    def temporaries(frames: int) -> int:
        grid = ct.TokenGrid(frames, 16, 16)
        shape = jax.ShapeDtypeStruct((1, grid.num_tokens, 4, 64), jnp.float32)
        masks = masks_on(grid)
        compiled = (
            jax.jit(lambda query, key, value: ct.route_heads(query, key, value, masks, rng=KEY))
            .lower(shape, shape, shape)
            .compile()
        )
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    small, large = temporaries(8), temporaries(32)
    assert large < 5 * small
    assert large < (32 * 256) ** 2, "less than a byte a pair"


@pytest.mark.usefixtures("unchecked")
class TestBadArguments:
    def route(self, masks: Any = None, **options: Any) -> ct.HeadRoutes:
        query, key, value = random_arrays((1, 120, 2, 16))
        masks = masks_on(GRID) if masks is None else masks
        return ct.route_heads(query, key, value, masks, **{"rng": KEY, **options})

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"masks": ()}, ValueError, "masks must be a non-empty sequence"),
            ({"masks": ["spatial"]}, TypeError, "masks must hold masks or tile plans, got str"),
            ({"masks": 7}, TypeError, "masks must hold masks or tile plans, got int"),
            ({"num_samples": 0}, ValueError, "num_samples must be at least 1, got 0"),
            ({"rng": None}, ValueError, "rng must be a key of jax.random"),
            ({"first_tokens": 0}, ValueError, "first_tokens must be at least 1"),
            ({"scale": -1.0}, ValueError, "scale must be above 0"),
            ({"rows": np.array([120])}, ValueError, r"rows must lie in \[0, 120\)"),
            ({"rows": np.array([-1])}, ValueError, r"rows must lie in \[0, 120\)"),
            ({"rows": np.array([], int)}, ValueError, "rows must be a list of at least one"),
            ({"rows": np.array([[1]])}, ValueError, "rows must be a list of at least one"),
            ({"rows": np.array([1.0])}, TypeError, "rows must be integers"),
            ({"prompt_length": 3}, ValueError, "prompt_length needs a grid with text"),
        ],
        ids=str,
    )
    def test_they_are_named(
        self, options: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            self.route(**options)

    def test_masks_on_different_grids(self) -> None:
        masks = [ct.dense_mask(GRID), ct.dense_mask(ct.TokenGrid(4, 6, 5))]
        with pytest.raises(ValueError, match=r"masks must be on one grid, got 6x4x5.*4x6x5"):
            self.route(masks)

    def test_arrays_of_another_grid(self) -> None:
        array = np.zeros((1, 119, 2, 8), np.float32)
        with pytest.raises(ValueError, match="only self-attention can be sparse"):
            ct.route_heads(array, array, array, masks_on(GRID), rng=KEY)
