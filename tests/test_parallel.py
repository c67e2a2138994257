"""What devices exchange, from shapes alone; tests/devices runs it."""

from typing import Any

import numpy as np
import pytest
from kernel_cases import MaskBuilder, spatial, temporal, upstream

import cinetile as ct
from cinetile.masks.mask import keeps
from cinetile.parallel import (
    Collective,
    collectives,
    exchange_report,
    launch,
    make_mesh,
    request_cpu_devices,
)
from cinetile.parallel.halo_geometry import HaloGeometry, halo_geometry
from cinetile.parallel.moves import reorder_tables

GRID = ct.TokenGrid(6, 3, 7)
STANDARD = {
    "480p": ct.TokenGrid(21, 30, 52),
    "720p": ct.TokenGrid(21, 45, 80),
    "1080p": ct.TokenGrid(21, 67, 120),
    "1440p": ct.TokenGrid(21, 90, 160),
}
BANDS = {
    "spatial": spatial(9),
    "spatial, wide": spatial(70, sink_frames=2),
    "spatial, no sink": spatial(5, sink_frames=0),
    "temporal": temporal(9),
    "temporal, wide": temporal(70, sink_frames=2),
    "temporal, no sink": temporal(5, sink_frames=0),
    "upstream": upstream(pattern="temporal", width=9),
}


def kept(mask: ct.Mask) -> np.ndarray:
    prefix, low, high = (edge[:, None] for edge in mask.row_edges())
    return keeps(np.arange(mask.num_tokens), prefix, low, high)


