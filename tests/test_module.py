"""`SparseAttention`: the layer as a model calls it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_suite import expected_of, text_exists
from test_routing import known_heads

import cinetile as ct
from cinetile.layer import layer_plan

GRID = ct.TokenGrid(6, 4, 5)
WITH_TEXT = ct.TokenGrid(6, 4, 5, text_tokens=7)
POLICY = ct.SparsityPolicy(
    0.4,
    rules=(ct.DensityRule(0.6, steps=(2, 4)), ct.DensityRule(0.3, pattern="temporal")),
    dense_steps=((0, 2),),
    dense_layers=((0, 1),),
    block_q=20,
    block_kv=10,
    width_multiple=4,
)
KEY = jax.random.key(3)
PATTERNS = [["spatial", "temporal"], ["temporal", "temporal"]]
ROUTES = np.array([[0, 1], [1, 1]])


def layer_of(policy: ct.SparsityPolicy = POLICY, **options: Any) -> ct.SparseAttention:
    grid = options.pop("grid", GRID)
    options = {"num_steps": 6, "num_layers": 3, "implementation": "xla", **options}
    return ct.SparseAttention(grid, policy, **options)


def check(layer: ct.SparseAttention, arrays: Any, output: Any, plans: Any) -> None:
    """Compares an output with attention in float64 under the named plans."""
    routes = np.array([[layer.planned.choices.index(item) for item in row] for row in plans])
    expected, _ = expected_of(arrays, layer.planned.plans, routes)
    np.testing.assert_allclose(output, expected, rtol=2e-5, atol=2e-5)


def choices(spatial: float, temporal: float) -> list[list[ct.PlanChoice]]:
    of_route = ct.PlanChoice("spatial", spatial), ct.PlanChoice("temporal", temporal)
    return [[of_route[route] for route in row] for row in ROUTES]


DENSE = [[ct.PlanChoice("dense", 1.0)] * 2] * 2
EXPECTED = {
    (0, 0): DENSE,
    (1, 2): DENSE,
    (5, 0): DENSE,
    (2, 1): choices(0.6, 0.3),
    (3, 2): choices(0.6, 0.3),
    (4, 1): choices(0.4, 0.3),
    (5, 2): choices(0.4, 0.3),
}


class TestCalls:
    ARRAYS = known_heads(GRID, PATTERNS)

    @pytest.mark.parametrize(("step", "layer"), EXPECTED)
    @pytest.mark.parametrize("as_index", [int, np.array, jnp.array], ids=["int", "numpy", "jax"])
    def test_known_step_and_layer(self, step: int, layer: int, as_index: Any) -> None:
        attend = layer_of()
        output = attend(*self.ARRAYS, step=as_index(step), layer=as_index(layer), rng=KEY)
        check(attend, self.ARRAYS, output, EXPECTED[step, layer])

    def test_traced_step_and_layer_compile_once(self) -> None:
        attend, traced = layer_of(), []

        @jax.jit
        def run(query: Any, key: Any, value: Any, step: Any, layer: Any, rng: Any) -> Any:
            traced.append(step)
            return attend.attend(
                query, key, value, step=step, layer=layer, rng=rng, return_record=True
            )

        for (step, layer), plans in EXPECTED.items():
            output, record = run(*self.ARRAYS, step, layer, jax.random.key(step))
            check(attend, self.ARRAYS, output, plans)
            found = [[record.choices[route] for route in row] for row in record.routes]
            assert found == plans
        assert len(traced) == 1

    @pytest.mark.parametrize("known", ["step", "layer"])
    def test_one_of_them_traced(self, known: str) -> None:
        attend = layer_of()
        for (step, layer), plans in EXPECTED.items():
            indices = {"step": step, "layer": layer}
            fixed = {known: indices.pop(known)}
            run = jax.jit(
                lambda traced, fixed=fixed: attend(*self.ARRAYS, **traced, **fixed, rng=KEY)
            )
            check(attend, self.ARRAYS, run(indices), plans)

    def test_inside_scan_over_layers(self) -> None:
        attend = layer_of()
        query, key, value = self.ARRAYS

        def body(hidden: Any, layer: Any) -> Any:
            output, record = attend(
                query, key, value, step=4, layer=layer, rng=KEY, return_record=True
            )
            return hidden + output, record

        _, record = jax.lax.scan(body, jnp.zeros_like(jnp.asarray(query)), jnp.arange(3))
        rows = record.rows()
        assert len(rows) == 3 * 2 * 2
        assert [row["layer"] for row in rows[::4]] == [0, 1, 2]
        assert [row["pattern"] for row in rows] == ["dense"] * 4 + [
            "spatial",
            "temporal",
            "temporal",
            "temporal",
        ] * 2

    def test_traced_indices_are_clipped(self) -> None:
        attend = layer_of()
        run = jax.jit(lambda step, layer: attend(*self.ARRAYS, step=step, layer=layer, rng=KEY))
        check(attend, self.ARRAYS, run(99, 99), EXPECTED[5, 2])
        check(attend, self.ARRAYS, run(-1, 2), EXPECTED[1, 2])

    def test_later_steps_of_an_open_run(self) -> None:
        attend = layer_of(num_steps=None, num_layers=None)
        run = jax.jit(lambda step, layer: attend(*self.ARRAYS, step=step, layer=layer, rng=KEY))
        for call in (
            run,
            lambda step, layer: attend(*self.ARRAYS, step=step, layer=layer, rng=KEY),
        ):
            check(attend, self.ARRAYS, call(500, 70), EXPECTED[5, 2])
            check(attend, self.ARRAYS, call(3, 70), EXPECTED[3, 2])

    def test_bfloat16(self) -> None:
        attend = layer_of(dtype="bfloat16")
        arrays = [jnp.asarray(array, jnp.bfloat16) for array in self.ARRAYS]
        query, key, value = arrays
        output, record = attend(query, key, value, step=4, layer=1, rng=KEY, return_record=True)
        assert output.dtype == jnp.bfloat16
        np.testing.assert_array_equal(record.routes, 3 + ROUTES - 2 * (ROUTES == 1))

    @pytest.mark.parametrize("traced", [True, False])
    def test_a_head_without_finite_errors_is_dense(self, traced: bool) -> None:
        """So that inf and NaN show as they would without sparsity; other heads are as they were."""
        query, key, value = (np.array(array) for array in self.ARRAYS)
        value[:, 50, 0, 3] = np.nan
        attend = layer_of()

        def call(step: Any) -> Any:
            return attend(query, key, value, step=step, layer=1, rng=KEY, return_record=True)

        output, record = jax.jit(call)(4) if traced else call(4)
        expected = 3 + ROUTES - 2 * (ROUTES == 1)
        expected[:, 0] = 0
        np.testing.assert_array_equal(record.routes, expected)
        assert np.isnan(output[:, :, 0, 3]).all()
        assert np.isfinite(output[:, :, 1:]).all()

    def test_samples_differ_between_steps_and_layers(self) -> None:
        attend = layer_of()
        arrays = np.random.default_rng(0).standard_normal((3, 1, 120, 2, 16), np.float32)
        query, key, value = arrays

        def errors(step: int, layer: int, rng: Any = KEY) -> np.ndarray:
            policy_call = attend(
                query, key, value, step=step, layer=layer, rng=rng, return_record=True
            )
            return np.asarray(policy_call[1].errors)

        np.testing.assert_array_equal(errors(4, 1), errors(4, 1))
        for other in (errors(5, 1), errors(4, 2), errors(4, 1, jax.random.key(9))):
            assert not np.array_equal(other, errors(4, 1))

    def test_dense_calls_sample_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise AssertionError("a dense call must not profile")

        monkeypatch.setattr(layer_plan, "route_checked", fail)
        output = layer_of()(*self.ARRAYS, step=0, layer=2, rng=KEY)
        check(layer_of(), self.ARRAYS, output, DENSE)

    def test_profiling_is_inside_a_branch(self) -> None:
        """So that it costs nothing in dense steps although the step is traced."""
        attend = layer_of()
        jaxpr = jax.make_jaxpr(lambda step: attend(*self.ARRAYS, step=step, layer=1, rng=KEY))(
            jnp.int32(0)
        )
        switch = next(item for item in jaxpr.jaxpr.eqns if item.primitive.name == "cond")
        sizes = [str(branch).count("dot_general") for branch in switch.params["branches"]]
        assert sizes[0] == 0
        assert all(sizes[1:])
        before = jaxpr.jaxpr.eqns[: jaxpr.jaxpr.eqns.index(switch)]
        assert "dot_general" not in "".join(map(str, before))

    def test_upstream_probes_route_too(self) -> None:
        policy = ct.SparsityPolicy(
            0.4,
            dense_steps=(),
            probe="svg",
            first_tokens=60,
            block_q=20,
            block_kv=10,
            width_multiple=4,
        )
        _, record = layer_of(policy)(*self.ARRAYS, step=0, layer=1, rng=KEY, return_record=True)
        np.testing.assert_array_equal(record.routes, 1 + ROUTES)
        found = ct.route_heads(
            *self.ARRAYS,
            ct.svg_probe_masks(GRID),
            first_tokens=60,
            rng=jax.random.fold_in(jax.random.fold_in(KEY, 0), 1),
        )
        np.testing.assert_array_equal(record.errors, found.errors)


class TestRecord:
    def record(self, step: int) -> ct.LayerRecord:
        arrays = known_heads(GRID, PATTERNS)
        return layer_of()(*arrays, step=step, layer=2, rng=KEY, return_record=True)[1]

    def test_rows(self) -> None:
        record = self.record(4)
        assert not record.is_dense
        rows = record.rows()
        assert [(row["batch"], row["head"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [(row["pattern"], row["density"]) for row in rows] == [
            ("spatial", 0.4),
            ("temporal", 0.3),
            ("temporal", 0.3),
            ("temporal", 0.3),
        ]
        for row in rows:
            assert (row["step"], row["layer"]) == (4, 2)
            assert min(row["errors"], key=row["errors"].get) == row["pattern"]

    def test_errors_are_those_of_route_heads(self) -> None:
        arrays = known_heads(GRID, PATTERNS)
        attend = layer_of()
        rng = jax.random.fold_in(jax.random.fold_in(KEY, 4), 2)
        plans = [
            attend.planned.plans[attend.planned.choices.index(choice)]
            for choice in (ct.PlanChoice("spatial", 0.4), ct.PlanChoice("temporal", 0.3))
        ]
        found = ct.route_heads(*arrays, plans, rng=rng)
        np.testing.assert_allclose(self.record(4).errors, found.errors, rtol=1e-6)

    def test_dense(self) -> None:
        record = self.record(1)
        assert record.is_dense
        assert np.isnan(record.errors).all()
        assert {row["pattern"] for row in record.rows()} == {"dense"}
        assert {row["errors"] for row in record.rows()} == {None}

    def test_in_words(self) -> None:
        assert "step 4, layer 2, row 0, head 1: temporal 0.3 (errors: spatial " in str(
            self.record(4)
        )
        assert str(self.record(0)).splitlines()[0] == "step 0, layer 2, row 0, head 0: dense"


class TestText:
    @pytest.mark.parametrize(
        "grid", [WITH_TEXT, ct.TokenGrid(6, 4, 5, text_tokens=7, text_first=True)], ids=str
    )
    @pytest.mark.parametrize("step", [0, 4])
    def test_prompt_length_at_run_time(self, grid: ct.TokenGrid, step: int) -> None:
        """Padding changes neither routes nor output, whatever it holds."""
        policy = ct.SparsityPolicy(
            0.5, dense_steps=((0, 2),), block_q=16, block_kv=8, width_multiple=4
        )
        attend, traced = layer_of(policy, grid=grid), []
        lengths = jnp.array([5, 2])
        exists = text_exists(grid, lengths.tolist())
        generator = np.random.default_rng(0)
        query, key, value = generator.standard_normal((3, 2, grid.num_tokens, 2, 16), np.float32)

        @jax.jit
        def run(key: Any, value: Any, lengths: Any) -> Any:
            traced.append(lengths)
            return attend(
                query,
                key,
                value,
                step=step,
                layer=1,
                rng=KEY,
                prompt_length=lengths,
                return_record=True,
            )

        quiet, loud = (np.where(exists[..., None, None], key, filler) for filler in (0, 1e4))
        output, record = run(quiet, value, lengths)
        spoiled, spoiled_record = run(loud, np.where(exists[..., None, None], value, 1e4), lengths)
        real = exists[..., None, None]
        np.testing.assert_allclose(
            np.where(real, output, 0), np.where(real, spoiled, 0), rtol=1e-5, atol=1e-6
        )
        np.testing.assert_array_equal(record.routes, spoiled_record.routes)
        assert np.isfinite(spoiled).all()
        other, _ = run(quiet, value, jnp.array([7, 7]))
        assert not np.allclose(np.where(real, other, 0), np.where(real, output, 0), rtol=1e-3)
        assert len(traced) == 1


class TestModule:
    def test_equal_settings_are_equal(self) -> None:
        assert layer_of() == layer_of()
        assert hash(layer_of()) == hash(layer_of())
        assert layer_of() != layer_of(num_layers=4)
        assert len({layer_of(), layer_of(), layer_of(expert="high_noise")}) == 2

    def test_it_passes_through_jit(self) -> None:
        traced = []

        @jax.jit
        def run(attend: ct.SparseAttention, query: Any, key: Any, value: Any) -> Any:
            traced.append(attend)
            return attend(query, key, value, step=4, layer=1, rng=KEY)

        arrays = known_heads(GRID, PATTERNS)
        for _ in range(2):
            check(layer_of(), arrays, run(layer_of(), *arrays), EXPECTED[4, 1])
        assert len(traced) == 1

    def test_a_sequence_of_implementations(self) -> None:
        attend = layer_of(implementation=["pallas_tpu", "xla"])
        arrays = known_heads(GRID, PATTERNS)
        check(attend, arrays, attend(*arrays, step=4, layer=1, rng=KEY), EXPECTED[4, 1])
        hash(attend)

    def test_expert(self) -> None:
        policy = ct.SparsityPolicy(
            0.4,
            rules=(ct.DensityRule(0.6, expert="high_noise"),),
            dense_steps=(),
            block_q=20,
            block_kv=10,
            width_multiple=4,
        )
        arrays = known_heads(GRID, PATTERNS)
        for expert, density in ((None, 0.4), ("high_noise", 0.6), ("low_noise", 0.4)):
            _, record = layer_of(policy, expert=expert)(
                *arrays, step=0, layer=1, rng=KEY, return_record=True
            )
            assert {row["density"] for row in record.rows()} == {density}

    @pytest.mark.usefixtures("unchecked")
    def test_mesh(self) -> None:
        with pytest.raises(TypeError, match=r"mesh must be a jax.sharding.Mesh, got object"):
            layer_of(mesh=object())

    def test_fractions_need_counts(self) -> None:
        with pytest.raises(ValueError, match="num_steps and num_layers must be given"):
            ct.SparseAttention(GRID, ct.SparsityPolicy())

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"grid": (6, 4, 5)}, TypeError, "grid must be a TokenGrid, got tuple"),
            ({"policy": "moderate"}, TypeError, "policy must be a SparsityPolicy, got str"),
            ({"num_steps": 0}, ValueError, "num_steps must be at least 1"),
            ({"num_layers": 2.0}, TypeError, "num_layers must be an integer"),
            ({"expert": "both"}, ValueError, "expert must be one of 'high_noise', 'low_noise'"),
            ({"dtype": "float64"}, ValueError, "dtype must be one of"),
            ({"implementation": "cuda"}, ValueError, "implementation must be None, one of"),
            ({"implementation": "pallas_tpu"}, NotImplementedError, "not on a TPU"),
        ],
        ids=str,
    )
    def test_bad_settings(
        self, options: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            layer_of(**options)


@pytest.mark.usefixtures("unchecked")
class TestBadCalls:
    def call(self, key: Any = None, **options: Any) -> Any:
        array = jnp.zeros((1, 120, 2, 16))
        options = {"step": 4, "layer": 1, "rng": KEY, **options}
        return layer_of()(array, array if key is None else key, array, **options)

    def test_cross_attention(self) -> None:
        with pytest.raises(
            ValueError, match=r"key must have as many tokens as query, .*only self-attention"
        ):
            self.call(key=jnp.zeros((1, 77, 2, 16)))

    def test_another_token_count(self) -> None:
        array = jnp.zeros((1, 77, 2, 16))
        with pytest.raises(ValueError, match="77; only self-attention can be sparse"):
            layer_of()(array, array, array, step=4, layer=1, rng=KEY)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"step": 6}, ValueError, "step must be at most 5, got 6"),
            ({"step": -1}, ValueError, "step must be at least 0, got -1"),
            ({"layer": 3}, ValueError, "layer must be at most 2, got 3"),
            ({"layer": 1.0}, TypeError, "layer must be an integer, got 1.0"),
            ({"step": None}, TypeError, "step must be an integer, got None"),
            ({"step": jnp.arange(2)}, TypeError, r"step must be one integer, got int32\[2\]"),
        ],
        ids=str,
    )
    def test_indices(self, options: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            self.call(**options)

    def test_traced_index_of_the_wrong_kind(self) -> None:
        with pytest.raises(TypeError, match="step must be one integer, got float32"):
            jax.jit(lambda step: self.call(step=step))(1.5)


class TestGradients:
    @pytest.mark.parametrize("step", [0, 4])
    def test_those_of_the_plans_that_ran(self, step: int) -> None:
        """Routing takes no part, though the routes depend on the same arrays."""
        attend = layer_of()
        arrays = tuple(jax.random.normal(KEY, (3, 2, 120, 2, 16)))

        def loss(attention: Any) -> Any:
            return lambda *arrays: jnp.sum(attention(*arrays) ** 2)

        @jax.jit
        def sparse(query: Any, key: Any, value: Any, step: Any) -> Any:
            whole = loss(lambda *arrays: attend(*arrays, step=step, layer=1, rng=KEY))
            return jax.grad(whole, argnums=(0, 1, 2))(query, key, value)

        _, record = attend(*arrays, step=step, layer=1, rng=KEY, return_record=True)
        routed = loss(
            lambda query, key, value: ct.attention(
                query,
                key,
                value,
                attend.planned.plans,
                routes=record.routes,
                implementation="xla",
            )
        )
        expected = jax.grad(routed, argnums=(0, 1, 2))(*arrays)
        for item, other in zip(sparse(*arrays, step), expected, strict=True):
            np.testing.assert_allclose(item, other, rtol=1e-5, atol=1e-6)
            assert np.abs(other).max() > 1e-3
