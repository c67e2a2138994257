"""Measuring: workloads, interleaved timing, errors against the reference, and the ladder."""

from cinetile.lab.bench.ladder import (
    LadderConfig,
    LadderResult,
    LadderRow,
    measure_ladder,
    run_ladder,
)
from cinetile.lab.bench.machine import Machine, describe_machine
from cinetile.lab.bench.mask_errors import MaskErrors
from cinetile.lab.bench.overheads import OverheadRow
from cinetile.lab.bench.rivals import RIVALS, RivalRow
from cinetile.lab.bench.sources import InputSource, load_inputs
from cinetile.lab.bench.timing import Progress, Timing, time_interleaved
from cinetile.lab.bench.tune import TuneConfig, TuneResult, TuneRow, tune_blocks
from cinetile.lab.bench.workload import DTYPES, Workload

__all__ = [
    "DTYPES",
    "RIVALS",
    "InputSource",
    "LadderConfig",
    "LadderResult",
    "LadderRow",
    "Machine",
    "MaskErrors",
    "OverheadRow",
    "Progress",
    "RivalRow",
    "Timing",
    "TuneConfig",
    "TuneResult",
    "TuneRow",
    "Workload",
    "describe_machine",
    "load_inputs",
    "measure_ladder",
    "run_ladder",
    "time_interleaved",
    "tune_blocks",
]
