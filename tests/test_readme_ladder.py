"""The README's ladder: its table is that of the saved result, measured with today's settings."""

import json
from typing import Any

import pytest

from benchmarks.readme_ladder import README, RESULT, ROOT, table, with_table
from cinetile.kernels.cpu.blocks import tuned_blocks


@pytest.fixture(name="result")
def read_result() -> dict[str, Any]:
    return json.loads(RESULT.read_text())


def test_table_is_of_the_saved_result(result: dict[str, Any]) -> None:
    assert with_table(README.read_text(), result) == README.read_text()


def test_a_changed_figure_changes_the_table(result: dict[str, Any]) -> None:
    before = table(result)
    result["rows"][0]["ms_median"] += 1000
    assert table(result) != before


def test_tiles_are_the_defaults_of_today(result: dict[str, Any]) -> None:
    workload = result["workload"]
    path = result["rows"][0]["path"]
    blocks = tuned_blocks(path, workload["dtype"], workload["num_tokens"])
    assert (workload["block_q"], workload["block_kv"]) == blocks


def test_settings_are_those_of_make_demo(result: dict[str, Any]) -> None:
    options = "--video 81x720x1280 --clip sample --heads 1 --repeats 3"
    assert f"cinetile ladder {options} " in (ROOT / "Makefile").read_text()
    workload = result["workload"]
    assert workload["grid"] == [21, 45, 80]
    assert (workload["heads"], result["repeats"]) == (1, 3)
    assert "clip" in result["input"]


def test_no_ratio_without_support(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        assert (row["speedup_vs_dense"] is None) == (row["no_speedup_reason"] is not None)
