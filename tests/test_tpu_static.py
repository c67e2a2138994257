"""Static analysis for TPUs, as far as it goes without the TPU compiler."""

import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import cinetile as ct
from cinetile import cli
from cinetile.kernels.pallas_tpu.config import KINDS, KernelConfig
from cinetile.lab.bench import Workload
from cinetile.lab.tpu import aot, bundles, report
from cinetile.lab.tpu.aot import CompiledKernel, KernelJob
from cinetile.lab.tpu.bundles import Body, DumpFormatError, KernelDump
from cinetile.lab.tpu.estimate import count_bodies, estimate, floor_ms
from cinetile.lab.tpu.targets import TARGETS

GRID_720P = ct.TokenGrid(21, 45, 80)
CONFIG = KernelConfig.for_blocks(1024, 512)
SLOT_NAMES = "MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU"


def bundle_line(index: int, text: str = "", depth: int = 1) -> str:
    address = "0" if index == 0 else hex(index)
    return f"   {address:>6}   : {'> ' * depth}{{ {text} }}\n"


def dump_text(
    config: KernelConfig = CONFIG, spoil: Callable[[list[str]], None] | None = None
) -> str:
    """A dump as the compiler writes it: each body a region, 12 bundles more than its products."""
    texts = ["%s0 = smov 0 /* Start region 9999 */"] + [""] * 60
    for number, (_, chunks) in enumerate(bundles.expected_bodies(config)):
        pairs = chunks * config.q_chunk * config.kv_span
        texts.append(f"/* Start region {number} */")
        texts += ["%v1 = vmatmul.bf16 %v0"] * (8 * chunks)
        texts += ["%v2 = vpow2.f32 %v1 ;; %v3 = vpow2.f32 %v1"] * (pairs // 2048)
        texts.append(f"nop /* End region {number} */")
    texts += ["/* Start region 500 */", *["nop"] * 48, "/* End region 500 */"]
    texts.append("nop /* End region 9999 */")
    if spoil is not None:
        spoil(texts)
    return "".join(bundle_line(index, text) for index, text in enumerate(texts))


def write_dump(folder: Path, text: str) -> None:
    stem = "123-cinetile_attention.1"
    (folder / f"{stem}-03-final_bundles.txt").write_text(text)
    (folder / f"{stem}-02-schedule-analysis_final_bundles.txt").write_text("not read")
    (folder / f"{stem}-00-pre-finalize-registers-and-allocations.txt").write_text(
        "#allocation1 [shape = 'f32[8,128]', space=vmem, size = 0x1000, scoped, tag = 'x']\n"
        "#allocation2 [shape = 'u8[512]', space=smem, size = 0x200, scoped, tag = 'y']\n"
        "#allocation3 [shape = 's32[1]', space=smem, size = 0x4, offset = 0, fixed_abs]\n"
    )
    rows = text.count(": >")
    (folder / f"{stem}-01-final_hlo-static-per-bundle-utilization.txt").write_text(
        f"== CAPACITY:\n{SLOT_NAMES}\n 2 2 4 2 1 3 3 2 2 2\n== UTILIZATION:\n"
        + "1 0 1 0 0 0 0 0 0 2\n" * rows
    )


class TestDump:
    def read(self, folder: Path, **options: Any) -> KernelDump:
        write_dump(folder, dump_text(**options))
        return bundles.read_dump(folder, "cinetile_attention", CONFIG)

    def test_reads_bodies_memory_and_slots(self, tmp_path: Path) -> None:
        dump = self.read(tmp_path)
        assert [(body.kind, body.chunks) for body in dump.bodies] == bundles.expected_bodies(CONFIG)
        first = dump.bodies[0]
        pairs = first.chunks * 256 * CONFIG.kv_span
        assert first.bundles == 8 * first.chunks + pairs // 2048 + 2
        assert first.mega_pairs == pairs / 2**20
        assert (dump.vmem_bytes, dump.smem_bytes) == (0x1000, 0x200)
        assert dump.utilisation["matrix"] == 0.5
        assert dump.utilisation["vector"] == 0.25
        assert dump.row_bundles == 50

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda texts: texts.__delitem__(slice(70, None)), "bodies|found"),
            (lambda texts: texts.append("%v1 = vmatmul.bf16 %v0"), "outside"),
            (lambda texts: texts.insert(63, "%v1 = vmatmul.bf16 %v0 " * 9), "differ in products"),
            (
                lambda texts: texts.__setitem__(
                    slice(None), [text.replace("vpow2", "vexp") for text in texts]
                ),
                "exponentials",
            ),
            (
                lambda texts: texts.__setitem__(
                    slice(None), [text.replace("region", "area") for text in texts]
                ),
                "no regions",
            ),
            (lambda texts: texts.clear(), "only 0 bundles"),
        ],
    )
    def test_refuses_what_it_does_not_understand(
        self, spoil: Any, message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(DumpFormatError, match=message):
            self.read(tmp_path, spoil=spoil)

    def test_refuses_a_gap_in_the_bundles(self) -> None:
        lines = dump_text().splitlines(keepends=True)
        with pytest.raises(DumpFormatError, match="was expected"):
            bundles.parse_bundles("".join(lines[:10] + lines[11:]))

    def test_refuses_missing_files(self, tmp_path: Path) -> None:
        with pytest.raises(DumpFormatError, match="0 files"):
            bundles.read_dump(tmp_path, "cinetile_attention", CONFIG)

    def test_refuses_other_tables_of_slots(self) -> None:
        with pytest.raises(DumpFormatError, match="no columns"):
            bundles.parse_utilisation("MXU, XLU\n1 2\n", 1)
        with pytest.raises(DumpFormatError, match="rows of slot use"):
            bundles.parse_utilisation(f"{SLOT_NAMES}\n2 2 4 2 1 3 3 2 2 2\n", 1)

    def test_refuses_a_dump_without_allocations(self) -> None:
        with pytest.raises(DumpFormatError, match="allocations"):
            bundles.parse_allocations("space=vmem, size = 0x10, scoped")


def made_up_dump(config: KernelConfig) -> KernelDump:
    """Full bodies at 1,600 bundles for 2^20 pairs, others at 2,000."""
    bodies = []
    for kind, chunks in bundles.expected_bodies(config):
        mega_pairs = chunks * config.q_chunk * config.kv_span / 2**20
        rate = 1600 if kind in ("full", "full tile") else 2000
        bodies.append(Body(kind, chunks, round(rate * mega_pairs), mega_pairs))
    shares = {"matrix": 0.5, "vector": 0.5}
    return KernelDump(tuple(bodies), 9999, 100, 1000, 10 << 20, 4096, shares)


class TestEstimate:
    @pytest.mark.parametrize("mode", ["dense", "naive", "split", "aligned"])
    @pytest.mark.parametrize("blocks", [(4608, 3072), (3328, 1536), (1024, 512)])
    def test_every_pair_is_in_some_body(self, mode: Any, blocks: tuple[int, int]) -> None:
        plan = ct.plan_tiles(ct.spatial_mask(GRID_720P, 0.35), *blocks, mode)
        config = KernelConfig.for_blocks(*blocks)
        counts = count_bodies(plan, config)
        pairs = sum(
            number * chunks * config.q_chunk * config.kv_span
            for (kind, chunks), number in counts.items()
            if kind != "empty"
        )
        tiles = plan.stats.tiles_visited * blocks[0] * blocks[1]
        assert plan.stats.kept_pairs <= pairs <= tiles
        if mode == "naive":
            assert {kind for (kind, _), number in counts.items() if number} == {"general"}

    def test_dense_attention_by_hand(self) -> None:
        plan = ct.plan_tiles(ct.dense_mask(ct.TokenGrid(1, 64, 128)), 1024, 512)
        target = TARGETS["v6e"]
        found = estimate(made_up_dump(CONFIG), plan, CONFIG, target, 10, 128, 2)
        tiles = 8 * 16
        assert found.bodies["full tile"] == tiles
        compute = 10 * (tiles * 800 + 8 * 1000) / 1.75e6
        np.testing.assert_allclose(found.compute_ms, compute)
        np.testing.assert_allclose(found.steps_ms, 10 * tiles * 0.66e-3)
        np.testing.assert_allclose(found.static_ms, found.compute_ms + found.steps_ms)

    def test_floor_is_that_of_the_notes(self) -> None:
        """1,536 bundles for 2^20 pairs at head size 128, 47.9 ms at 75,600 tokens and 10 heads."""
        found = floor_ms(75_600**2, TARGETS["v6e"], 10, 128, "bfloat16")
        np.testing.assert_allclose(found, 75_600**2 / 2**20 * 1536 * 10 / 1.75e6)
        assert round(found, 1) == 47.8


def fake_compile(job: KernelJob) -> CompiledKernel:
    return CompiledKernel(made_up_dump(job.config), 1.0, 1.0)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "require_tpu_compiler", lambda: None)