def as_seen_by_devices(geometry: HaloGeometry) -> np.ndarray:
    """The pairs that all devices together keep, in the orders of the mask; counts each pair."""
    mask, tokens = geometry.mask, geometry.mask.num_tokens
    key_position = np.empty(tokens, int)
    key_position[mask.key_order.indices(mask.grid)] = np.arange(tokens)
    of_place = key_position[mask.query_order.indices(mask.grid)]
    counts = np.zeros((tokens, tokens), int)
    for device in range(geometry.devices):
        first, stop = geometry.bounds[device : device + 2]
        local = kept(geometry.local_mask(device))[: stop - first]
        counts[first:stop, : geometry.sink] += local[:, : geometry.sink]
        places = geometry.window_start(device) + np.arange(geometry.window)
        places = places[places % geometry.period >= geometry.skipped]
        exists = (places >= 0) & (places < tokens)
        window = local[:, geometry.sink : geometry.sink + geometry.window_keys]
        assert not window[:, ~exists].any()
        counts[first:stop, of_place[places[exists]]] += window[:, exists]
    return counts


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("devices", [1, 3, 4])
@pytest.mark.parametrize("build", BANDS.values(), ids=BANDS)
def test_windows_hold_every_pair_once(build: MaskBuilder, devices: int, balanced: bool) -> None:
    geometry = halo_geometry(build(GRID), devices, balanced=balanced)
    np.testing.assert_array_equal(as_seen_by_devices(geometry), kept(geometry.mask))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (ct.dense_mask(GRID), "must have a band, got the dense mask; exchange heads"),
        (ct.spatial_mask(ct.TokenGrid(6, 3, 7, 5), width=3), "must have no text"),
        (ct.temporal_mask(GRID, width=3, sink_frames=6), "must have a band"),
    ],
    ids=str,
)
def test_masks_without_a_halo(mask: ct.Mask, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        halo_geometry(mask, 2)


def test_too_many_devices() -> None:
    with pytest.raises(ValueError, match="devices must be at most 126"):
        halo_geometry(ct.spatial_mask(GRID, width=3), 127)
    with pytest.raises(ValueError, match="devices must be at most 21 for shards of 6"):
        halo_geometry(ct.temporal_mask(GRID, width=3), 25, balanced=False)


@pytest.mark.parametrize("build", [ct.spatial_mask, ct.temporal_mask])
@pytest.mark.parametrize("video", STANDARD)
def test_even_work_on_standard_shapes(video: str, build: Any) -> None:
    """Under 3 % for the 12 heads of a guidance pair, and for queries that move."""
    mask = build(STANDARD[video], 0.35)
    for devices in (2, 8):
        schemes = exchange_report(mask, devices=devices, heads=12, head_dim=128, batch=2)
        ring, heads, halo, stay = schemes
        assert heads.imbalance == 0
        assert halo.imbalance < 0.001
        assert sum(halo.pairs) == sum(heads.pairs)
        if devices == 8:
            assert stay.imbalance > 0.05
            assert 4 * heads.sent_bytes < 1.001 * ring.sent_bytes


def test_bytes_by_hand() -> None:
    """Four devices with 18,900 tokens of 10 heads of 128 in bfloat16 each."""
    mask = ct.spatial_mask(STANDARD["720p"], 0.35)
    ring, heads, _, halo = exchange_report(mask, devices=4, heads=10, head_dim=128)
    token = 10 * 128 * 2
    assert ring.sent_bytes == 3 * 2 * 18_900 * token
    # Three of ten heads a device, two of which are padding on the last one.
    assert heads.all_to_all == 3 * 4 * 18_900 * 3 * 128 * 2
    assert heads.imbalance == pytest.approx(3 / 2.5 - 1)
    assert mask.width == 14_720
    assert halo.permute == 2 * 2 * 14_720 * token
    assert halo.all_reduce == 2 * 3 * 2 * 3_600 * token // 4
    assert halo.imbalance == pytest.approx(0.124, abs=0.001)


def test_masks_that_cannot_be_cut_have_no_halo() -> None:
    schemes = exchange_report(ct.dense_mask(GRID), devices=2, heads=2, head_dim=8)
    assert [scheme.name for scheme in schemes] == ["ring", "heads"]
    with pytest.raises(ValueError, match="devices must be at least 2"):
        exchange_report(ct.dense_mask(GRID), devices=1, heads=2, head_dim=8)


def test_reordering_reaches_every_place() -> None:
    order = ct.TokenOrder("token_major").indices(GRID)
    send, receive = reorder_tables(np.argsort(order), 32, 36, 4)
    shards = np.append(np.arange(GRID.num_tokens), [-1] * 2).reshape(4, 32)
    found = np.full(4 * 36, -1)
    for source, target in np.ndindex(4, 4):
        used = send[source, target] < 32
        np.testing.assert_array_equal(used, receive[target, source] < 36)
        found[36 * target + receive[target, source][used]] = shards[source][
            send[source, target][used]
        ]
    np.testing.assert_array_equal(found[: GRID.num_tokens], order)
    assert send.shape[-1] <= 12  # 8 would be even


HLO = """
  %a = (f32[1,16]{1,0}, f32[1,16]{1,0}) all-to-all(%x, %y), replica_groups={{0,1},{2,3}}
  %b = bf16[64,3]{1,0} collective-permute(%c), source_target_pairs={{0,1},{1,2}}, metadata={}
  %c = f32[8]{0} collective-permute(%c), source_target_pairs={{0,0},{1,1}}
  %d = f32[64]{0} all-reduce(%b), replica_groups=[2,4]<=[8], to_apply=%add
  %e = pred[16]{0} all-gather(%d), replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}
  %f = (f32[4]{0}, f32[16]{0}) all-gather-start(%e), replica_groups={{0,1,2,3}}, dimensions={0}
  %g = f32[16]{0} all-gather-done(%f)
  %h = (f32[8], f32[8], u32[], u32[]) collective-permute-start(%c), source_target_pairs={{0,1}}
  %i = f32[16]{0} reduce-scatter(%d), replica_groups={{0,1}}, to_apply=%add
  %j = f32[16]{0} all-reduce(%d), replica_groups={{0},{1}}, to_apply=%add
"""


def test_collectives_of_a_program() -> None:
    assert collectives(HLO) == (
        Collective("all-to-all", 2, 128, 64),
        Collective("collective-permute", 2, 384, 384),
        Collective("all-reduce", 4, 256, 384),
        Collective("all-gather", 4, 16, 12),
        Collective("all-gather", 4, 64, 48),
        Collective("collective-permute", 2, 32, 32),
        Collective("reduce-scatter", 2, 64, 64),
    )
    with pytest.raises(ValueError, match="must say which devices"):
        collectives("%a = f32[8]{0} all-reduce(%b), to_apply=%add")


class TestDevices:
    @pytest.mark.usefixtures("unchecked")
    def test_axes_must_be_a_mapping(self) -> None:
        axes: Any = [("data", 2)]
        with pytest.raises(TypeError, match="axes must be a mapping of names to sizes, got list"):
            make_mesh(axes)

    def test_at_least_one_device(self) -> None:
        with pytest.raises(ValueError, match="count must be at least 1, got 0"):
            request_cpu_devices(0)

    def test_no_more_than_the_processors_could_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("XLA_FLAGS", raising=False)
        with pytest.raises(ValueError, match=r"count must be at most \d+ on this machine's"):
            request_cpu_devices(100_000)


def test_launching_what_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        launch.main(["--processes", "2", "nowhere.py"])
    assert end.value.code == 2
    assert "script must be a Python file, got 'nowhere.py'" in capsys.readouterr().err
