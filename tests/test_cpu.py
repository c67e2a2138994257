"""The native CPU kernel, along every path that this machine can run."""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from kernel_cases import SMALL, KernelCase, find
from kernel_suite import KernelSuite, expected_of

import cinetile as ct
from cinetile.kernels.cpu import CpuImplementation
from cinetile.kernels.cpu.blocks import tuned_blocks
from cinetile.kernels.cpu.implementation import PATH_VARIABLE
from cinetile.kernels.cpu.native import TARGET, load_library
from cinetile.kernels.cpu.tables import FlatTables, flatten_plans

LIBRARY = load_library()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))


PATHS = (
    "amx",
    "amx_emulated",
    "avx512_bf16",
    "avx512",
    "avx2",
    "neon_bf16",
    "neon",
    "portable",
)


class PathSuite(KernelSuite):
    path: ClassVar[str]

    def __init_subclass__(cls) -> None:
        if hasattr(cls, "path"):
            cls.implementation = CpuImplementation(cls.path)

    @pytest.fixture(autouse=True)
    def path_exists(self) -> None:
        """Skips where the machine lacks the path."""
        reason = CpuImplementation(self.path).unavailable()
        if reason is not None:
            pytest.skip(reason)

    @pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0x7F800001, 0xFFC001FF])
    def test_any_nan_comes_through(self, bits: int) -> None:
        query, key, value = find("ragged").arrays()
        query.view(np.uint32)[0, 5, 0, 3] = bits
        output, lse = self.attend_and_lse(query, key, value, find("ragged").plan)
        assert np.isnan(output[0, 5]).all()
        assert np.isnan(lse[0, 5]).all()
        others = np.arange(query.shape[1]) != 5
        assert np.isfinite(output[0, others]).all()
        key.view(np.uint32)[0, 0, 0, 3] = bits  # every row keeps the first key
        output, lse = self.attend_and_lse(query, key, value, find("ragged").plan)
        assert np.isnan(output).all()
        assert np.isnan(lse).all()

    @pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("which", ["key", "value"])
    @pytest.mark.parametrize(
        "name",
        [
            "ragged",
            "blocks-divide",
            "temporal-sink-2",
            "mode-naive",
            "aligned-balanced",
            "width-0",
            "ragged-bf16",
            "ragged-f16",
            "blocks-beyond-the-sequence",
            "hunyuan-padded-text",
        ],
    )
    def test_what_is_not_finite_reaches_rows_that_keep_it(
        self, name: str, which: str, number: float
    ) -> None:
        case = find(name)
        query, key, value = arrays = case.arrays()
        kept = case.plan.mask_kept()
        left_out = np.flatnonzero(~kept.all(axis=0))
        spoiled = left_out[left_out.size // 3 :: 31]
        safe = ~kept[:, spoiled].any(axis=1)
        assert 0 < safe.sum() < safe.size
        bad_key, bad_value = key.copy(), value.copy()
        bad = bad_key if which == "key" else bad_value
        bad[:, spoiled, :, 1] = number
        output, lse = self.attend_and_lse(query, bad_key, bad_value, case.plan)
        expected = expected_of(arrays, [case.plan])
        self.check(
            (output[:, safe], lse[:, safe]),
            (expected[0][:, safe], expected[1][:, safe]),
            case.dtype,
        )
        if which == "value":
            assert not np.isfinite(output[0, ~safe, 0, 1]).any()
            others = np.arange(case.head_dim) != 1
            assert np.isfinite(output[..., others]).all()

    def test_an_empty_vmap(self) -> None:
        empty = np.zeros((0, *find("ragged").shape), np.float32)
        attend = functools.partial(self.attend, plan=find("ragged").plan)
        assert jax.vmap(attend)(empty, empty, empty).shape == empty.shape


class TestAmx(PathSuite):
    path = "amx"


class TestAmxEmulated(PathSuite):
    path = "amx_emulated"


class TestAvx512Bf16(PathSuite):
    path = "avx512_bf16"


class TestAvx512(PathSuite):
    path = "avx512"


class TestAvx2(PathSuite):
    path = "avx2"


class TestNeonBf16(PathSuite):
    path = "neon_bf16"


class TestNeon(PathSuite):
    path = "neon"


class TestPortable(PathSuite):
    path = "portable"


@pytest.mark.parametrize("path", PATHS)
@given(
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(0, 34),
    scale=st.floats(0.3, 3.0),
    offset=st.sampled_from([-8, 0, 8]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
@settings(max_examples=25)
def test_logits_of_any_size(
    path: str, seed: int, exponent: int, scale: float, offset: int, dtype: str
) -> None:
    """Scores up to 3e12, exact in float32: the weights must feel their differences only."""
    forced = CpuImplementation(path)
    if (reason := forced.unavailable()) is not None:
        pytest.skip(reason)
    case = find("ragged")
    generator = np.random.default_rng(seed)
    query, key = (generator.integers(-4, 5, case.shape) for _ in range(2))
    query, key = (query + offset) * 2.0**exponent, key + offset
    query, key, value = (
        np.asarray(array, jnp.dtype(dtype))
        for array in (query, key, generator.standard_normal(case.shape))
    )
    scale = float(np.float32(scale))
    found = forced.attend(
        jnp.asarray(query),
        jnp.asarray(key),
        jnp.asarray(value),
        None,
        plans=(case.plan,),
        scale=scale,
    )
    PathSuite().check(found, expected_of((query, key, value), [case.plan], scale=scale), dtype)


@pytest.mark.parametrize("path", PATHS)
def test_no_block_of_queries_is_mostly_empty(path: str) -> None:
    """A query tile computes less than a vector of queries (two on AMX) that it does not have."""
    assert not isinstance(LIBRARY, str)
    if path not in LIBRARY.paths + LIBRARY.test_paths:
        pytest.skip(f"this processor has no path {path!r}")
    for number, dtype in enumerate(("float32", "bfloat16", "float16")):
        amx = path.startswith("amx") and dtype == "bfloat16"
        lanes = 32 if amx else {"avx2": 8, "neon_bf16": 4, "neon": 4, "portable": 4}.get(path, 16)
        for queries in range(1, 1025):
            computed = LIBRARY.computed_queries(path.encode(), number, queries)
            assert computed == -(-queries // lanes) * lanes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [1, 8, 16, 24, 40, 64, 80, 128, 192, 256, 320])
@pytest.mark.parametrize("path", PATHS)
def test_head_dims(path: str, head_dim: int, dtype: str) -> None:
    """Features fill words, vectors and tiles to different degrees."""
    forced = CpuImplementation(path)
    if (reason := forced.unavailable()) is not None:
        pytest.skip(reason)
    case = dataclasses.replace(find("ragged"), head_dim=head_dim, dtype=dtype)
    query, key, value = case.arrays()
    output, lse = ct.attention(query, key, value, case.plan, implementation=forced, return_lse=True)
    rows = np.arange(case.grid.num_tokens)
    expected, expected_lse = ct.reference_rows(query[0], key[0], value[0], case.plan, rows)
    tolerance = KernelSuite.tolerances[dtype]
    np.testing.assert_allclose(np.float64(output[0]), expected, tolerance, tolerance)
    np.testing.assert_allclose(np.float64(lse[0]), expected_lse, tolerance, tolerance)


def test_it_is_the_default_on_a_cpu() -> None:
    first = next(status for status in ct.implementations() if status.available and status.automatic)
    assert (first.name, first.path) == ("cpu", CpuImplementation().path)


def test_a_path_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH_VARIABLE, "portable")
    assert CpuImplementation().unavailable() is None
    assert CpuImplementation().path == "portable"


def test_a_path_that_is_not_here_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH_VARIABLE, "avx3")
    case = find("ragged")
    for implementation in (None, "cpu"):
        with pytest.raises(ValueError, match=r"CINETILE_CPU_PATH is 'avx3'.*portable"):
            ct.attention(*case.arrays(), case.plan, implementation=implementation)
    status = next(status for status in ct.implementations() if status.name == "cpu")
    assert not status.available
    assert "avx3" in str(status)


def test_without_the_library_the_portable_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cinetile.kernels.cpu.implementation.load_library", lambda: "not built")
    assert ct.default_blocks(8400, "float32") == ct.default_blocks(8400, "float32", "xla")
    case = find("ragged")
    ct.attention(*case.arrays(), case.plan)
    with pytest.raises(NotImplementedError, match="cpu: not built"):
        ct.attention(*case.arrays(), case.plan, implementation="cpu")


def attend(arrays: Any, plan: ct.TilePlan) -> jax.Array:
    query, key, value = arrays
    return ct.attention(query, key, value, plan, implementation="cpu")


class TestThreads:
    CASE: ClassVar[KernelCase] = KernelCase(
        "",
        ct.TokenGrid(9, 10, 13),
        lambda grid: ct.temporal_mask(grid, density=0.4),
        64,
        32,
        heads=3,
        head_dim=32,
    )

    def test_calls_from_several_threads(self) -> None:
        plan = self.CASE.plan
        inputs = [self.CASE.arrays(seed) for seed in range(6)]
        expected = [np.asarray(attend(arrays, plan)) for arrays in inputs]
        wrong: list[int] = []

        def call(index: int) -> None:
            for _ in range(10):
                found = np.asarray(attend(inputs[index], plan))
                if not np.array_equal(found, expected[index]):
                    wrong.append(index)

        threads = [threading.Thread(target=call, args=(index,)) for index in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_calls_side_by_side_in_one_program(self) -> None:
        """XLA may run them at once, on the pool that they share."""
        plan = self.CASE.plan
        inputs = [self.CASE.arrays(seed) for seed in range(8)]

        @jax.jit
        def all_of_them(inputs: Any) -> list[Any]:
            return [attend(arrays, plan) for arrays in inputs]

        for arrays, found in zip(inputs, all_of_them(inputs), strict=True):
            np.testing.assert_array_equal(found, attend(arrays, plan))

    def test_inside_shard_map(self) -> None:
        plan = self.CASE.plan
        arrays = [jnp.asarray(array) for array in self.CASE.arrays()]
        spec = PartitionSpec(None, None, "heads", None)
        sharded = jax.shard_map(
            lambda *local: attend(local, plan),
            mesh=Mesh(np.array(jax.devices()[:1]), ("heads",)),
            in_specs=(spec, spec, spec),
            out_specs=spec,
        )
        np.testing.assert_array_equal(jax.jit(sharded)(*arrays), attend(arrays, plan))

    def test_the_same_call_gives_the_same_bits(self) -> None:
        arrays, plan = self.CASE.arrays(), self.CASE.plan
        first = attend(arrays, plan)
        for _ in range(5):
            np.testing.assert_array_equal(attend(arrays, plan), first)


Damage = Callable[[FlatTables], dict[str, np.ndarray]]


def _set(name: str, index: Any, number: int) -> Damage:
    def damage(tables: FlatTables) -> dict[str, np.ndarray]:
        table = getattr(tables, name).copy()
        table[index] = number
        return {name: table}

    return damage


class TestCorruptTables:
    """The library trusts no table: whatever one says, it raises and reads nothing outside."""

    PLANS: ClassVar[tuple[ct.TilePlan, ...]] = (
        ct.plan_tiles(ct.temporal_mask(SMALL, width=9), 16, 24),
        ct.plan_tiles(ct.spatial_mask(SMALL, width=9), 16, 24, "aligned"),
    )

    def call(self, routes: int = 0, prompt_lengths: int = 0, **damaged: np.ndarray) -> None:
        query, key, value = (jnp.asarray(array) for array in find("ragged").arrays())
        tables = vars(flatten_plans(self.PLANS)) | damaged
        run = jax.ffi.ffi_call(
            TARGET,
            (
                jax.ShapeDtypeStruct(query.shape, query.dtype),
                jax.ShapeDtypeStruct(query.shape[:3], jnp.float32),
            ),
        )
        outputs = run(
            query,
            key,
            value,
            np.full(query.shape[::2], routes, np.int32),
            np.full(query.shape[:1], prompt_lengths, np.int32),
            *tables.values(),
            scale=np.float32(1),
            path="portable",
        )
        jax.block_until_ready(outputs)

    def test_sound_tables_run(self) -> None:
        self.call()
        self.call(routes=1)

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            pytest.param(_set("tile_kv", 3, 3), "tile_kv names a tile beyond", id="tile"),
            pytest.param(_set("tile_kv", 0, -1), "tile_kv names a tile beyond", id="tile-below-0"),
            pytest.param(_set("tile_kv", 1, 0), "tile_kv is not ascending", id="tile-twice"),
            pytest.param(_set("row_starts", 2, 99), "not ascending", id="row"),
            pytest.param(_set("row_starts", 2, -5), "not ascending", id="row-below-0"),
            pytest.param(_set("row_starts", 0, 1), "does not span", id="first-row"),
            pytest.param(_set("row_starts", 5, 4), "does not span|ascending", id="last-row"),
            pytest.param(_set("orders", (0, 7), 70), "token order", id="order"),
            pytest.param(_set("orders", (0, 7), -1), "token order", id="order-below-0"),
            pytest.param(_set("orders", (0, 7), 3), "a token twice", id="order-twice"),
            pytest.param(_set("header", (0, 0), 0), "block size", id="block-q"),
            pytest.param(_set("header", (0, 1), -8), "block size", id="block-kv"),
            pytest.param(_set("header", (0, 0), 8), "query tiles", id="other-block-q"),
            pytest.param(_set("header", (0, 1), 2**31 - 1), "tile_kv", id="huge-block-kv"),
            pytest.param(_set("header", (0, 3), 99), "outside row_starts", id="rows-offset"),
            pytest.param(_set("header", (0, 3), -1), "outside row_starts", id="rows-before"),
            pytest.param(_set("header", (0, 4), 2**31 - 1), "outside row_starts", id="rows-count"),
            pytest.param(_set("header", (0, 5), 10**6), "outside the tables", id="tiles-offset"),
            pytest.param(_set("header", (0, 6), -1), "outside the tables", id="tiles-below-0"),
            pytest.param(_set("header", (0, 7), 1), "edges", id="edges"),
            pytest.param(_set("header", (0, 8), 9), "token order is not there", id="query-order"),
            pytest.param(_set("header", (0, 9), -2), "token order is not there", id="key-order"),
            pytest.param(_set("header", (0, 11), 71), "text", id="text"),
            pytest.param(lambda _: {"routes": 2}, "routes name a plan", id="route"),
            pytest.param(lambda _: {"routes": -1}, "routes name a plan", id="route-below-0"),
            pytest.param(lambda _: {"prompt_lengths": 71}, "prompt_lengths", id="valid-text"),
            pytest.param(
                lambda tables: {"header": tables.header[:, :-1]}, "header", id="header-columns"
            ),
            pytest.param(
                lambda tables: {"tile_kind": tables.tile_kind[:-1]}, "differ", id="kind-length"
            ),
        ],
    )
    def test_damage_is_found(self, damage: Any, message: str) -> None:
        # Which of the two depends on whether jax had to wait for the call.
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
            self.call(**damage(flatten_plans(self.PLANS)))

    def test_any_edges_are_safe(self) -> None:
        """Edges are only compared with, so wrong ones give wrong numbers and nothing worse."""
        edges = flatten_plans(self.PLANS).edges
        for number in (-(2**31), -1, 71, 2**31 - 1):
            self.call(edges=np.full_like(edges, number))


class TestTunedBlocks:
    def test_every_path_has_sizes(self) -> None:
        for path in set(PATHS) - {"amx_emulated"}:
            for dtype in ("float32", "bfloat16", "float16"):
                for tokens in (1, 8_400, 10**6):
                    assert min(tuned_blocks(path, dtype, tokens)) >= 1

    def test_the_nearest_length_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        table = {"portable": {"float32": {"100": [1, 2], "10000": [3, 4]}}}
        monkeypatch.setattr("cinetile.kernels.cpu.blocks._load", lambda: {"blocks": table})
        assert tuned_blocks("portable", "float32", 900) == (1, 2)
        assert tuned_blocks("portable", "float32", 1100) == (3, 4)
