"""One block timed dense and sparse, and the model of a whole run."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner, Result

import cinetile as ct
from cinetile.cli.compare_shapes import compare_shapes, shape_only_options
from cinetile.cli.options import json_option
from cinetile.lab.bench import Timing
from cinetile.lab.compare import blocks
from cinetile.lab.compare.blocks import (
    BlockConfig,
    BlockTimes,
    full_width_block,
    full_width_rate,
    measure_blocks,
)
from cinetile.lab.compare.shapes import MODELS, RESOLUTIONS, BlockShape
from cinetile.lab.compare.stand_in import add_up
from cinetile.lab.compare.whole_run import (
    PUBLISHED_RUNS,
    AttentionCall,
    WholeRun,
    check_published,
    model_dense_stack,
    sparse_call_share,
)

GRID = ct.TokenGrid(4, 6, 8)
MODEL = BlockShape(heads=4, ffn_dim=96, num_layers=3, head_dim=16, text_tokens=8)
POLICY = ct.SparsityPolicy(0.4, width_multiple=8, block_q=16, block_kv=16)
DENSE = replace(POLICY, dense_steps=((0, None),))


def canned(dense: float, sparse: float, without: float, full_width: float = 1.0) -> Any:
    """A stand-in for the timer: runs nothing, and says what the clock shall have said."""
    milliseconds = {
        blocks.DENSE: dense,
        blocks.SPARSE: sparse,
        blocks.WITHOUT: without,
        blocks.FULL_WIDTH: full_width,
    }

    def time_interleaved(
        candidates: Mapping[str, Callable[[], Any]], repeats: int, *, examine: Any, progress: Any
    ) -> dict[str, Timing]:
        del examine
        progress("timing", "", 0, len(candidates))
        return {name: Timing((milliseconds[name],) * repeats) for name in candidates}

    return time_interleaved


def config(**changes: Any) -> BlockConfig:
    settings = {"policy": POLICY, "grids": {"tiny": GRID}, "model": MODEL, "sample_tokens": 16}
    return BlockConfig(**(settings | changes))


class TestShapes:
    def test_the_resolutions_have_the_tokens_that_everyone_counts(self) -> None:
        counted = {name: grid.num_tokens for name, grid in RESOLUTIONS.items()}
        assert counted == {"480p": 32_760, "720p": 75_600, "1080p": 168_840, "1440p": 302_400}

    def test_few_heads_keep_the_ratio_of_the_widths(self) -> None:
        assert MODELS["14B"].with_heads(40) == MODELS["14B"]
        assert MODELS["14B"].with_heads(10).ffn_dim == 3456  # a quarter of 13,824
        assert MODELS["14B"].with_heads(1).ffn_dim == 352  # 345.6 to a multiple of 32
        assert MODELS["1.3B"].with_heads(1).ffn_dim == 736  # 746.7

    def test_operations_by_hand(self) -> None:
        # Each token: q, k, v, out and q, out of 4 x 4; up and down of 4 x 6; both products of
        # cross-attention with 3 text tokens. Each text token: key and value.
        shape = BlockShape(heads=2, ffn_dim=6, num_layers=1, head_dim=2, text_tokens=3)
        per_token = 6 * 16 + 2 * 24 + 2 * 3 * 4
        assert shape.flops_without_attention(5) == 2 * (5 * per_token + 3 * 2 * 16)

    def test_operations_are_those_of_the_block_without_attention(self) -> None:
        """So the stand-in leaves nothing out that attention would need: XLA removes it not."""
        shape = BlockShape(heads=1, ffn_dim=512, num_layers=1, head_dim=256, text_tokens=8)
        tokens = 256
        block, inputs = blocks._random_block(shape, ct.TokenGrid(1, 1, tokens))

        @jax.jit
        def run(block: Any, inputs: Any) -> jax.Array:
            return block(*inputs, lambda *arrays: (add_up(*arrays), None))[0]

        compiled = run.lower(block, inputs).compile().cost_analysis()
        assert compiled is not None
        ratio = compiled["flops"] / shape.flops_without_attention(tokens)
        # One product of [tokens, dim] and [dim, dim] less would be an eighth.
        assert 0.99 < ratio < 1.1

    @pytest.mark.parametrize("heads", [0, 41])
    def test_heads_that_the_model_has_not(self, heads: int) -> None:
        with pytest.raises(ValueError, match="heads must be at"):
            MODELS["14B"].with_heads(heads)


class TestBlocks:
    def test_what_runs_is_the_model_s_block(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Dense attention gives what plain softmax gives, and so does a policy that keeps all."""
        outputs: dict[str, np.ndarray] = {}
        timer = canned(3.0, 2.0, 1.0)

        def keep(candidates: Any, repeats: int, **further: Any) -> Any:
            outputs.update({name: np.asarray(run(), "f4") for name, run in candidates.items()})
            return timer(candidates, repeats, **further)

        monkeypatch.setattr(blocks, "time_interleaved", keep)
        policy = replace(POLICY, density=1.0, dense_steps=(), dense_layers=())
        measure_blocks(config(policy=policy, heads=2))

        block, inputs = blocks._random_block(MODEL.with_heads(2), GRID)

        def softmax(*arrays: jax.Array) -> tuple[jax.Array, None]:
            return jax.nn.dot_product_attention(*arrays), None

        x, text, modulation, rotary = inputs
        output, _ = block(x, text, modulation, rotary, softmax)
        expected = np.asarray(output, np.float32)
        for name in (blocks.DENSE, blocks.SPARSE):
            np.testing.assert_allclose(outputs[name], expected, atol=0.1)
        assert np.abs(outputs[blocks.WITHOUT] - expected).max() > 0.5
        assert outputs[blocks.FULL_WIDTH].shape == (1, 16, MODEL.dim)

    def test_arithmetic(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blocks, "time_interleaved", canned(100.0, 60.0, 20.0, 4.0))
        stages: list[str] = []
        measured = config(heads=2)
        result = measure_blocks(measured, lambda stage, *_: stages.append(stage))
        (row,) = result.rows

        assert (row.name, row.repeats) == ("tiny", 5)
        assert row.attention_share.value == pytest.approx(0.8)
        assert row.attention_speedup.value == pytest.approx(2.0)
        assert row.block_speedup.value == pytest.approx(100 / 60)
        assert 0.4 < row.visited < 1.0
        assert set(stages) == {"tiny, timing"}

        full = full_width_block(row, measured)
        rest = MODEL.flops_without_attention(GRID.num_tokens)
        rest *= 4.0 / MODEL.flops_without_attention(16)
        assert full.dense_attention_ms == pytest.approx(160.0)  # 4 heads in place of 2
        assert full.sparse_attention_ms == pytest.approx(80.0)
        assert full.rest_ms == pytest.approx(rest)
        assert full.attention_share == pytest.approx(160 / (160 + rest))
        assert full.block_speedup == pytest.approx((160 + rest) / (80 + rest))
        rate = MODEL.flops_without_attention(16) / 4.0
        assert full_width_rate(row, measured) == pytest.approx(rate)

    def test_long_sequences_run_fewer_rounds(self) -> None:
        by_size = {name: config().repeats_at(grid) for name, grid in RESOLUTIONS.items()}
        assert by_size == {"480p": 5, "720p": 5, "1080p": 3, "1440p": 3}
        assert config(repeats=7).repeats_at(RESOLUTIONS["1440p"]) == 7

    def test_the_density_that_most_calls_have_is_timed(self) -> None:
        rules = (ct.DensityRule(0.2, layers=(1, 2)),)
        policy = replace(POLICY, rules=rules, dense_steps=(), dense_layers=())
        sparse = ct.SparseAttention(GRID, policy, num_steps=2, num_layers=4)
        step, layer, level = blocks._usual_call(sparse)
        assert policy.densities(step, layer, num_steps=2, num_layers=4) == (0.4, 0.4)
        choices = [sparse.planned.choices[plan] for plan in sparse.planned.levels[level]]
        assert [choice.density for choice in choices] == [0.4, 0.4]

    def test_a_block_that_attention_does_not_slow_down_tells_nothing(self) -> None:
        short, two = Timing((1.0, 1.1, 1.2)), Timing((2.0, 2.1, 2.2))
        row = BlockTimes(
            "tiny", GRID, 3, dense=two, sparse=short, without=short, full_width=short, visited=1.0
        )
        assert row.attention_share.value == pytest.approx(1 - 1.1 / 2.1)
        assert str(row.attention_speedup.reason).startswith("the times overlap: 1 to 1.2")
        assert row.block_speedup.value == pytest.approx(2.1 / 1.1)

    def test_values_that_are_not_finite(self) -> None:
        with pytest.raises(RuntimeError, match=r"dense.*not finite"):
            blocks._require_finite("dense", jnp.array([1.0, jnp.nan]))

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"policy": "aggressive"}, "policy must be a SparsityPolicy, got str"),
            (
                {"policy": DENSE},
                "policy must be sparse in some step",
            ),
            ({"grids": {}}, "grids must hold at least one"),
            ({"grids": {"a": (1, 2, 3)}}, "grid must be a TokenGrid, got tuple"),
            ({"grids": {"a": ct.TokenGrid(1, 2, 3, 4)}}, "'a'. must have no text tokens"),
            ({"heads": 0}, "heads must be at least 1, got 0"),
            ({"heads": 5}, "heads must be at most 4, got 5"),
            ({"repeats": 0}, "repeats must be at least 1, got 0"),
            ({"sample_tokens": 0}, "sample_tokens must be at least 1"),
            ({"implementation": "abacus"}, "implementation must be None, one of"),
        ],
    )
    def test_bad_input(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            config(**changes)


class TestWholeRun:
    def test_by_hand(self) -> None:
        # Of 100 s, 20 are outside the layers. Of the other 80, half are sparse calls' layers, in
        # which attention takes 3/4 and shrinks to a third: 40 s lose 40 * 3/4 * 2/3 = 20 s.
        run = WholeRun(
            sparse_calls=0.5, attention_share=0.75, attention_speedup=3.0, outside_share=0.2
        )
        assert run.speedup == pytest.approx(100 / 80)
        assert run.layer_speedup == pytest.approx(2.0)

    def test_nothing_outside_by_default(self) -> None:
        assert WholeRun(1.0, 0.75, 3.0).speedup == pytest.approx(2.0)
        assert WholeRun(0.0, 0.75, 3.0).speedup == 1.0
        assert WholeRun(1.0, 0.5, 0.5).speedup == pytest.approx(1 / 1.5)  # slower is possible

    def test_steps_and_layers_of_a_policy(self) -> None:
        aggressive = ct.SparsityPolicy.preset("aggressive")
        assert sparse_call_share(aggressive, 40, 40) == pytest.approx(36 * 39 / 1600)
        assert sparse_call_share(DENSE, 4, 3) == 0.0
        work = ct.expected_work(POLICY, GRID, num_steps=7, num_layers=3)
        assert sparse_call_share(POLICY, 7, 3) == pytest.approx(work.sparse_calls)

    def test_kernels_grow_with_the_square_and_the_rest_with_the_length(self) -> None:
        call = AttentionCall(100, dense_ms=40.0, sparse_ms=15.0, overhead_ms=5.0)
        assert call.speedup_at(100) == pytest.approx(2.0)
        assert call.speedup_at(300) == pytest.approx(9 * 40 / (9 * 15 + 3 * 5))

    def test_the_published_runs(self) -> None:
        checks = {check.resolution: check for check in check_published()}
        published = {name: round(check.published, 2) for name, check in checks.items()}
        assert published == {"720p": 1.28, "1080p": 1.49, "1440p": 1.69}
        # By hand for 720p: 36 of 40 steps and 39 of 40 layers, 78.70 ms against 32.76 and 46.81.
        saved = 0.8775 * 0.555
        here = checks["720p"]
        assert here.of_kernels == pytest.approx(1 / (1 - saved * (1 - 32.76 / 78.70)))
        assert here.with_overhead == pytest.approx(1 / (1 - saved * (1 - 46.81 / 78.70)))
        assert here.of_kernels_deviation == pytest.approx(here.of_kernels / here.published - 1)
        # What the documentation says of the model.
        assert all(0.06 < check.of_kernels_deviation < 0.1 for check in checks.values())
        assert all(abs(check.with_overhead_deviation) < 0.03 for check in checks.values())

    def test_runs_on_the_dense_stack(self) -> None:
        runs = {(run.resolution, run.mode): run for run in model_dense_stack()}
        here = runs["720p", "split"]
        # By hand: 1,600 calls of 53 ms are 84.8 s; 36 x 39 of them are sparse.
        assert here.dense_s == pytest.approx(122.2)
        assert here.attention_share == pytest.approx(84.8 / 122.2)
        assert here.sparse_s == pytest.approx(122.2 - 36 * 39 * (0.053 - 0.0254 - 0.0027))
        # Attention grows with the square, so a longer video gains more.
        ratio = RESOLUTIONS["1440p"].num_tokens / RESOLUTIONS["720p"].num_tokens
        longest = runs["1440p", "aligned"]
        assert longest.dense_s == pytest.approx(84.8 * ratio**2 + 37.4 * ratio)
        assert longest.speedup > runs["1080p", "aligned"].speedup > runs["720p", "aligned"].speedup

    def test_a_dense_policy_gains_nothing(self) -> None:
        assert {round(run.speedup, 9) for run in model_dense_stack(DENSE)} == {1.0}

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ((1.1, 0.5, 2.0, 0.0), "sparse_calls must lie in"),
            ((0.5, 0.0, 2.0, 0.0), "attention_share must lie in"),
            ((0.5, 0.5, 0.0, 0.0), "attention_speedup must be above 0"),
            ((0.5, 0.5, 2.0, -0.1), "outside_share must lie in"),
            ((0.5, 0.5, 2.0, 1.0), "outside_share must be below 1"),
            ((float("nan"), 0.5, 2.0, 0.0), "sparse_calls must be finite"),
        ],
    )
    def test_bad_input(self, values: tuple[float, ...], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            WholeRun(*values)

    def test_bad_counts(self) -> None:
        with pytest.raises(ValueError, match="num_steps must be at least 1"):
            sparse_call_share(POLICY, 0, 3)


class TestCommand:
    """`compare_shapes` in a command of its own, with the options that it brings."""

    def invoke(self, *arguments: str, **settings: Any) -> Result:
        @click.command()
        @shape_only_options
        @click.option("--repeats", type=int)
        @json_option
        def command(resolutions: tuple[str, ...], full_width: str, **options: Any) -> None:
            del full_width
            tiny = dict.fromkeys(resolutions, GRID)
            chosen = {"resolutions": tiny, "full_width": MODEL, "sample_tokens": 16}
            compare_shapes(POLICY, **(chosen | options | settings))

        return CliRunner().invoke(command, arguments, env={"COLUMNS": "160"})

    def test_document_and_tables(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(blocks, "time_interleaved", canned(100.0, 60.0, 20.0, 4.0))
        path = tmp_path / "shapes.json"
        done = self.invoke(
            "--resolutions", "720p,480p", "--heads", "2", "--repeats", "3", "--json", str(path)
        )
        assert done.exit_code == 0, done.output
        for part in ("80.00 %", "2.00x", "1.67x", "55.50 %", "+9.1 %", "-2.7 %", "2 heads of 16"):
            assert part in done.stdout, part
        assert "720p, timing ..." in done.stderr

        document = json.loads(path.read_text())
        first, second = document["rows"]
        assert (first["resolution"], second["resolution"]) == ("720p", "480p")
        assert (first["repeats"], first["num_tokens"]) == (3, GRID.num_tokens)
        assert first["published_attention_share"] == PUBLISHED_RUNS["720p"].attention_share
        assert second["published_attention_share"] is None
        share = first["full_width"]["attention_share"]
        run = WholeRun(document["sparse_calls"], share, first["attention_speedup"])
        assert first["full_width"]["run_speedup"] == pytest.approx(run.speedup)
        assert first["full_width"]["kind"] == "estimate"
        assert [check["resolution"] for check in document["published"]] == list(PUBLISHED_RUNS)
        assert {run["kind"] for run in document["dense_stack"]} == {"model"}

    @pytest.mark.parametrize("slowest", [110.0, 300.0])
    def test_a_busy_machine_is_told_of(
        self, slowest: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calm = canned(100.0, 60.0, 20.0)

        def restless(candidates: Any, repeats: int, **further: Any) -> dict[str, Timing]:
            timings = calm(candidates, repeats, **further)
            return timings | {blocks.DENSE: Timing((100.0, 100.0, 100.0, 100.0, slowest))}

        monkeypatch.setattr(blocks, "time_interleaved", restless)
        done = self.invoke("--resolutions", "480p")
        assert ("differ by up to 3.00x" in done.stdout) == (slowest == 300.0)
        assert ("The machine was busy" in done.stdout) == (slowest == 300.0)

    def test_no_estimate_from_what_is_not_told_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blocks, "time_interleaved", canned(100.0, 20.0, 20.0))
        done = self.invoke("--resolutions", "480p")
        assert done.exit_code == 0, done.output
        assert "480p: the speed-up of attention is not stated: the times overlap" in done.stdout
        done = self.invoke("--resolutions", "480p", "--json", "-")
        (row,) = json.loads(done.stdout)["rows"]
        assert (row["attention_speedup"], row["full_width"]) == (None, None)
        assert row["no_attention_speedup_reason"].startswith("the times overlap")

    def test_json_on_stdout_is_nothing_else(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blocks, "time_interleaved", canned(3.0, 2.0, 1.0))
        done = self.invoke("--resolutions", "480p", "--json", "-")
        assert json.loads(done.stdout)["rows"][0]["attention_share"] == pytest.approx(2 / 3)

    def test_without_the_extra_it_says_what_to_install(self) -> None:
        """And the options are there: `cinetile --help` must not need it."""
        code = """
import sys

sys.modules["equinox"] = None
import cinetile
from cinetile.cli.compare_shapes import compare_shapes

compare_shapes(cinetile.SparsityPolicy())
"""
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert "needs equinox: run `pip install" in done.stderr
        assert "in compare_shapes" in done.stderr

    def test_bad_arguments_are_usage_errors(self) -> None:
        for arguments, message in (
            (("--resolutions", "8k"), "must hold names of 480p, 720p, 1080p, 1440p"),
            (("--heads", "9"), "heads must be at most 4"),
            (("--repeats", "0"), "repeats must be at least 1"),
        ):
            done = self.invoke(*arguments)
            assert done.exit_code == 2
            assert message in done.stderr
        for settings, message in (
            ({"implementation": "abacus"}, "implementation must be None"),
            ({"threads": 0}, "threads must lie between 1"),
        ):
            done = self.invoke(**settings)
            assert done.exit_code == 2
            assert message in done.stderr
