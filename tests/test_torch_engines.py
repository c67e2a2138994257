"""Attention on PyTorch tensors: every engine, on a CPU, through the call that a GPU takes."""

import weakref
from typing import Any, ClassVar

import brute_force
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import SMALL, TEXT_LAST, KernelCase, find
from kernel_suite import KernelSuite, expected_of, text_exists
from strategies import Example, examples

import cinetile as ct

torch = pytest.importorskip("torch")

import torch_flash  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from cinetile.kernels.torch import (  # noqa: E402
    attention,
    engines,
    flex,
    merge,
    run_attention,
    window_pair,
)


@pytest.fixture(autouse=True, scope="module")
def flash_on_a_cpu() -> None:
    torch_flash.register()


def to_tensor(array: Any) -> Any:
    return torch.tensor(np.asarray(array, np.float32)).to(getattr(torch, str(array.dtype)))


def to_tensors(arrays: Any) -> tuple[Any, Any, Any]:
    query, key, value = (to_tensor(array) for array in arrays)
    return query, key, value


def to_array(tensor: Any, dtype: Any) -> np.ndarray:
    return tensor.float().numpy().astype(dtype)


class TensorSuite(KernelSuite):
    """The kernel suite on PyTorch tensors; what is JAX's only is left out."""

    implementation: Any
    test_inside_jit: Any = None
    test_vmap: Any = None
    test_vmap_over_the_query_alone: Any = None
    test_traced_routes_do_not_recompile: Any = None
    test_traced_routes_out_of_range_are_clamped: Any = None
    test_traced_routes_of_a_single_plan_are_clamped: Any = None
    test_output_alone: Any = None  # it wants an array of JAX

    def attend(self, query: Any, key: Any, value: Any, plan: Any, **options: Any) -> Any:
        tensors = to_tensors((query, key, value))
        found = attention(*tensors, plan, implementation=self.implementation, **options)
        if options.get("return_lse"):
            return to_array(found[0], query.dtype), found[1].numpy()
        return to_array(found, query.dtype)

    @pytest.mark.parametrize("lengths", [[9, 4], [1, 0]], ids=str)
    @pytest.mark.parametrize("name", KernelSuite.PROMPT_CASES)
    def test_prompt_length(self, name: str, lengths: list[int]) -> None:
        case = self.PROMPT_CASES[name]
        shape = (2, case.grid.num_tokens, 2, case.head_dim)
        generator = np.random.default_rng(0)
        arrays = [generator.standard_normal(shape, np.float32) for _ in range(3)]
        query, key, value = (array.astype(find_dtype(case.dtype)) for array in arrays)
        exists = text_exists(case.grid, lengths)
        for array in (query, key, value):
            array[~exists] = np.nan
        output, lse = self.attend_and_lse(
            query, key, value, case.plan, prompt_length=np.array(lengths)
        )
        kept = case.plan.mask_kept() & exists[:, None, :]
        assert np.isfinite(output).all()
        for row, head in np.ndindex(2, 2):
            some_key = kept[row].any(axis=1)
            real = exists[row] & some_key
            lost = exists[row] & ~some_key
            assert not output[row, lost, head].any()
            assert np.isneginf(lse[row, lost, head]).all()
            safe_key, safe_value = (
                np.where(exists[row, :, None], array[row, :, head], 0) for array in (key, value)
            )
            expected = brute_force.attention(
                query[row, real, head], safe_key, safe_value, kept[row][real]
            )
            self.check((output[row, real, head], lse[row, real, head]), expected, case.dtype)

    @pytest.mark.parametrize("name", ["ragged", "temporal-sink-1", "text-first-temporal"])
    def test_float16(self, name: str) -> None:
        case = find(name)
        query, key, value = (array.astype(np.float16) for array in case.arrays())
        output, lse = self.attend(query, key, value, case.plan, return_lse=True)
        assert output.dtype == np.float16
        expected = expected_of((query, key, value), [case.plan])
        self.check((output, lse), expected, slack=200)


def find_dtype(name: str) -> Any:
    import jax.numpy as jnp

    return jnp.dtype(name)


class TestWindowPair(TensorSuite):
    """Aligned plans, which it refuses, go to FlexAttention here."""

    implementation: ClassVar[Any] = ("window_pair", "flex")

    @pytest.mark.parametrize("offset", [-1e4, 1e4])
    @pytest.mark.parametrize("name", ["ragged", "temporal-sink-2", "mode-naive"])
    def test_logits_far_from_zero(self, name: str, offset: float) -> None:
        """FlashAttention's log-sum-exp is float32: near 1e4 a merge is right to 1e-3."""
        case = find(name)
        query, key, value = case.arrays()
        query, key = np.full_like(query, offset / case.head_dim), np.ones_like(key)
        output, lse = self.attend_and_lse(query, key, value, case.plan, scale=1.0)
        kept = case.plan.mask_kept().astype(float)
        counts = kept.sum(axis=1)
        means = kept @ value[0, :, 0].astype(float) / counts[:, None]
        np.testing.assert_allclose(output[0, :, 0], means, atol=3e-3)
        np.testing.assert_allclose(lse[0, :, 0], offset + np.log(counts), rtol=1e-6)


