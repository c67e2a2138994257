"""`LayerPlan`: what is decided once for a layer."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_suite import expected_of
from test_routing import known_heads

import cinetile as ct
from cinetile.kernels import arguments
from cinetile.kernels.base import AttentionRequest
from cinetile.kernels.pallas_tpu import PallasTpuImplementation
from cinetile.kernels.registry import select_implementation
from cinetile.kernels.xla import XlaImplementation
from cinetile.lab.bench import Workload
from cinetile.layer.layer_plan import CallShape, plan_layer

GRID = ct.TokenGrid(6, 4, 5)
WITH_TEXT = ct.TokenGrid(5, 12, 15, text_tokens=100)
KEY = jax.random.key(3)
ALWAYS: dict[str, Any] = {"dense_steps": (), "dense_layers": ()}


class CoarseTpu(PallasTpuImplementation):
    """A kernel with a TPU's tiles that refuses padding, as the registry sees it on a TPU."""

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, request: AttentionRequest) -> str | None:
        return (
            "it takes no prompt_length"
            if request.has_prompt_lengths
            else super().unsupported(request)
        )


class Recorded(XlaImplementation):
    """`xla`, with the block sizes that it was asked to run."""

    blocks: ClassVar[list[tuple[int, int]]] = []

    def attend(self, *arrays: Any, plans: Any, **options: Any) -> Any:
        self.blocks.extend((plan.block_q, plan.block_kv) for plan in plans)
        return super().attend(*arrays, plans=plans, **options)


class TestFallback:
    """A call that the preferred implementation refuses: a prompt with padding."""

    POLICY = ct.SparsityPolicy(0.5, patterns=("spatial", "temporal"), **ALWAYS)
    CALL = CallShape(1, 2, 16, "float32", has_prompt_lengths=True)

    def test_the_fallback_has_its_own_blocks(self) -> None:
        allowed = CoarseTpu(), XlaImplementation()
        preferred = plan_layer(self.POLICY, WITH_TEXT, dtype="float32", implementation=allowed)
        assert isinstance(preferred.implementation, CoarseTpu)
        fallback = preferred.for_call(self.CALL)
        own = plan_layer(self.POLICY, WITH_TEXT, dtype="float32", implementation="xla")
        assert fallback.implementation is allowed[1]
        assert fallback.plans == own.plans
        assert fallback.plans != preferred.plans
        known = plan_layer(
            self.POLICY, WITH_TEXT, dtype="float32", implementation=allowed, call=self.CALL
        )
        assert known == fallback

    def test_a_call_that_is_taken_keeps_the_plan(self) -> None:
        planned = plan_layer(self.POLICY, WITH_TEXT, implementation=XlaImplementation())
        assert planned.for_call(self.CALL) is planned

    def test_reasons_are_told_where_none_takes_it(self) -> None:
        planned = plan_layer(self.POLICY, WITH_TEXT, implementation=CoarseTpu())
        with pytest.raises(NotImplementedError, match="pallas_tpu: it takes no prompt_length"):
            planned.for_call(self.CALL)

    def test_a_layer_runs_the_fallback(self) -> None:
        Recorded.blocks.clear()
        layer = ct.SparseAttention(
            WITH_TEXT, self.POLICY, implementation=(CoarseTpu(), Recorded()), dtype="float32"
        )
        arrays = np.random.default_rng(0).standard_normal((3, 1, 1000, 2, 16), np.float32)
        call = {"step": 0, "layer": 0, "rng": KEY, "prompt_length": 60}
        output, record = layer(*arrays, **call, return_record=True)
        own = ct.SparseAttention(WITH_TEXT, self.POLICY, implementation="xla", dtype="float32")
        expected, other = own(*arrays, **call, return_record=True)
        np.testing.assert_array_equal(record.routes, other.routes)
        np.testing.assert_array_equal(output, expected)
        assert set(Recorded.blocks) == {(plan.block_q, plan.block_kv) for plan in own.planned.plans}


