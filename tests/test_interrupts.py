"""SIGINT during native calls, each scenario in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
from interrupt_scenarios import SCENARIOS

from cinetile.kernels.cpu.native import load_library

LIBRARY = load_library()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))

SCRIPT = Path(__file__).with_name("interrupt_scenarios.py")
FAR_LESS_THAN_THE_CALLS_SECONDS = 120


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_interrupts(scenario: str) -> None:
    ended = subprocess.run(
        [sys.executable, SCRIPT, scenario],
        capture_output=True,
        text=True,
        timeout=FAR_LESS_THAN_THE_CALLS_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
