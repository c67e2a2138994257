"""The native kernel's paths for Arm, under emulation: every test that the other paths pass."""

import pytest
from emulated_arm import EmulatedLibrary, emulated_library
from kernel_cases import MEDIUM_CASES, KernelCase
from test_cpu import PathSuite

from cinetile.kernels.cpu import CpuImplementation, implementation

LIBRARY = emulated_library()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))


class ArmSuite(PathSuite):
    @pytest.fixture(autouse=True)
    def path_exists(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lets this path's implementation find the emulated library."""
        assert isinstance(LIBRARY, EmulatedLibrary)
        monkeypatch.setattr(implementation, "load_library", LIBRARY.as_native)
        monkeypatch.setattr(implementation, "_call", LIBRARY.call)
        assert CpuImplementation(self.path).unavailable() is None

    @pytest.mark.parametrize("case", MEDIUM_CASES[1:2], ids=str)
    def test_sampled_rows_of_many_tiles(self, case: KernelCase) -> None:
        """Emulation is slow, so only the bfloat16 one of them runs."""
        super().test_sampled_rows_of_many_tiles(case)


class TestNeonBf16(ArmSuite):
    path = "neon_bf16"


class TestNeon(ArmSuite):
    path = "neon"


def test_paths_of_a_processor_that_has_them_all() -> None:
    assert isinstance(LIBRARY, EmulatedLibrary)
    assert LIBRARY.paths == ("neon_bf16", "neon", "portable")
