"""Patterns as objects: the tuple that is read everywhere, and one that is not in it."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from kernel_suite import expected_of
from test_routing import known_heads

import cinetile as ct
from cinetile.cli.options import NamesType
from cinetile.cli.route import route_command
from cinetile.lab import pictures
from cinetile.lab.bench import Workload

GRID = ct.TokenGrid(6, 4, 5)
KEY = jax.random.key(3)
TILES: dict[str, Any] = {
    "block_q": 20,
    "block_kv": 10,
    "width_multiple": 4,
    "dense_steps": ((0, 1),),
}


def near_and_first(
    grid: ct.TokenGrid,
    density: float | None = None,
    width: int | None = None,
    sink_frames: int = 1,
    *,
    multiple: int = 128,
) -> ct.Mask:
    """A made-up pattern: half the width of the spatial one, and at least two sink frames."""
    half = None if density is None else density / 2
    return ct.spatial_mask(grid, half, width, max(2, sink_frames), multiple=multiple)


MADE_UP = ct.Pattern("near-and-first", near_and_first)


class TestPattern:
    @pytest.mark.parametrize("pattern", ct.PATTERNS, ids=lambda item: item.name)
    @pytest.mark.parametrize("place", ["none", "last", "first"])
    def test_every_one_has_a_mask_and_a_probe(self, pattern: ct.Pattern, place: str) -> None:
        text = {} if place == "none" else {"text_tokens": 7, "text_first": place == "first"}
        grid = ct.TokenGrid(6, 8, 10, **text)
        mask = pattern.mask(grid, 0.5, multiple=4)
        assert mask.grid == grid
        assert 0 < mask.density < 1
        assert pattern.probe is not None
        assert pattern.probe(grid).grid == grid

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            (("dense", near_and_first), ValueError, "name must be a word"),
            (("a,b", near_and_first), ValueError, "name must be a word"),
            (("", near_and_first), ValueError, "name must be a word"),
            ((3, near_and_first), TypeError, "name must be a string, got 3"),
            (("mine", "spatial"), TypeError, "build must be a function"),
            (("mine", near_and_first, GRID), TypeError, "probe must be a function"),
        ],
        ids=["dense", "comma", "empty", "number", "no-function", "no-probe-function"],
    )
    def test_bad_ones(self, arguments: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            ct.Pattern(*arguments)

    def test_sink_is_checked(self) -> None:
        pattern = ct.Pattern("mine", near_and_first, max_sink_frames=1)
        with pytest.raises(ValueError, match="sink_frames must be at most 1, got 2"):
            pattern.mask(GRID, 0.5, sink_frames=2, multiple=4)
        with pytest.raises(ValueError, match="sink_frames must be at most 1, got 2"):
            ct.SparsityPolicy(patterns=(pattern,), sink_frames=2)


class TestPolicy:
    def test_names_and_objects_of_the_tuple_are_equal(self) -> None:
        by_object = ct.SparsityPolicy(patterns=ct.PATTERNS[:2])
        assert by_object == ct.SparsityPolicy(patterns=("spatial", "temporal"))
        assert hash(by_object) == hash(ct.SparsityPolicy())
        assert by_object.patterns == ("spatial", "temporal")

    def test_rules_for_it(self) -> None:
        policy = ct.SparsityPolicy(
            0.5,
            patterns=("temporal", MADE_UP),
            rules=(ct.DensityRule(0.3, pattern=MADE_UP),),
            dense_steps=(),
            dense_layers=(),
        )
        assert policy.densities(0, 0) == (0.5, 0.3)
        assert policy.pattern_names == ("temporal", "near-and-first")
        assert policy.to_dict()["patterns"] == ["temporal", "near-and-first"]
        assert policy.to_dict()["rules"] == [{"density": 0.3, "pattern": "near-and-first"}]

    def test_a_file_cannot_name_it(self, tmp_path: Path) -> None:
        policy = ct.SparsityPolicy(patterns=("temporal", MADE_UP))
        with pytest.raises(ValueError, match="patterns must be in PATTERNS for a file"):
            policy.to_file(tmp_path / "policy.json")

    def test_two_of_one_name(self) -> None:
        other = ct.Pattern(MADE_UP.name, ct.spatial_mask)
        with pytest.raises(ValueError, match="patterns must name none twice"):
            ct.SparsityPolicy(patterns=(MADE_UP, other))
        stolen = ct.Pattern("spatial", near_and_first)
        with pytest.raises(ValueError, match="a pattern named 'spatial' other than"):
            ct.SparsityPolicy(patterns=(stolen,))

    def test_probes_need_one(self) -> None:
        with pytest.raises(ValueError, match="probe must be 'plan' with the pattern 'near-and-f"):
            ct.SparsityPolicy(patterns=(MADE_UP,), probe="svg")


class TestMadeUp:
    """One object goes from the policy to the picture; nothing else knows of it."""

    POLICY = ct.SparsityPolicy(0.5, patterns=("temporal", MADE_UP), **TILES)

    def record(self) -> Any:
        layer = ct.SparseAttention(
            GRID, self.POLICY, num_steps=3, num_layers=2, implementation="xla", dtype="float32"
        )
        arrays = known_heads(GRID, [["spatial", "temporal"], ["temporal", "temporal"]])
        output, record = layer(*arrays, step=2, layer=1, rng=KEY, return_record=True)
        assert layer.planned.plans[2].mask == near_and_first(GRID, 0.5, multiple=4)
        expected, _ = expected_of(arrays, layer.planned.plans, np.asarray(record.routes))
        np.testing.assert_allclose(output, expected, rtol=2e-5, atol=2e-5)
        return record

    def test_layer_and_record(self) -> None:
        rows = self.record().rows()
        assert [row["pattern"] for row in rows] == [MADE_UP.name, *["temporal"] * 3]
        assert set(rows[0]["errors"]) == {"temporal", MADE_UP.name}

    def test_table_and_picture(self, tmp_path: Path) -> None:
        table = ct.RouteTable.from_records([self.record()])
        table.to_json(tmp_path / "routes.json")
        content = json.loads((tmp_path / "routes.json").read_text())
        assert content["patterns"] == ["temporal", MADE_UP.name]
        pictures.route_picture(table, tmp_path / "routes.png")
        assert (tmp_path / "routes.png").read_bytes().startswith(b"\x89PNG")

    def test_bench(self) -> None:
        workload = Workload(GRID, MADE_UP, density=0.5, dtype="float32", block_q=20, block_kv=10)
        assert workload.plan("split").mask == near_and_first(GRID, 0.5)
        assert workload.to_dict()["pattern"] == MADE_UP.name
        json.dumps(workload.to_dict())


def test_a_pattern_has_one_colour_in_every_picture() -> None:
    both = pictures.pattern_colours(["spatial", "temporal"])
    assert pictures.pattern_colours(["temporal"]) == both[1:]
    many = [*(pattern.name for pattern in ct.PATTERNS), MADE_UP.name, "another"]
    assert len(set(pictures.pattern_colours(many))) == len(many)


def test_command_line_reads_the_tuple() -> None:
    option = next(item for item in route_command.params if item.name == "patterns")
    assert isinstance(option.type, NamesType)
    assert option.type.known == tuple(pattern.name for pattern in ct.PATTERNS)