class TestOnePattern:
    """With one pattern there is no choice, so nothing is sampled or scored."""

    POLICY = ct.SparsityPolicy(
        0.4, patterns=("temporal",), dense_steps=((0, 2),), dense_layers=(), width_multiple=4
    )

    def layer(self) -> ct.SparseAttention:
        return ct.SparseAttention(
            GRID, self.POLICY, num_steps=4, num_layers=2, implementation="xla", dtype="float32"
        )

    def test_no_routing_in_the_program(self) -> None:
        arrays = known_heads(GRID, [["spatial", "temporal"]])

        def program(step: Any) -> Any:
            return self.layer().route(*arrays, step=step, layer=1, rng=KEY).routes

        for text in (
            str(jax.make_jaxpr(program)(jnp.int32(3))),
            str(jax.make_jaxpr(lambda: program(3))()),
        ):
            assert "dot_general" not in text
            assert "random_bits" not in text
        both = ct.SparsityPolicy(0.4, **ALWAYS, width_multiple=4)
        layer = ct.SparseAttention(GRID, both, implementation="xla", dtype="float32")
        routed = jax.make_jaxpr(lambda: layer.route(*arrays, step=3, layer=1, rng=KEY).routes)()
        assert "dot_general" in str(routed)

    @pytest.mark.parametrize("step", [0, 3])
    def test_output_and_record(self, step: int) -> None:
        layer, arrays = self.layer(), known_heads(GRID, [["spatial", "temporal"]])
        output, record = layer(*arrays, step=step, layer=1, rng=KEY, return_record=True)
        expected, _ = expected_of(arrays, layer.planned.plans, np.full((1, 2), int(step > 1)))
        np.testing.assert_allclose(output, expected, rtol=2e-5, atol=2e-5)
        names = {row["pattern"] for row in record.rows()}
        assert names == ({"temporal"} if step else {"dense"})
        assert {row["errors"] for row in record.rows()} == {None}
        ct.RouteTable.from_records([record]).to_dict()
        traced = jax.jit(lambda step: layer(*arrays, step=step, layer=1, rng=KEY))(step)
        np.testing.assert_allclose(traced, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("grid", [ct.TokenGrid(5, 16, 24), ct.TokenGrid(21, 20, 20)], ids=str)
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_commands_use_the_blocks_of_the_layer(
    grid: ct.TokenGrid, implementation: str | None, dtype: str
) -> None:
    workload = Workload(grid, density=0.35, dtype=dtype).with_blocks(implementation)
    policy = ct.SparsityPolicy(0.35, **ALWAYS)
    planned = plan_layer(policy, grid, dtype=dtype, implementation=implementation)
    assert {(plan.block_q, plan.block_kv) for plan in planned.plans} == {
        (workload.block_q, workload.block_kv)
    }


def test_one_call_checks_its_arguments_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, int] = {}

    def counted(name: str) -> Any:
        check = getattr(arguments, name)

        def count(*values: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return check(*values)

        return count

    names = "check_arrays", "check_scale", "check_prompt_length"
    for name in names:
        replacement = counted(name)
        for module in ("attention", "routing.route", "layer.sparse_attention"):
            monkeypatch.setattr(f"cinetile.{module}.{name}", replacement, raising=False)
    layer = ct.SparseAttention(
        ct.TokenGrid(6, 4, 5, text_tokens=8),
        ct.SparsityPolicy(0.5, **ALWAYS, block_q=16, block_kv=8, width_multiple=4),
        implementation="xla",
        dtype="float32",
    )
    arrays = np.random.default_rng(0).standard_normal((3, 1, 128, 2, 16), np.float32)
    layer(*arrays, step=0, layer=0, rng=KEY, prompt_length=5)
    assert counts == dict.fromkeys(names, 1)


class TestChoice:
    def test_objects_as_well_as_names(self) -> None:
        own = XlaImplementation()
        assert select_implementation(own, None) is own
        assert select_implementation((CoarseTpu(), own), None).name == "pallas_tpu"
        assert select_implementation(("pallas_tpu", own), None) is own
        plan = ct.plan_tiles(ct.dense_mask(GRID), 16, 16, "dense")
        array = jnp.ones((1, 120, 1, 8))
        found = ct.attention(array, array, array, plan, implementation=own)
        np.testing.assert_array_equal(
            found, ct.attention(array, array, array, plan, implementation="xla")
        )

    def test_layer_plans_compare_by_settings(self) -> None:
        policy = ct.SparsityPolicy(0.35, **ALWAYS)
        first, second = (plan_layer(policy, GRID, implementation="xla") for _ in range(2))
        assert first == second
        assert hash(first) == hash(second)
        assert first != plan_layer(None, GRID, implementation="xla")

    def test_without_a_policy_everything_is_dense(self) -> None:
        planned = plan_layer(None, GRID, implementation="xla")
        assert [plan.mode for plan in planned.plans] == ["dense"]
        assert planned.plans[0].block_q == ct.default_blocks(120, "bfloat16", "xla")[0]
        assert planned.decide(7, 9, KEY).plans == (0,)


def test_float16() -> None:
    """The layer takes what kernels take."""
    grid = ct.TokenGrid(6, 4, 5)
    policy = ct.SparsityPolicy(0.5, block_q=20, block_kv=10, width_multiple=4, **ALWAYS)
    layer = ct.SparseAttention(grid, policy, dtype="float16")
    arrays = np.random.default_rng(0).standard_normal((3, 1, grid.num_tokens, 2, 16))
    half, single = (arrays.astype(dtype) for dtype in (np.float16, np.float32))
    output = layer(*half, step=0, layer=0, rng=KEY)
    expected = layer(*single, step=0, layer=0, rng=KEY)
    assert output.dtype == np.float16
    np.testing.assert_allclose(output, expected, atol=5e-3)
