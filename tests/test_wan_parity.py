"""Parity with diffusers by golden files; `golden/make_wan.py` made them."""

from pathlib import Path

import pytest
from wan_suite import WanParity


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(__file__).parent / "golden" / "wan"


class TestGolden(WanParity):
    pass
