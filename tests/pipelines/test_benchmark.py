"""The benchmark of a block runs: on a few tokens, which says nothing about its times."""

import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import torch

from benchmarks import diffusers_block


@pytest.mark.filterwarnings("ignore:density .* is lost:UserWarning")
def test_all_sizes_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    monkeypatch.setattr(diffusers_block, "SIZES", {"480p": (9, 64, 64), "720p": (9, 64, 96)})
    monkeypatch.setattr(sys, "argv", ["benchmark", "--threads", "1", "--json", str(report)])
    before, state = torch.get_num_threads(), torch.get_rng_state()
    diffusers_block.main()
    torch.set_num_threads(before)
    torch.set_rng_state(state)
    header, _, *rows, _, footer = capsys.readouterr().out.splitlines()
    assert "SDPA / sparse" in header
    assert "gain of the block" in header
    assert [row.split(" | ")[:2] for row in rows] == [["| 480p", "48"], ["| 720p", "72"]]
    assert re.match(r"cpu \(.*\), 1 threads, torch \d", footer)
    for row in json.loads(report.read_text())["rows"]:
        assert row["call_speedup"] == pytest.approx(row["sdpa_s"] / row["sparse_s"])
        assert row["block_speedup"] == pytest.approx(row["block_s"] / row["sparse_block_s"])
