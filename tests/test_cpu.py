"""The native CPU kernel, along every path that this machine can run."""

from typing import ClassVar

import pytest
from kernel_suite import KernelSuite

from cinetile.kernels import registry
from cinetile.kernels.cpu import CpuImplementation
from cinetile.kernels.cpu.library import load_library

LIBRARY = load_library()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))


class PathSuite(KernelSuite):
    implementation = "cpu"
    path: ClassVar[str]

    @pytest.fixture(autouse=True)
    def forced_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lets `ct.attention` find this path alone; skips where the machine lacks it."""
        forced = CpuImplementation(self.path)
        reason = forced.unavailable()
        if reason is not None:
            pytest.skip(reason)
        monkeypatch.setattr(registry, "_IMPLEMENTATIONS", (forced,))


class TestAmx(PathSuite):
    path = "amx"


class TestAmxEmulated(PathSuite):
    path = "amx_emulated"


class TestAvx512Bf16(PathSuite):
    path = "avx512_bf16"


class TestAvx512(PathSuite):
    path = "avx512"


class TestAvx2(PathSuite):
    path = "avx2"


class TestPortable(PathSuite):
    path = "portable"
