"""Files that nobody vouches for: each fault is an error that names the file, at once."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cinetile as ct
from cinetile.files import shard_path
from cinetile.lab.inputs import load_qkv, random_inputs

NAMES = ("query", "key", "value")
POLICIES: dict[str, str | bytes] = {
    "deep.json": "[" * 50_000,
    "integer.json": '{"num_samples": ' + "9" * 50_000 + "}",
    "nan.json": '{"density": NaN}',
    "twice.json": '{"density": 0.5, "density": 0.4}',
    "bytes.json": b"\xff\xfe",
    "text-for-number.json": '{"density": "0.4"}',
    "boolean-for-number.json": '{"sink_frames": true}',
    "endless-interval.json": '{"dense_steps": [[0, 2000000000]]}',
    "inverted-interval.json": '{"dense_steps": [[5, 2]]}',
    "list.json": "[]",
    "alias.yaml": "a: &x [1]\nb: *x\n",
    "deep.yaml": "[" * 20_000,
    "sexagesimal.yaml": "num_samples: " + "1:" * 30_000 + "1",
    "twice.yaml": "density: 0.4\ndensity: 0.5\n",
    "date.yaml": "density: 2001-01-01\n",
}


@pytest.mark.parametrize("name", POLICIES)
def test_policies(name: str, tmp_path: Path) -> None:
    content = POLICIES[name]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=name) as raised:
        ct.SparsityPolicy.from_file(path)
    assert len(str(raised.value)) < 1000


def test_a_plan_that_asks_for_a_billion_tokens(tmp_path: Path) -> None:
    plan = ct.plan_tiles(ct.spatial_mask(ct.TokenGrid(3, 4, 5), width=9), 12, 8)
    path = tmp_path / "plan.json"
    plan.save(path)
    content: dict[str, Any] = json.loads(path.read_text())
    content["mask"]["grid"].update(frames=100_000, height=1000, width=10)
    content["mask"]["segments"][0].update(stop=10**9)
    content["settings"].update(block_q=1 << 30, block_kv=1, mode="dense")
    content["tables"]["row_starts"] = [0, 1]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"plan\.json"):
        ct.TilePlan.load(path)


def npz(path: Path, shape: tuple[int, ...], data: bytes, method: int) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name in NAMES:
            header = io.BytesIO()
            description = {"shape": shape, "fortran_order": False, "descr": "<f4"}
            np.lib.format.write_array_header_1_0(header, description)
            archive.writestr(f"{name}.npy", header.getvalue() + data)
    return path


class TestArrays:
    @pytest.mark.parametrize(
        ("shape", "size", "method"),
        [
            ((1 << 40, 1, 4), 0, zipfile.ZIP_DEFLATED),
            ((1, 250_000, 1, 10), 10_000_000, zipfile.ZIP_DEFLATED),
            ((6, 2, 4), 192, zipfile.ZIP_LZMA),
        ],
        ids=["absurd-header", "bomb", "lzma"],
    )
    def test_npz(self, shape: tuple[int, ...], size: int, method: int, tmp_path: Path) -> None:
        path = npz(tmp_path / "layer.npz", shape, bytes(size), method)
        with pytest.raises(ValueError, match=r"layer\.npz"):
            load_qkv(path, 60)

    @pytest.mark.parametrize(
        ("dtype", "shape"), [("F8_E4M3", [6, 2, 4]), ("F32", [1] * 20_000)], ids=["fp8", "axes"]
    )
    def test_safetensors(self, dtype: str, shape: list[int], tmp_path: Path) -> None:
        entries = {
            name: {"dtype": dtype, "shape": shape, "data_offsets": [48 * i, 48 * i + 48]}
            for i, name in enumerate(NAMES)
        }
        header = json.dumps(entries).encode()
        path = tmp_path / "layer.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(144))
        with pytest.raises(ValueError, match=r"layer\.safetensors"):
            load_qkv(path)

    @pytest.mark.parametrize("name", ["../x", "/etc/passwd", "..", ["x"], "a\\b"], ids=str)
    def test_shards_stay_in_their_folder(self, name: Any, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="the name of a file in the same folder"):
            shard_path(tmp_path, name)


@pytest.mark.usefixtures("unchecked")
class TestSizes:
    def test_grids(self) -> None:
        with pytest.raises(ValueError, match="tokens"):
            ct.TokenGrid(10**6, 10**6, 10**6)
        with pytest.raises(ValueError, match="frames"):
            ct.TokenGrid(10**6000, 1, 1)

    def test_random_inputs(self) -> None:
        with pytest.raises(ValueError, match=r"GiB|TiB|bytes|memory"):
            random_inputs(10**9, 40, 128)

    def test_runs(self) -> None:
        grid = ct.TokenGrid(3, 4, 5)
        with pytest.raises(ValueError, match="steps"):
            ct.expected_work(ct.SparsityPolicy(), grid, num_steps=10**6, num_layers=10**5)