class TestFlex(TensorSuite):
    implementation: ClassVar[Any] = "flex"


@pytest.mark.parametrize("name", ["window_pair", "flex"])
@settings(max_examples=25)
@given(examples, st.integers(1, 3), st.data())
def test_any_mask(name: str, example: Example, heads: int, data: st.DataObject) -> None:
    mode: Any = data.draw(st.sampled_from(["dense", "naive", "split"]))
    plan = ct.plan_tiles(example.mask, 8, 5, mode)
    case = KernelCase("", example.mask.grid, ct.dense_mask, heads=heads)
    arrays = case.arrays()
    output, lse = attention(*to_tensors(arrays), plan, implementation=name, return_lse=True)
    expected = expected_of(arrays, [plan])
    np.testing.assert_allclose(output, expected[0], atol=2e-5)
    np.testing.assert_allclose(lse, expected[1], atol=2e-5)


def tensors_of(case: KernelCase) -> tuple[Any, Any, Any]:
    return to_tensors(case.arrays())


def test_the_operator_is_the_one_that_is_called() -> None:
    """Fails where PyTorch changes its operator: names, order, windows and what it returns."""
    from torch.nn.attention import varlen

    assert window_pair.operator_problem() is None
    schema = str(torch.ops.torch_attn._varlen_attn.default._schema)
    assert schema == (
        "torch_attn::_varlen_attn(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, "
        "Tensor? cu_seq_k, SymInt max_q, SymInt max_k, bool is_causal=False, float? scale=None, "
        "SymInt[]? window_size=None, bool enable_gqa=False, Tensor? seqused_k=None, "
        "Tensor? block_table=None, SymInt? num_splits=None) -> (Tensor, Tensor, Tensor)"
    )
    assert "(W, 0) for causal attention with sliding window" in (varlen.varlen_attn.__doc__ or "")


def test_a_changed_operator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen

    def other(query: Any, key: Any, value: Any, window: Any) -> None:
        del query, key, value, window

    monkeypatch.setattr(varlen, "varlen_attn", other)
    assert "takes other arguments" in str(window_pair.operator_problem())
    case = find("ragged")
    with pytest.raises(NotImplementedError, match="takes other arguments"):
        attention(*tensors_of(case), case.plan, implementation="window_pair")


def test_engines_say_why_they_cannot_run() -> None:
    by_name = {status.name: status for status in engines("meta")}
    assert by_name["sdpa"].reason is None
    assert "no FlashAttention for meta" in str(by_name["window_pair"].reason)
    assert "not tried on meta" in str(by_name["flex"].reason)
    assert all("needs" in str(status) for status in engines("cpu"))


def test_refusals_name_every_engine_and_reason() -> None:
    case = find("aligned-balanced")
    with pytest.raises(NotImplementedError, match=r"window_pair: an aligned plan.*mode='split'"):
        attention(*tensors_of(case), case.plan, implementation="window_pair")
    with pytest.raises(NotImplementedError, match="sdpa: scaled_dot_product_attention runs dense"):
        attention(*tensors_of(case), case.plan, implementation=["sdpa", "window_pair"])


def test_each_plan_goes_to_the_first_engine_that_can_run_it() -> None:
    plans = [
        ct.plan_tiles(ct.spatial_mask(SMALL, width=9), 16, 16),
        ct.plan_tiles(ct.spatial_mask(SMALL, width=9), 16, 16, "aligned"),
        ct.plan_tiles(ct.dense_mask(SMALL), 16, 16),
    ]
    case = KernelCase("", SMALL, ct.dense_mask, heads=3)
    result = run_attention(*tensors_of(case), plans, routes=[[0, 1, 2]])
    assert result.engines == {0: "window_pair (FA2)", 1: "flex", 2: "sdpa"}
    expected, _ = expected_of(case.arrays(), plans, [[0, 1, 2]])
    np.testing.assert_allclose(result.output.numpy(), expected, atol=2e-5)