@pytest.mark.usefixtures("compiler")
class TestReport:
    CONFIG = report.StaticConfig(Workload(GRID_720P, density=0.35, heads=10))

    def test_has_the_documented_fields(self) -> None:
        document = report.static_report(self.CONFIG, compile_one=fake_compile).to_dict()
        assert {"target", "workload", "rows", "calibration"} <= document.keys()
        assert len(document["rows"]) == 8
        assert {
            "mode",
            "pattern",
            "static_ms",
            "error_band",
            "bundles_per_mpair",
            "floor_ms",
            "vmem_bytes",
            "smem_bytes",
            "compile_s",
        } <= document["rows"][0].keys()
        assert {"full", "one_edge"} <= document["rows"][0]["bundles_per_mpair"].keys()
        json.dumps(document, allow_nan=False)

    def test_two_kernels_cost_a_merge_and_more_steps(self) -> None:
        first = report.static_report(self.CONFIG, compile_one=fake_compile)
        config = report.StaticConfig(self.CONFIG.workload, two_kernels=True)
        two = report.static_report(config, compile_one=fake_compile)
        for row, other in zip(first.rows, two.rows, strict=True):
            assert other.static_ms > row.static_ms
            assert set(other.bundles_per_mpair) == set(row.bundles_per_mpair)

    @pytest.mark.parametrize(
        "fields",
        [
            {"target": "v1"},
            {"modes": ("sparse",)},
            {"softmaxes": ("soft",)},
            {"rivals": ("torch",)},
            {"workload": Workload(GRID_720P, density=0.35, head_dim=96)},
        ],
    )
    def test_refuses_bad_settings(self, fields: Any, unchecked: None) -> None:
        del unchecked
        with pytest.raises(ValueError, match="must be one of"):
            report.StaticConfig(**({"workload": self.CONFIG.workload} | fields))


