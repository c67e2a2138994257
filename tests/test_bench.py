"""Measuring: timing, sampled references, inputs, rivals and the ladder."""

import importlib.util
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import cinetile as ct
from cinetile.lab.bench import (
    InputSource,
    LadderConfig,
    LadderResult,
    Timing,
    Workload,
    describe_machine,
    load_inputs,
    measure_ladder,
    run_ladder,
    time_interleaved,
)
from cinetile.lab.bench.reference import (
    RoundedInputs,
    max_abs_error,
    reference_output,
    relative_error,
    sample_rows,
)
from cinetile.lab.bench.rivals import check_rivals, rivals_ready
from cinetile.lab.inputs import Inputs, random_inputs

GRID = ct.TokenGrid(3, 4, 5)
HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="PyTorch (extra `rivals`) is missing")


def workload(**fields: Any) -> Workload:
    defaults: dict[str, Any] = {
        "grid": GRID,
        "width": 9,
        "heads": 2,
        "head_dim": 8,
        "dtype": "float32",
        "block_q": 12,
        "block_kv": 8,
    }
    return Workload(**{**defaults, **fields})


def brute_force(inputs: Inputs, kept: np.ndarray) -> np.ndarray:
    """Masked attention in float64, [batch, tokens, heads, head_dim], with an N x N mask."""
    query, key, value = (
        array.astype(np.float64) for array in (inputs.query, inputs.key, inputs.value)
    )
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    weights = np.where(kept, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0.0)
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(axis=-1, keepdims=True), value)


class TestTiming:
    def test_candidates_take_turns_after_a_warm_up(self):
        calls, examined = [], []

        def candidate(name: str):
            return lambda: calls.append(name) or name.upper()

        timings = time_interleaved(
            {name: candidate(name) for name in "abc"},
            2,
            examine=lambda name, output: examined.append((name, output)),
        )

        assert calls == list("abc" * 3)
        assert examined == [("a", "A"), ("b", "B"), ("c", "C")]
        assert all(len(timing.milliseconds) == 2 for timing in timings.values())

    def test_statistics(self):
        timing = Timing((3.0, 1.0, 2.0, 10.0))
        assert (timing.median, timing.minimum, timing.maximum) == (2.5, 1.0, 10.0)

    def test_progress_reaches_its_total_in_each_stage(self):
        heard = []
        time_interleaved({"a": lambda: None}, 3, progress=lambda *news: heard.append(news))
        assert heard[0] == ("warming up", "a", 0, 1)
        assert heard[-1] == ("timing", "", 3, 3)

    def test_no_rounds(self):
        with pytest.raises(ValueError, match="repeats must be at least 1"):
            time_interleaved({"a": lambda: None}, 0)


