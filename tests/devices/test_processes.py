"""Several processes on this machine, joined over loopback."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from worker import GRID, POLICY, attend

import cinetile as ct
from cinetile.parallel.launch import main

WORKER = str(Path(__file__).with_name("worker.py"))
LAUNCH = "cinetile.parallel.launch"
CALLS = 3


def launched(processes: int, *arguments: object) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.Popen(
        [sys.executable, "-m", LAUNCH, "--processes", str(processes), WORKER, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | {"JAX_PLATFORMS": "cpu"},
    )


@pytest.mark.parametrize("processes", [2, 4])
def test_as_in_one_process(processes: int, tmp_path: Path) -> None:
    out = tmp_path / "out.npy"
    process = launched(processes, out, CALLS)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    expected = attend(ct.SparseAttention(GRID, POLICY), CALLS)
    np.testing.assert_allclose(np.load(out), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
@pytest.mark.parametrize("victim", [0, 3], ids=["first", "last"])
def test_the_end_of_one_is_the_end_of_all(victim: int, tmp_path: Path) -> None:
    killed: float | None = None
    lines = []
    with launched(4, tmp_path / "out.npy", 10**6) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            call = re.search(rf"call 2 of process {victim}, pid (\d+)", line)
            if call:
                os.kill(int(call[1]), signal.SIGKILL)
                killed = time.monotonic()
    assert killed is not None, lines
    assert time.monotonic() - killed < 60
    assert process.returncode == 1
    output = "".join(lines)
    assert f"launch: process {victim} of 4 ended with signal 9" in output
    assert "ending the processes that are left" not in output
    for other in set(range(4)) - {victim}:
        assert f"launch: process {other} of 4 ended with" in output
    # Each of the others says so itself, unless jax was quicker to end it.
    assert re.search(r"process \d of 4 stops, as do the others: |another task died", output)
    assert not list(tmp_path.iterdir())


def test_an_error_of_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A script that fails by itself, in one process."""
    script = tmp_path / "fails.py"
    script.write_text(
        "from cinetile.parallel import joined_processes\n"
        "with joined_processes():\n"
        "    raise ValueError('no such thing')\n"
    )
    assert main(["--processes", "1", str(script)]) == 1
    told = capfd.readouterr().err
    assert "process 0 of 1 stops, as do the others: no such thing" in told
    assert "launch: process 0 of 1 ended with exit code 1" in told


def test_bad_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--processes", "0", "script.py"])
    assert "--processes must be at least 1, got 0" in capsys.readouterr().err