class TestCommand:
    def run(self, *arguments: str) -> Any:
        return CliRunner().invoke(cli.main, ["tpu", *arguments])

    def test_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
        result = self.run("--grid", "21x20x20")
        assert result.exit_code == 1
        assert '".[tpu-aot]"' in result.output

    def test_bad_arguments(self) -> None:
        assert self.run("--target", "v1").exit_code == 2
        assert self.run("--implementation", "xla").exit_code == 2
        assert self.run("--head-dim", "96").exit_code == 2

    @pytest.mark.usefixtures("compiler")
    def test_table_and_json(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        static_report = functools.partial(report.static_report, compile_one=fake_compile)
        monkeypatch.setattr("cinetile.cli.tpu.static_report", static_report)
        result = self.run("--json", str(tmp_path / "tpu.json"))
        assert result.exit_code == 0, result.output
        assert "Today's dense attention" in result.output
        assert "static estimate" in result.output
        document = json.loads((tmp_path / "tpu.json").read_text())
        assert document["target"] == "v6e"


def test_a_compiler_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "require_tpu_compiler", lambda: None)
    monkeypatch.setattr(aot.sys, "executable", "/bin/false")
    plan = ct.plan_tiles(ct.dense_mask(ct.TokenGrid(1, 64, 128)), 1024, 512)
    with pytest.raises(aot.TpuCompileError, match="ended with 1"):
        aot.compile_kernel(KernelJob("v6e", CONFIG, plan, 1, 128, "bfloat16"))


def test_kinds_have_names_in_reports() -> None:
    assert set(KINDS) | {"full tile"} == set(report._EDGE_NAMES)
