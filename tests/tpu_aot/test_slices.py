"""Compiles the layer for slices of several v6e chips, and reads off what they exchange."""

from collections import Counter

import pytest

import cinetile as ct
from cinetile.lab.tpu.aot import LayerJob, compile_layer, require_tpu_compiler
from cinetile.parallel import exchange_report

try:
    require_tpu_compiler()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

GRID = ct.TokenGrid(5, 30, 52)
POLICY = ct.SparsityPolicy(0.35, dense_steps=(), dense_layers=(), block_q=256, block_kv=256)
HEADS, HEAD_DIM, BATCH = 4, 128, 2


@pytest.mark.parametrize(
    ("topology", "axes"),
    [("2x2", {"sequence": 4}), ("2x4", {"data": 2, "sequence": 4})],
    ids=["2x2", "2x4"],
)
def test_what_the_chips_exchange(topology: str, axes: dict[str, int]) -> None:
    """Tokens for heads by four exchanges of all with all, and routes of a few bytes."""
    job = LayerJob(
        "v6e", topology, tuple(axes.items()), GRID, POLICY, BATCH, HEADS, HEAD_DIM, "bfloat16"
    )
    compiled = compile_layer(job)
    rows = BATCH // axes.get("data", 1)
    expected = exchange_report(
        ct.spatial_mask(GRID, 0.35), devices=4, heads=HEADS, head_dim=HEAD_DIM, batch=rows
    )[1]
    moved: Counter[str] = Counter()
    for collective in compiled.collectives:
        moved[collective.kind] += collective.sent_bytes
    assert moved.pop("all-to-all") == expected.all_to_all
    # The compiler chooses how the routes are told: by gathering, or by adding them up.
    assert set(moved) <= {"all-gather", "all-reduce"}
    assert sum(moved.values()) <= 4 * max(expected.all_gather, 64)
    exchanges = [
        collective for collective in compiled.collectives if collective.kind == "all-to-all"
    ]
    assert [collective.devices for collective in exchanges] == [4] * 4
