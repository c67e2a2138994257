"""The native kernel called on pointers: strides, threads, and what it refuses."""

import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import SMALL, TEXT_LAST

import cinetile as ct
from cinetile.kernels.cpu.direct import DirectAttention, Operand
from cinetile.kernels.cpu.native import load_library

LIBRARY = load_library()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))

PLANS = (
    ct.plan_tiles(ct.temporal_mask(SMALL, width=9), 16, 24),
    ct.plan_tiles(ct.spatial_mask(SMALL, width=9), 16, 24),
)
BATCH, HEADS, HEAD_DIM = 2, 3, 16
ROUTES = np.array([[0, 1, 0], [1, 1, 0]], np.int32)


def operand(array: np.ndarray) -> Operand:
    batch, token, head, feature = (stride // array.itemsize for stride in array.strides)
    assert feature == 1
    return Operand(array.ctypes.data, (batch, token, head))


def attend(attention: DirectAttention, arrays: Any, output: np.ndarray, **options: Any) -> None:
    settings: dict[str, Any] = {
        "dtype": str(output.dtype),
        "head_dim": output.shape[-1],
        "routes": ROUTES,
        "scale": 0.3,
        "num_threads": 2,
    }
    query, key, value = map(operand, arrays)
    attention(query, key, value, operand(output), **{**settings, **options})


def through_xla(arrays: Any, plans: Any = PLANS, **options: Any) -> Any:
    query, key, value = arrays
    options = {"routes": ROUTES, **options}
    return ct.attention(query, key, value, plans, scale=0.3, implementation="cpu", **options)


def random_arrays(grid: ct.TokenGrid, dtype: str = "float32", seed: int = 0) -> Any:
    generator = np.random.default_rng(seed)
    shape = BATCH, grid.num_tokens, HEADS, HEAD_DIM
    return [generator.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)) for _ in "qkv"]


def with_heads_before_tokens(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)


def with_gaps(array: np.ndarray) -> np.ndarray:
    wide = np.full((2 * array.shape[0], array.shape[1] + 3, 2, HEADS, HEAD_DIM), 7, array.dtype)
    view = wide[::2, 3:, 1]
    view[...] = array
    return view


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "layouts",
    [
        (np.asarray,) * 4,
        (with_heads_before_tokens,) * 4,
        (with_gaps, np.asarray, with_heads_before_tokens, np.asarray),
        (np.asarray, with_heads_before_tokens, with_gaps, with_gaps),
    ],
    ids=["adjacent", "heads-first", "mixed", "gaps-in-output"],
)
def test_strides(layouts: Any, dtype: str) -> None:
    arrays = random_arrays(SMALL, dtype)
    expected = through_xla(arrays)
    laid_out = [layout(array) for layout, array in zip(layouts, arrays, strict=False)]
    output = layouts[3](np.zeros_like(arrays[0]))
    around = None if output.base is None else output.base.copy()
    attend(DirectAttention(PLANS), laid_out, output)
    np.testing.assert_array_equal(output, np.asarray(expected))
    if layouts[3] is with_gaps:
        output[...] = 0
        np.testing.assert_array_equal(output.base, around, "written outside the output")


@pytest.mark.parametrize("num_threads", [1, 2, 3, 17])
def test_threads_change_nothing(num_threads: int) -> None:
    arrays = random_arrays(SMALL)
    expected = through_xla(arrays)
    output = np.zeros_like(arrays[0])
    attend(DirectAttention(PLANS), arrays, output, num_threads=num_threads)
    np.testing.assert_array_equal(output, np.asarray(expected))


def test_calls_from_several_threads() -> None:
    attention = DirectAttention(PLANS)
    inputs = [random_arrays(SMALL, seed=seed) for seed in range(4)]
    expected = [np.asarray(through_xla(arrays)) for arrays in inputs]
    outputs = [np.zeros_like(arrays[0]) for arrays in inputs]
    wrong: list[int] = []

    def call(index: int) -> None:
        for _ in range(10):
            attend(attention, inputs[index], outputs[index])
            if not np.array_equal(outputs[index], expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_text_that_does_not_exist() -> None:
    plan = ct.plan_tiles(ct.spatial_mask(TEXT_LAST, width=9), 16, 24)
    arrays = random_arrays(TEXT_LAST)
    routes = np.zeros((BATCH, HEADS), np.int32)
    lengths = np.array([4, 9], np.int32)
    expected = through_xla(arrays, plan, routes=routes, prompt_length=lengths)
    output = np.zeros_like(arrays[0])
    attend(DirectAttention((plan,)), arrays, output, routes=routes, prompt_lengths=lengths)
    np.testing.assert_array_equal(output, np.asarray(expected))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"routes": ROUTES + 1}, "routes name a plan that is not there"),
        ({"num_threads": 0}, "num_threads is below 1"),
        ({"head_dim": 0}, "an array is empty"),
        ({"dtype": "float64"}, "dtype must be one of 'float32', 'bfloat16', 'float16'"),
        (
            {"prompt_lengths": np.array([71, 0], np.int32)},
            "prompt_lengths is more than the sequence holds",
        ),
        ({"prompt_lengths": np.zeros(3, np.int32)}, r"prompt_lengths must be \[2\], got \[3\]"),
    ],
    ids=str,
)
def test_what_it_refuses(options: dict[str, Any], message: str) -> None:
    arrays = random_arrays(SMALL)
    output = np.full_like(arrays[0], 7)
    with pytest.raises(ValueError, match=message):
        attend(DirectAttention(PLANS), arrays, output, **options)
    assert (output == 7).all()


def test_a_path_that_is_not_here() -> None:
    arrays = random_arrays(SMALL)
    with pytest.raises(ValueError, match="this processor has no path 'avx3'"):
        attend(DirectAttention(PLANS, "avx3"), arrays, np.zeros_like(arrays[0]))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cinetile.kernels.cpu.direct.load_library", lambda: "not built")
    with pytest.raises(NotImplementedError, match="cpu: not built"):
        DirectAttention(PLANS)
