"""Parity with the diffusers that is installed, at other sizes and with other weights."""

from pathlib import Path

import pytest
from wan_suite import WanParity

make_wan = pytest.importorskip("golden.make_wan", reason="needs the extra `parity`")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity") / "wan"
    sizes = make_wan.Sizes(heads=3, head_dim=14, layers=3, ffn_dim=56, z_dim=5, text_dim=20)
    make_wan.make(folder, seed=1, sizes=sizes)
    return folder


class TestLive(WanParity):
    pass