@pytest.mark.parametrize("prompt_length", [None, 4, [9, 0]])
def test_dense_plans_by_pytorchs_own_attention(prompt_length: Any) -> None:
    plan = ct.plan_tiles(ct.dense_mask(TEXT_LAST), 16, 16)
    case = KernelCase("", TEXT_LAST, ct.dense_mask, batch=2, heads=3)
    lengths = None if prompt_length is None else np.array(prompt_length)
    result = run_attention(*tensors_of(case), plan, prompt_length=lengths)
    assert result.engines == {0: "sdpa"}
    other = attention(*tensors_of(case), plan, prompt_length=lengths, implementation="window_pair")
    torch.testing.assert_close(result.output, other)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"query": np.zeros(3)}, TypeError, "query must be a PyTorch tensor"),
        ({"key": torch.zeros(1, 70, 1, 16).double()}, TypeError, "key must be one of float32"),
        ({"value": torch.zeros(1, 70, 1, 8)}, ValueError, "value must have the shape"),
        ({"query": torch.zeros(70, 1, 16)}, ValueError, "query must have the axes"),
        ({"routes": [[2]]}, ValueError, r"routes must lie in \[0, 1\)"),
        ({"routes": [[0.5]]}, TypeError, "routes must be integers"),
        ({"routes": [0]}, ValueError, "routes must have the shape"),
        ({"scale": 0.0}, ValueError, "scale must be above 0"),
        ({"prompt_length": 3}, ValueError, "prompt_length needs a grid with text"),
        ({"implementation": "cudnn"}, ValueError, "implementation must be None, one of 'sdpa'"),
        ({"implementation": 3}, TypeError, "implementation must be None, a name"),
        ({"plan": []}, ValueError, "non-empty sequence"),
        ({"plan": ["a"]}, TypeError, "plan must be a tile plan, got str"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], match: str) -> None:
    case = find("ragged")
    query, key, value = tensors_of(case)
    arguments = {"query": query, "key": key, "value": value, "plan": case.plan} | change
    with pytest.raises(error, match=match):
        attention(**arguments)


def test_gradients_are_refused() -> None:
    case = find("ragged")
    query, key, value = tensors_of(case)
    with pytest.raises(RuntimeError, match="query requires a gradient"):
        attention(query.requires_grad_(), key, value, case.plan)
    with torch.no_grad():
        attention(query, key, value, case.plan)


@pytest.mark.parametrize("name", ["window_pair", "flex", "sdpa"])
def test_tensors_with_gaps_are_not_changed(name: str) -> None:
    """Heads before tokens in memory, as a pipeline's transposed tensors."""
    case = find("batch-2-heads-3")
    plan = ct.plan_tiles(ct.dense_mask(SMALL), 16, 16) if name == "sdpa" else case.plan
    tensors = tensors_of(case)
    query, key, value = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors)
    before = [tensor.clone() for tensor in (query, key, value)]
    found = attention(query, key, value, plan, implementation=name)
    torch.testing.assert_close(found, attention(*tensors, plan, implementation=name))
    for tensor, other in zip((query, key, value), before, strict=True):
        assert torch.equal(tensor, other)


class Allocated(TorchDispatchMode):
    """Counts bytes of new storages that live, and the most that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            pointer = storage.data_ptr()
            size = storage.nbytes()
            taken = [
                tensor.untyped_storage().data_ptr() for tensor in args if torch.is_tensor(tensor)
            ]
            if pointer in self._known or pointer in taken or not size:
                continue
            self.live += size
            self.peak = max(self.peak, self.live)
            self._known[pointer] = weakref.finalize(storage, self._free, pointer, size)
        return result

    def _free(self, pointer: int, size: int) -> None:
        self._known.pop(pointer, None)
        self.live -= size


@pytest.mark.parametrize(
    ("pattern", "most"), [("spatial", 3.0), ("temporal", 6.0), ("temporal, any width", 6.0)]
)
def test_memory_of_the_window_pair(
    pattern: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In units of the query: output, two pieces, and a copy of each tensor where tokens move."""
    grid = ct.TokenGrid(6, 12, 16)
    mask = {
        "spatial": lambda: ct.spatial_mask(grid, width=200),
        "temporal": lambda: ct.temporal_mask(grid, width=36),
        "temporal, any width": lambda: ct.temporal_mask(grid, width=40),
    }[pattern]()
    plan = ct.plan_tiles(mask, 16, 16)
    merged_at_once = 1 << 12
    monkeypatch.setattr(window_pair, "_MERGED_AT_ONCE", merged_at_once)
    query, key, value = (torch.randn(1, grid.num_tokens, 4, 64).half() for _ in range(3))

    def without_temporaries(query: Any, key: Any, value: Any, window: Any, scale: float) -> Any:
        del key, value, window, scale
        return torch.empty_like(query), torch.empty(query.shape[:2])

    monkeypatch.setattr(window_pair, "_flash", without_temporaries)
    attention(query, key, value, plan, implementation="window_pair")
    with Allocated() as allocated:
        attention(query, key, value, plan, implementation="window_pair")
    unit = query.nbytes
    assert allocated.peak > unit, "the count must see something"
    lse_and_merge = 2 * grid.num_tokens * 4 * 4 + 16 * merged_at_once * 4 + 32 * grid.num_tokens
    assert allocated.peak <= most * unit + lse_and_merge


