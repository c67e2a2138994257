"""Ahead-of-time compilation for TPUs and static time estimates; no TPU is needed."""

from cinetile.lab.tpu.aot import (
    TpuCompileError,
    VmemOverflowError,
    compile_kernel,
    require_tpu_compiler,
)
from cinetile.lab.tpu.bundles import DumpFormatError
from cinetile.lab.tpu.report import RIVALS, StaticConfig, StaticReport, StaticRow, static_report
from cinetile.lab.tpu.targets import TARGETS

__all__ = [
    "RIVALS",
    "TARGETS",
    "DumpFormatError",
    "StaticConfig",
    "StaticReport",
    "StaticRow",
    "TpuCompileError",
    "VmemOverflowError",
    "compile_kernel",
    "require_tpu_compiler",
    "static_report",
]