class TestReference:
    @pytest.mark.parametrize(("num_tokens", "count"), [(1000, 64), (97, 10), (10, 9), (5, 2)])
    def test_sampled_rows_cover_the_sequence(self, num_tokens, count):
        rows = sample_rows(num_tokens, count, seed=3)
        assert rows[0] == 0
        assert rows[-1] == num_tokens - 1
        assert np.all(np.diff(rows) > 0)
        assert np.max(np.diff(rows)) <= 2 * -(-num_tokens // count)
        np.testing.assert_array_equal(rows, sample_rows(num_tokens, count, seed=3))

    def test_all_rows_where_there_are_few(self):
        np.testing.assert_array_equal(sample_rows(7, 64, seed=0), np.arange(7))

    def test_rounding_is_that_of_the_kernel(self):
        inputs = random_inputs(6, 1, 8)
        rounded = RoundedInputs.of(inputs, "bfloat16")
        expected = np.asarray(jnp.asarray(inputs.key, jnp.bfloat16), np.float32)
        np.testing.assert_array_equal(rounded.key, expected)
        np.testing.assert_array_equal(RoundedInputs.of(inputs, "float32").value, inputs.value)

    def test_reference_of_every_batch_row(self):
        first, other = random_inputs(60, 2, 8, seed=1), random_inputs(60, 2, 8, seed=2)
        both = Inputs(
            np.concatenate([first.query, other.query]),
            np.concatenate([first.key, other.key]),
            np.concatenate([first.value, other.value]),
            "both",
        )
        plan = workload().plan("aligned")
        rows = np.array([0, 17, 59])
        reference = reference_output(RoundedInputs.of(both, "float32"), plan, rows)
        expected = brute_force(both, plan.mask_kept())[:, rows]
        np.testing.assert_allclose(reference, expected, rtol=1e-10, atol=1e-12)

    def test_errors(self):
        reference = np.full((1, 1, 1, 4), 2.0)
        output = reference + np.array([0.0, 0.0, 0.0, 1.0])
        assert max_abs_error(output, reference) == 1.0
        assert relative_error(output, reference) == pytest.approx(0.25)
        assert relative_error(output, np.zeros_like(reference)) == pytest.approx(np.sqrt(21.0))


class TestWorkload:
    def test_masks_of_patterns(self):
        assert workload().mask() == ct.spatial_mask(GRID, width=9)
        temporal = workload(pattern="temporal", width=None, density=0.5, sink_frames=2)
        assert temporal.mask() == ct.temporal_mask(GRID, 0.5, sink_frames=2)
        upstream = workload(pattern="svg-temporal", sink_frames=0).mask()
        assert upstream == ct.svg_mask(GRID, "temporal", width=9, sink=False)

    def test_blocks_are_filled_in_where_left_open(self):
        chosen = workload(block_q=None).with_blocks("xla")
        assert chosen.block_q == ct.default_blocks(60, "float32", "xla", sparse=True)[0]
        assert chosen.block_kv == 8

    def test_plan_without_blocks(self):
        with pytest.raises(ValueError, match="block_q and block_kv must be set"):
            workload(block_kv=None).plan("split")

    def test_rounding_reaches_aligned_plans(self):
        assert workload(rounding="keep").plan("aligned").rounding == "keep"
        assert workload(rounding="keep").plan("split").rounding is None

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"pattern": "diagonal"}, "pattern must be one of"),
            ({"dtype": "float64"}, "dtype must be one of"),
            ({"rounding": "up"}, "rounding must be one of"),
            ({"heads": 0}, "heads must be at least 1"),
            ({"block_q": 0}, "block_q must be at least 1"),
            ({"density": 0.5}, "exactly one of density and width"),
            ({"density": 1.5, "width": None}, r"density must lie in \(0, 1\]"),
            ({"sink_frames": 4}, "sink_frames must be at most 3"),
            ({"pattern": "svg-spatial", "sink_frames": 2}, "sink_frames must be at most 1"),
        ],
    )
    def test_bad_values(self, fields, message):
        with pytest.raises(ValueError, match=message):
            workload(**fields)


class TestSources:
    def test_random(self):
        inputs = load_inputs(InputSource(seed=4), workload())
        np.testing.assert_array_equal(inputs.query, random_inputs(60, 2, 8, seed=4).query)

    def test_path_is_for_files(self):
        with pytest.raises(ValueError, match="path must be given only for files"):
            InputSource("random", "x.npz")
        with pytest.raises(ValueError, match="path must be given only for files"):
            InputSource("qkv")

    @pytest.mark.parametrize(("pattern", "kind"), [("spatial", 0), ("svg-temporal", 1)])
    def test_clip_heads_are_of_the_pattern_s_kind(self, pattern, kind, monkeypatch):
        asked = {}

        def fake_clip(path, frames, height, width, heads, head_dim, *, seed, progress):
            asked.update(path=path, heads=heads)
            progress(1, 1)
            inputs = random_inputs(frames * height * width, heads, head_dim, seed)
            inputs.query[:] = np.arange(heads)[:, None]
            return inputs

        monkeypatch.setattr("cinetile.lab.bench.sources.clip_inputs", fake_clip)
        inputs = load_inputs(InputSource("clip", "a.mp4"), workload(pattern=pattern))

        np.testing.assert_array_equal(np.unique(inputs.query), [kind, kind + 2])
        assert inputs.description.endswith(("spatial heads", "temporal heads")[kind])
        assert asked["path"] == "a.mp4"

    def test_clip_needs_a_grid_without_text(self):
        with_text = workload(grid=ct.TokenGrid(3, 4, 5, text_tokens=2))
        with pytest.raises(ValueError, match="no text tokens"):
            load_inputs(InputSource("clip", "a.mp4"), with_text)


@pytest.fixture(scope="module")
def result() -> LadderResult:
    return run_ladder(LadderConfig(workload(), repeats=2, check_rows=60))


