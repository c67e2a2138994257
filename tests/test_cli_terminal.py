"""The command line in terminals that are narrow, know ASCII only, or interrupt it at once."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from commands import heeding_interrupts
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import cinetile as ct
from cinetile.cli import main
from cinetile.cli.tables import Numbers

TINY = ("--grid", "3x4x5", "--width", "9", "--block-q", "12", "--block-kv", "8")
TINY_LADDER = ("ladder", *TINY, "--head-dim", "8", "--repeats", "1", "--check-rows", "8")
SMALL_PLAN = ("plan", "--grid", "21x30x52", "--block-q", "256", "--block-kv", "256")
COMMAND = "import cinetile_command; cinetile_command.run()"
ONLY_ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}


def rendered(renderable: object, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def table(cells: list[str], *, expendable: tuple[str, ...] = ()) -> Numbers:
    made = Numbers("", *(f"kind {place}" for place in range(len(cells))), expendable=expendable)
    made.add_row("dense", *cells)
    return made


class TestOnlyASCII:
    def run(self, *program: str, encoding: str = "ascii") -> subprocess.CompletedProcess[str]:
        environment = os.environ | ONLY_ASCII | {"PYTHONIOENCODING": encoding}
        return subprocess.run(
            [sys.executable, *program],
            capture_output=True,
            encoding=encoding,
            env=environment,
            check=False,
        )

    @pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
    def test_plan(self, encoding):
        done = self.run("-c", COMMAND, "plan", *TINY, encoding=encoding)
        assert done.returncode == 0, done.stderr
        assert "# full  x masked  : few tiles  . skipped" in done.stdout
        assert "?" not in done.stdout

    def test_printing_a_plan(self):
        code = (
            "import cinetile as ct; grid = ct.TokenGrid(3, 4, 5); "
            "print(ct.plan_tiles(ct.spatial_mask(grid, width=9), block_q=12, block_kv=8))"
        )
        done = self.run("-c", code)
        assert done.returncode == 0, done.stderr
        assert "# full" in done.stdout

    def test_implementations(self):
        done = self.run("-c", COMMAND, "implementations")
        assert done.returncode == 0, done.stderr
        assert "?" not in done.stdout

    @pytest.mark.parametrize("stdout", [None, io.StringIO()])
    def test_blocks_where_stdout_has_no_encoding(self, monkeypatch, stdout):
        mask = ct.spatial_mask(ct.TokenGrid(3, 4, 5), width=9)
        plan = ct.plan_tiles(mask, block_q=12, block_kv=8)
        monkeypatch.setattr(sys, "stdout", stdout)
        assert "█ full" in str(plan)


class TestNumbers:
    def test_headings_take_lines_before_anything_is_left_out(self):
        text = rendered(table(["12,345", "67"], expendable=("kind 1",)), 24)
        assert "kind 0" not in text
        assert "kind" in text
        assert "12,345" in text
        assert "67" in text

    def test_expendable_columns_go_first(self):
        text = rendered(table(["1,234,567", "8,901,234", "5"], expendable=("kind 1",)), 28)
        assert "1,234,567" in text
        assert "8,901,234" not in text

    def test_a_row_becomes_a_list_at_last(self):
        lines = rendered(table(["1,234,567", "8,901,234"]), 20).splitlines()
        assert lines[0].strip() == "dense"
        assert [line.split() for line in lines[1:3]] == [
            ["kind", "0", "1,234,567"],
            ["kind", "1", "8,901,234"],
        ]

    @given(
        st.lists(st.integers(0, 10**12).map("{:,}".format), min_size=1, max_size=9),
        st.integers(24, 120),
    )
    def test_no_number_is_split(self, cells, width):
        text = rendered(table(cells), width)
        assert all(len(line) <= width for line in text.splitlines())
        assert all(re.search(rf"(?<![\d,]){cell}(?![\d,])", text) for cell in cells)

    def test_a_row_needs_a_cell_for_each_column(self):
        with pytest.raises(ValueError, match="2 cells, got 3"):
            Numbers("", "a").add_row("1", "2", "3")


class TestNarrowTerminals:
    @pytest.mark.parametrize("width", [40, 60, 80])
    @pytest.mark.parametrize("arguments", [SMALL_PLAN, TINY_LADDER, ("implementations",)])
    def test_same_numbers_at_any_width(self, arguments, width):
        text = CliRunner().invoke(main, arguments, env={"COLUMNS": str(width)}).stdout
        assert all(len(line) <= width for line in text.splitlines())
        assert "…" not in text

    @pytest.mark.parametrize("width", [40, 60, 80])
    def test_plan_keeps_its_counts_whole(self, width):
        text = CliRunner().invoke(main, SMALL_PLAN, env={"COLUMNS": str(width)}).stdout
        plans = json.loads(CliRunner().invoke(main, (*SMALL_PLAN, "--json", "-")).stdout)["plans"]
        for plan in plans:
            for name in ("tiles_visited", "tiles_total", "tiles_masked", "pairs_added"):
                assert f"{plan[name]:,}" in text


class TestInterruptAtOnce:
    @pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
    @pytest.mark.parametrize("delay_s", [0.05, 0.2, 0.5, 1.0])
    def test_it_ends_with_a_line(self, delay_s):
        program = f"print('started', flush=True); {COMMAND}"
        rounds = ("--repeats", "1000000")
        process = subprocess.Popen(
            heeding_interrupts(sys.executable, "-c", program, *TINY_LADDER, *rounds),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            time.sleep(delay_s)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 130
        assert "Traceback" not in stderr
        assert stderr.splitlines()[-1] == "Interrupted."