class TestMerge:
    @given(st.integers(1, 4), st.integers(0, 2**31))
    def test_equals_attention_over_all_keys(self, count: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        query, key, value = generator.standard_normal((3, 12, 4))
        owner = generator.integers(0, count, 12)
        pieces = [owner == piece for piece in range(count)]
        outputs, lses = [], []
        for kept in pieces:
            if kept.any():
                output, lse = brute_force.attention(query, key, value, np.tile(kept, (12, 1)))
            else:
                output, lse = np.zeros((12, 4)), np.full(12, -np.inf)
            outputs.append(torch.tensor(output, dtype=torch.float32))
            lses.append(torch.tensor(lse, dtype=torch.float32))
        expected = brute_force.attention(query, key, value, np.ones((12, 12), bool))
        found = merge(outputs, lses)
        np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
        np.testing.assert_allclose(found[1], expected[1], atol=1e-5)

    @pytest.mark.parametrize("logit", [-1e30, -300.0, 300.0, 1e30])
    def test_far_logits(self, logit: float) -> None:
        outputs = [torch.full((2, 3), number) for number in (1.0, 3.0)]
        merged, lse = merge(outputs, [torch.full((2,), logit)] * 2)
        assert torch.equal(merged, torch.full((2, 3), 2.0))
        torch.testing.assert_close(lse, torch.full((2,), logit + float(np.log(2))))

    def test_rows_without_keys(self) -> None:
        lost, some = torch.tensor([-torch.inf, -torch.inf]), torch.tensor([-torch.inf, 2.0])
        merged, lse = merge([torch.ones(2, 3), torch.full((2, 3), 5.0)], [lost, some])
        assert torch.equal(merged, torch.tensor([[0.0] * 3, [5.0] * 3]))
        assert torch.equal(lse, some)

    def test_nan_stays(self) -> None:
        merged, _ = merge([torch.full((1, 2), torch.nan), torch.ones(1, 2)], [torch.zeros(1)] * 2)
        assert merged.isnan().all()

    def test_gradients(self) -> None:
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=generator, requires_grad=True)  # noqa: E731
        query, key, value = draw(5, 4), draw(7, 4), draw(7, 4)

        def parts(start: int, stop: int) -> tuple[Any, Any]:
            logits = query @ key[start:stop].T
            return torch.softmax(logits, -1) @ value[start:stop], torch.logsumexp(logits, -1)

        pieces = [parts(0, 3), parts(3, 7)]
        merged, lse = merge([tensor[0] for tensor in pieces], [tensor[1] for tensor in pieces])
        whole, whole_lse = parts(0, 7)
        for found, expected in ((merged, whole), (lse, whole_lse)):
            got = torch.autograd.grad(found.sin().sum(), (query, key), retain_graph=True)
            want = torch.autograd.grad(expected.sin().sum(), (query, key), retain_graph=True)
            for tensor, other in zip(got, want, strict=True):
                torch.testing.assert_close(tensor, other, atol=1e-5, rtol=1e-4)

    def test_wrong_arguments(self) -> None:
        with pytest.raises(ValueError, match="as many and at least 1, got 0 and 0"):
            merge([], [])
        with pytest.raises(ValueError, match="must have one shape"):
            merge([torch.zeros(2, 3), torch.zeros(2, 4)], [torch.zeros(2)] * 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's compiler uses its own
@pytest.mark.parametrize("mode", ["split", "aligned"])
def test_compiled_flex_attention_reads_the_plans_lists(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled, it visits the tiles that a plan lists, whatever the mask says of others."""
    monkeypatch.setattr(flex, "_MAX_EAGER_TOKENS", 0)
    grid = ct.TokenGrid(5, 9, 13, text_tokens=19)
    plans = [
        ct.plan_tiles(build(grid, density=0.3), 128, 128, mode)
        for build in (ct.spatial_mask, ct.temporal_mask)
    ]
    case = KernelCase("", grid, ct.dense_mask, heads=2, head_dim=32)
    arrays = case.arrays()
    tensors = to_tensors(arrays)
    output = attention(*tensors, plans, routes=[[1, 0]], implementation="flex")
    assert isinstance(output, torch.Tensor)
    expected, _ = expected_of(arrays, plans, [[1, 0]])
    np.testing.assert_allclose(output, expected, atol=3e-5)
    with pytest.raises(NotImplementedError, match="gives no log-sum-exp"):
        attention(*tensors, plans, routes=[[1, 0]], implementation="flex", return_lse=True)
    padded = attention(*tensors, plans, routes=[[1, 0]], implementation="flex", prompt_length=5)
    assert not torch.equal(padded, output)