class TestLadder:
    def test_rows_tell_what_the_plans_do(self, result):
        assert [row.mode for row in result.rows] == ["dense", "naive", "split", "aligned"]
        for row in result.rows:
            stats = workload().plan(row.mode).stats
            assert row.kept_fraction == stats.kept_fraction
            assert (row.tiles_total, row.tiles_visited, row.tiles_masked) == (
                stats.tiles_total,
                stats.tiles_visited,
                stats.tiles_masked,
            )

    def test_times_are_consistent(self, result):
        dense = result.row("dense")
        for row in result.rows:
            assert 0 < row.ms_min <= row.ms_median <= row.ms_max
            if row.speedup_vs_dense is None:
                assert row.no_speedup_reason
            else:
                assert row.speedup_vs_dense == pytest.approx(dense.ms_median / row.ms_median)

    def test_kernels_are_right(self, result):
        for row in result.rows:
            assert row.max_abs_error < 1e-4
            assert row.rel_error < 1e-5

    def test_mask_errors_are_those_of_brute_force(self, result):
        inputs = random_inputs(60, 2, 8, seed=0)
        dense = brute_force(inputs, np.ones((60, 60), bool))
        exact = brute_force(inputs, workload().mask().to_dense())
        aligned = brute_force(inputs, workload().plan("aligned").mask_kept())
        (errors,) = result.mask_errors
        assert errors.aligned_vs_exact == pytest.approx(relative_error(aligned, exact))
        assert errors.exact_vs_dense == pytest.approx(relative_error(exact, dense))
        assert errors.aligned_vs_dense == pytest.approx(relative_error(aligned, dense))
        assert result.row("split").rel_error_vs_dense == pytest.approx(
            errors.exact_vs_dense, rel=1e-3
        )
        assert result.row("aligned").rel_error_vs_exact == pytest.approx(
            errors.aligned_vs_exact, rel=1e-3
        )

    def test_real_inputs_are_compared_with_random_ones(self, tmp_path):
        inputs = random_inputs(60, 3, 4, seed=9)
        path = tmp_path / "layer.npz"
        np.savez(path, query=inputs.query, key=inputs.key, value=inputs.value)
        config = LadderConfig(
            workload(), InputSource("qkv", path), modes=("aligned", "dense"), repeats=1
        )
        result = run_ladder(config)
        assert [errors.input for errors in result.mask_errors] == [
            "file layer.npz",
            "random normal, seed 0",
        ]
        assert (result.workload.heads, result.workload.head_dim) == (3, 4)
        assert [row.mode for row in result.rows] == ["dense", "aligned"]

    def test_no_speed_up_without_dense(self):
        result = run_ladder(LadderConfig(workload(), modes=("split",), repeats=1))
        assert result.rows[0].speedup_vs_dense is None
        assert result.rows[0].no_speedup_reason == "dense attention was not measured"
        assert result.row("dense") is None

    def test_no_speed_up_from_few_rounds(self):
        result = run_ladder(LadderConfig(workload(), modes=("dense", "split"), repeats=2))
        dense, split = result.rows
        assert (dense.speedup_vs_dense, split.speedup_vs_dense) == (1.0, None)
        assert split.no_speedup_reason == "measured in 2 rounds, at least 3 are needed"

    def test_bfloat16_errors_are_those_of_the_kernel(self):
        result = run_ladder(LadderConfig(workload(dtype="bfloat16"), repeats=1))
        assert all(row.rel_error < 1e-2 for row in result.rows)

    def test_output_that_is_not_finite(self):
        inputs = random_inputs(60, 2, 8)
        inputs.value[:] = np.inf
        with pytest.raises(RuntimeError, match="dense gave an output that is not finite"):
            measure_ladder(LadderConfig(workload(), repeats=1), inputs)

    def test_tokens_must_fit(self):
        with pytest.raises(ValueError, match="inputs must have the tokens of 3x4x5"):
            measure_ladder(LadderConfig(workload()), random_inputs(59, 2, 8))

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"modes": ()}, "modes must name at least one"),
            ({"modes": ("split", "split")}, "none twice"),
            ({"modes": ("fast",)}, "modes must be one of"),
            ({"repeats": 0}, "repeats must be at least 1"),
            ({"check_rows": 1}, "check_rows must be at least 2"),
            ({"implementation": "magic"}, "implementation must be None, one of"),
            ({"rivals": ("numpy",)}, "rivals must be one of"),
        ],
    )
    def test_bad_configurations_fail_before_anything_runs(self, fields, message):
        with pytest.raises(ValueError, match=message):
            LadderConfig(workload(), **fields)


