"""The call itself: what it refuses and how it says so, and which implementation it takes."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import SMALL, TEXT_LAST, find

import cinetile as ct
from cinetile.kernels.reference import ReferenceImplementation
from cinetile.kernels.registry import status_of
from cinetile.kernels.xla import XlaImplementation

PLAN = find("ragged").plan
OTHER = ct.plan_tiles(ct.temporal_mask(SMALL, width=4), 24, 8)
SHAPE = (2, SMALL.num_tokens, 3, 8)


def zeros(shape: tuple[int, ...] = SHAPE, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


@pytest.mark.usefixtures("unchecked")
class TestArrays:
    """Each argument by its name."""

    def attend(self, **arguments: Any) -> Any:
        return ct.attention(
            **{"query": zeros(), "key": zeros(), "value": zeros(), "plan": PLAN, **arguments}
        )

    @pytest.mark.parametrize("name", ["query", "key", "value"])
    @pytest.mark.parametrize("shape", [SHAPE[1:], (1, *SHAPE), (), (SMALL.num_tokens,)], ids=str)
    def test_rank(self, name: str, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=rf"{name} must have the axes \('batch', 'tokens', 'h"):
            self.attend(**{name: zeros(shape)})

    @pytest.mark.parametrize("name", ["query", "key", "value"])
    @pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.complex64])
    def test_dtype(self, name: str, dtype: Any) -> None:
        dtype_name = jnp.dtype(dtype).name
        with pytest.raises(
            TypeError, match=f"{name} must be one of float32, bfloat16, float16, got {dtype_name}"
        ):
            self.attend(**{name: zeros(dtype=dtype)})

    def test_float64_of_numpy(self) -> None:
        message = "query must be one of float32, bfloat16, float16, got float64"
        with pytest.raises(TypeError, match=message):
            self.attend(query=np.zeros(SHAPE))

    @pytest.mark.parametrize("name", ["key", "value"])
    @pytest.mark.parametrize("axis", range(4))
    def test_other_shape(self, name: str, axis: int) -> None:
        shape = list(SHAPE)
        shape[axis] += 1
        what = "as many tokens as" if axis == 1 else "the shape and dtype of"
        with pytest.raises(ValueError, match=f"{name} must have {what} query"):
            self.attend(**{name: zeros(tuple(shape))})

    @pytest.mark.parametrize("name", ["key", "value"])
    def test_other_dtype(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name} must have the shape and dtype of query"):
            self.attend(**{name: zeros(dtype=jnp.bfloat16)})

    @pytest.mark.parametrize("tokens", [69, 71, 1])
    def test_token_count(self, tokens: int) -> None:
        array = zeros((2, tokens, 3, 8))
        message = f"tokens of the plan's grid, 5x2x7 = 70 tokens, got {tokens}"
        with pytest.raises(ValueError, match=message):
            self.attend(query=array, key=array, value=array)

    @pytest.mark.parametrize("axis", range(4))
    def test_empty(self, axis: int) -> None:
        shape = list(SHAPE)
        shape[axis] = 0
        array = zeros(tuple(shape))
        with pytest.raises(ValueError, match="query must not be empty, got shape"):
            self.attend(query=array, key=array, value=array)

    @pytest.mark.parametrize("name", ["query", "key", "value"])
    @pytest.mark.parametrize("value", [None, [[1.0]], 3.0, "query"], ids=str)
    def test_no_array(self, name: str, value: Any) -> None:
        with pytest.raises(TypeError, match=f"{name} must be an array, got {type(value).__name__}"):
            self.attend(**{name: value})

    @pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
    def test_scale_that_is_no_number(self, scale: float) -> None:
        with pytest.raises(ValueError, match="scale must be finite, got"):
            self.attend(scale=scale)

    @pytest.mark.parametrize("scale", [0, -0.25])
    def test_scale_that_is_not_positive(self, scale: float) -> None:
        with pytest.raises(ValueError, match="scale must be above 0, got"):
            self.attend(scale=scale)

    @pytest.mark.parametrize("scale", [1e-46, 1e-31, 1e31, 3e38])
    def test_scale_that_float32_cannot_carry(self, scale: float) -> None:
        with pytest.raises(ValueError, match=r"scale must lie in \[1e-30, 1e30\], got"):
            self.attend(scale=scale)

    def test_scale_may_be_an_integer(self) -> None:
        arrays = find("ragged").arrays()
        two: Any = 2
        np.testing.assert_array_equal(
            ct.attention(*arrays, PLAN, scale=two), ct.attention(*arrays, PLAN, scale=2.0)
        )

    @pytest.mark.parametrize("scale", ["big", [1.0, 2.0]], ids=str)
    def test_scale_of_the_wrong_type(self, scale: Any) -> None:
        with pytest.raises(TypeError, match="scale must be a number, got"):
            self.attend(scale=scale)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_numpy_arrays_are_taken(self, dtype: str) -> None:
        arrays = find("ragged" if dtype == "float32" else "ragged-bf16").arrays()
        output = ct.attention(*arrays, PLAN)
        assert isinstance(output, jax.Array)
        assert output.dtype == dtype
        np.testing.assert_array_equal(
            output, jax.jit(ct.attention, static_argnums=3)(*arrays, PLAN)
        )

    def test_arguments_are_checked_inside_jit_too(self) -> None:
        attend = jax.jit(lambda query, key: ct.attention(query, key, key, PLAN))
        with pytest.raises(ValueError, match="key must have as many tokens as query"):
            attend(zeros(), zeros((2, 69, 3, 8)))


def test_numpy_arrays_pass_the_annotations() -> None:
    """The annotations must not promise less than the function takes."""
    arrays = find("ragged").arrays()
    assert ct.attention(*arrays, PLAN).shape == arrays[0].shape


@pytest.mark.usefixtures("unchecked")
class TestPlansAndRoutes:
    def attend(self, plan: Any, routes: Any = None) -> Any:
        return ct.attention(zeros(), zeros(), zeros(), plan, routes=routes)

    @pytest.mark.parametrize("plan", [(), []], ids=str)
    def test_no_plan(self, plan: Any) -> None:
        with pytest.raises(ValueError, match="plan must be a tile plan or a non-empty sequence"):
            self.attend(plan)

    @pytest.mark.parametrize("plan", [("split",), [PLAN, PLAN.mask]], ids=["str", "mask"])
    def test_sequence_of_something_else(self, plan: Any) -> None:
        with pytest.raises(TypeError, match=r"plan must .* got (str|Mask)"):
            self.attend(plan)

    @pytest.mark.parametrize("plan", [PLAN.mask, None, 7], ids=["mask", "None", "int"])
    def test_no_plan_at_all(self, plan: Any) -> None:
        """Handing over the mask itself is an easy mistake."""
        with pytest.raises(TypeError, match="plan must"):
            self.attend(plan)

    def test_plans_on_different_grids(self) -> None:
        other = ct.plan_tiles(ct.dense_mask(ct.TokenGrid(7, 2, 5)), 16, 16)
        with pytest.raises(ValueError, match=r"plan must hold plans on one grid, got 5x2x7.*7x2x5"):
            self.attend((PLAN, other), np.zeros((2, 3), int))

    def test_missing_routes(self) -> None:
        with pytest.raises(ValueError, match="routes must say which of the 2 plans each head"):
            self.attend((PLAN, OTHER))

    @pytest.mark.parametrize(
        "routes",
        [
            np.full((2, 3), 2),
            np.array([[0, 0, 0], [0, 0, -1]]),
            jnp.array([[0, 9, 0], [0, 0, 0]]),
        ],
        ids=["too large", "negative", "jax"],
    )
    def test_routes_out_of_range(self, routes: Any) -> None:
        with pytest.raises(ValueError, match=r"routes must lie in \[0, 2\) for 2 plans, got val"):
            self.attend((PLAN, OTHER), routes)

    def test_routes_of_one_plan_out_of_range(self) -> None:
        with pytest.raises(ValueError, match=r"routes must lie in \[0, 1\) for 1 plans"):
            self.attend(PLAN, np.ones((2, 3), int))

    @pytest.mark.parametrize("dtype", [np.float32, bool], ids=str)
    def test_routes_that_are_no_integers(self, dtype: Any) -> None:
        with pytest.raises(TypeError, match="routes must be integers, got"):
            self.attend((PLAN, OTHER), np.zeros((2, 3), dtype))

    @pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 3, 1), (1, 3), ()], ids=str)
    def test_shape_of_routes(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"routes must have the shape \(2, 3\), got"):
            self.attend((PLAN, OTHER), np.zeros(shape, int))

    def test_nested_lists_as_routes(self) -> None:
        assert self.attend((PLAN, OTHER), [[0, 1, 0], [1, 1, 0]]).shape == SHAPE

    def test_traced_routes_are_checked_as_far_as_known(self) -> None:
        attend = jax.jit(lambda routes: self.attend((PLAN, OTHER), routes))
        with pytest.raises(TypeError, match="routes must be integers"):
            attend(np.zeros((2, 3), np.float32))
        with pytest.raises(ValueError, match="routes must have the shape"):
            attend(np.zeros((3, 2), np.int32))


@pytest.mark.usefixtures("unchecked")
class TestPromptLength:
    PLAN = find("text-last").plan

    def attend(self, prompt_length: Any, plan: Any = PLAN) -> Any:
        array = zeros((2, plan.grid.num_tokens, 1, 8))
        return ct.attention(array, array, array, plan, prompt_length=prompt_length)

    @pytest.mark.parametrize(
        ("length", "error", "message"),
        [
            (-1, ValueError, "prompt_length must be at least 0, got -1"),
            (10, ValueError, "prompt_length must be at most 9, got 10"),
            (True, TypeError, "prompt_length must be an integer, got True"),
            (2.0, TypeError, "prompt_length must be an integer, got 2.0"),
            (np.array([3, 10]), ValueError, r"prompt_length must lie in \[0, 9\], got 3 to 10"),
            (np.array([-1, 3]), ValueError, r"prompt_length must lie in \[0, 9\], got -1 to 3"),
            (np.array([1, 2, 3]), ValueError, r"must have the shape \(2,\), got \(3,\)"),
            (np.array([1.0, 2.0]), TypeError, "prompt_length must be integers, got float"),
        ],
        ids=str,
    )
    def test_bad_lengths(self, length: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            self.attend(length)

    def test_grid_without_text(self) -> None:
        with pytest.raises(ValueError, match="prompt_length needs a grid with text tokens"):
            self.attend(3, PLAN)

    def test_plan_with_padding_of_its_own(self) -> None:
        with pytest.raises(ValueError, match="prompt_length must be None for the svg-hunyuan"):
            self.attend(3, find("hunyuan-padded-text").plan)

    def test_one_number_is_for_all_rows_and_traced_ones_are_clipped(self) -> None:
        case = find("text-last")
        query, key, value = (np.concatenate([array, -array]) for array in case.arrays())

        def attend(length: Any) -> Any:
            return ct.attention(query, key, value, case.plan, prompt_length=length)

        np.testing.assert_array_equal(attend(4), attend(np.array([4, 4])))
        np.testing.assert_array_equal(attend(np.int64(4)), attend(np.array([4, 4])))
        clipped = jax.jit(attend)(jnp.array([-3, 99]))
        np.testing.assert_array_equal(clipped, attend(np.array([0, 9])))


class Elsewhere(ReferenceImplementation):
    """Needs hardware that no machine has."""

    name: ClassVar[str] = "elsewhere"
    requirements: ClassVar[str] = "a quantum computer"
    automatic: ClassVar[bool] = True

    def unavailable(self) -> str | None:
        return "there is no quantum computer"


class Picky(ReferenceImplementation):
    """Runs anywhere, but takes one head at most."""

    name: ClassVar[str] = "picky"
    automatic: ClassVar[bool] = True

    def unsupported(self, request: Any) -> str | None:
        return f"takes 1 head, got {request.heads}" if request.heads > 1 else None


class Recorded(XlaImplementation):
    """`xla` that tells that it ran."""

    ran: ClassVar[list[str]] = []

    def attend(self, *arrays: Any, **options: Any) -> Any:
        self.ran.append(self.name)
        return super().attend(*arrays, **options)


def attend_with(implementation: Any) -> jax.Array:
    return ct.attention(zeros(), zeros(), zeros(), PLAN, implementation=implementation)


class TestArraysOutsideOfJit:
    """Arrays that a jitted function closes over are known, and checked like any other."""

    def test_routes(self) -> None:
        query, key, value = (jnp.asarray(array) for array in find("ragged").arrays())
        routes = jnp.ones((1, 1), jnp.int32)
        found = jax.jit(lambda q: ct.attention(q, key, value, (PLAN, OTHER), routes=routes))(query)
        np.testing.assert_array_equal(found, ct.attention(query, key, value, OTHER))
        bad = routes + 7
        with pytest.raises(ValueError, match=r"routes must lie in \[0, 2\)"):
            jax.jit(lambda q: ct.attention(q, key, value, (PLAN, OTHER), routes=bad))(query)

    def test_prompt_length(self) -> None:
        plan = ct.plan_tiles(ct.spatial_mask(TEXT_LAST, width=9), 16, 16)
        query = jnp.ones((2, TEXT_LAST.num_tokens, 1, 8))
        lengths = jnp.array([3, 4])
        found = jax.jit(lambda q: ct.attention(q, q, q, plan, prompt_length=lengths))(query)
        expected = ct.attention(query, query, query, plan, prompt_length=lengths)
        np.testing.assert_array_equal(found, expected)

    @pytest.mark.parametrize("route", [2, 2**31 - 1])
    def test_a_traced_route_out_of_range_counts_as_the_last(self, route: int) -> None:
        query, key, value = find("ragged").arrays()
        attend = jax.jit(
            lambda routes: ct.attention(query, key, value, (PLAN, OTHER), routes=routes)
        )
        found = attend(jnp.full((1, 1), route, jnp.int32))
        np.testing.assert_array_equal(found, ct.attention(query, key, value, OTHER))


class TestImplementations:
    def test_listing(self) -> None:
        listed = {status.name: status for status in ct.implementations()}
        assert {"xla", "reference"} <= listed.keys()
        assert listed["xla"].available
        assert listed["xla"].automatic
        assert not listed["reference"].automatic
        assert all(status.requirements for status in listed.values())
        assert all((status.reason is None) == status.available for status in listed.values())
        assert "xla: available" in str(listed["xla"])

    def test_listing_says_what_is_missing(self) -> None:
        status = status_of(Elsewhere())
        assert (status.name, status.available) == ("elsewhere", False)
        assert str(status) == (
            "elsewhere: not available: there is no quantum computer (needs a quantum computer)"
        )

    @pytest.mark.parametrize("choice", [Elsewhere(), (Elsewhere(),)], ids=["itself", "tuple"])
    def test_a_named_one_that_cannot_run(self, choice: Any) -> None:
        with pytest.raises(NotImplementedError, match="elsewhere: there is no quantum computer"):
            attend_with(choice)

    def test_a_named_one_that_cannot_take_the_call(self) -> None:
        with pytest.raises(NotImplementedError, match="picky: takes 1 head, got 3"):
            attend_with(Picky())

    def test_all_reasons_are_told(self) -> None:
        with pytest.raises(NotImplementedError, match=r"elsewhere: there is .*; picky: takes 1"):
            attend_with([Elsewhere(), Picky()])

    def test_the_first_that_can_run_is_taken(self) -> None:
        Recorded.ran.clear()
        attend_with((Elsewhere(), Picky(), Recorded(), "reference"))
        assert Recorded.ran == ["xla"]

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize("choice", ["cuda", "", ("xla", "cuda"), ()], ids=repr)
    def test_unknown_names(self, choice: Any) -> None:
        with pytest.raises(ValueError, match=r"implementation must be None, one of .*'xla'.* got"):
            attend_with(choice)

    def test_none_is_one_that_may_be_chosen(self) -> None:
        np.testing.assert_array_equal(attend_with(None), jnp.zeros(SHAPE))


class TestDefaultBlocks:
    @pytest.mark.parametrize("implementation", [None, "xla", "reference"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("tokens", [1, 70, 75_600, 302_400])
    def test_they_make_a_plan(self, implementation: Any, dtype: str, tokens: int) -> None:
        block_q, block_kv = ct.default_blocks(tokens, dtype, implementation)
        mask = ct.spatial_mask(ct.TokenGrid(tokens, 1, 1), 0.5)
        assert ct.plan_tiles(mask, block_q, block_kv).stats.tiles_visited > 0

    def test_unknown_name(self) -> None:
        with pytest.raises(ValueError, match=r"implementation must be .* got 'cuda'"):
            ct.default_blocks(70, "float32", "cuda")

    def test_one_that_cannot_run(self) -> None:
        with pytest.raises(NotImplementedError, match="there is no quantum computer"):
            ct.default_blocks(70, "float32", Elsewhere())


def test_double_precision_mode_changes_nothing() -> None:
    """JAX's global switch makes float64 the default of everything that names no dtype."""
    query = jnp.asarray(np.random.default_rng(0).standard_normal((1, 70, 2, 16)), jnp.float32)
    with jax.enable_x64(True):
        output, lse = ct.attention(query, query, query, PLAN, implementation="xla", return_lse=True)
    assert output.dtype == jnp.float32
    assert lse.dtype == jnp.float32