class TestRivals:
    def test_missing_torch_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(ImportError, match=r'PyTorch: run .*"\.\[rivals\]"'):
            LadderConfig(workload(), rivals=("torch-sdpa",))

    def test_none_need_no_torch(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", None)
        check_rivals(())
        rounded = RoundedInputs.of(random_inputs(60, 1, 8), "float32")
        with rivals_ready((), rounded, workload().mask(), "float32") as rivals:
            assert rivals == ()

    @needs_torch
    def test_named_twice(self):
        with pytest.raises(ValueError, match="rivals must not name one twice"):
            check_rivals(("torch-sdpa", "torch-sdpa"))

    @needs_torch
    def test_sdpa_in_the_ladder(self):
        result = run_ladder(LadderConfig(workload(), rivals=("torch-sdpa",), repeats=1))
        (rival,) = result.rivals
        assert rival.name == "torch-sdpa"
        assert rival.kept_fraction == 1.0
        assert rival.rel_error < 1e-5
        assert rival.rel_error == rival.rel_error_vs_dense

    @needs_torch
    def test_thread_count_is_put_back(self):
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(1)
        rounded = RoundedInputs.of(random_inputs(60, 1, 8), "float32")
        with rivals_ready(("torch-sdpa",), rounded, workload().mask(), "float32"):
            assert torch.get_num_threads() == describe_machine().threads
        assert torch.get_num_threads() == 1
        torch.set_num_threads(before)

    @needs_torch
    @pytest.mark.parametrize("pattern", ["spatial", "temporal"])
    @pytest.mark.parametrize("grid", [(5, 8, 9), (4, 8, 8)])
    def test_flex_block_lists_are_those_of_the_mask(self, pattern, grid):
        import torch

        from cinetile.lab.bench.rivals import _block_mask

        mask = workload(grid=ct.TokenGrid(*grid), pattern=pattern, width=40).mask()
        block_mask = _block_mask(torch, mask)
        prefix, low, high = (edge[:, None] for edge in mask.row_edges())
        keys = np.arange(mask.num_tokens)
        kept = (keys < prefix) | ((low <= keys) & (keys < high))
        padding = -mask.num_tokens % 128
        blocks = np.pad(kept, ((0, padding), (0, padding)))
        side = blocks.shape[0] // 128
        live = blocks.reshape(side, 128, side, 128).any(axis=(1, 3))
        np.testing.assert_array_equal(block_mask.to_dense()[0, 0].numpy() > 0, live)

    @needs_torch
    @pytest.mark.filterwarnings("ignore")
    def test_compiled_flex_in_the_ladder(self):
        shape = workload(grid=ct.TokenGrid(5, 8, 9), pattern="temporal", width=40, head_dim=16)
        result = run_ladder(LadderConfig(shape, rivals=("torch-flex",), repeats=1))
        (rival,) = result.rivals
        assert rival.kept_fraction == shape.mask().density
        assert rival.rel_error < 1e-5
        assert rival.rel_error == rival.rel_error_vs_exact


def test_machine_facts():
    machine = describe_machine()
    assert machine.threads >= 1
    assert machine.backend
    assert machine.to_dict()["jax"] == machine.jax


class TestOverheads:
    def result(self, implementation: str, **options: Any) -> LadderResult:
        fields = {"pattern": options.pop("pattern", "spatial")}
        config = LadderConfig(
            workload(**fields),
            implementation=implementation,
            repeats=2,
            check_rows=4,
            with_routing=True,
            **options,
        )
        return run_ladder(config)

    @pytest.mark.parametrize("pattern", ["spatial", "temporal", "svg-temporal"])
    def test_routing_and_placement_are_rows(self, pattern: str) -> None:
        result = self.result("xla", pattern=pattern, modes=("aligned",))
        assert [row.mode for row in result.overheads] == ["routing", "placement"]
        aligned = result.row("aligned")
        assert aligned is not None
        for row in result.overheads:
            assert 0 < row.ms_min <= row.ms_median <= row.ms_max
            assert row.share_of_aligned == pytest.approx(row.ms_median / aligned.ms_median)
        modes = [row["mode"] for row in result.to_dict()["rows"]]
        assert modes == ["aligned", "routing", "placement"]

    def test_without_an_aligned_row_there_is_no_share(self) -> None:
        result = self.result("xla", modes=("split",))
        assert [row.share_of_aligned for row in result.overheads] == [None, None]

    def test_a_kernel_that_reads_in_place_needs_no_placement(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("cinetile.kernels.xla.XlaImplementation.moves_tokens", False)
        routing, placement = self.result("xla", modes=("aligned",)).overheads
        assert routing.ms_median > 0
        assert (placement.ms_median, placement.share_of_aligned) == (0.0, 0.0)
        assert "in place" in placement.note

    def test_they_are_there_on_request_alone(self) -> None:
        result = run_ladder(LadderConfig(workload(), repeats=1, modes=("split",), check_rows=4))
        assert result.overheads == ()
