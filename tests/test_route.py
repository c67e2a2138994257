"""Routes as a table: collecting, exporting, drawing, and the command that makes one."""

import csv
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from click.testing import CliRunner, Result
from test_routing import known_heads

import cinetile as ct
from cinetile.cli import main
from cinetile.lab import pictures
from cinetile.lab.inputs import find_calls

GRID = ct.TokenGrid(6, 4, 5)
TILES = ["--block-q", "20", "--block-kv", "10", "--width-multiple", "4"]
SMALL = ["--grid", "6x4x5", "--dtype", "float32", *TILES]
PATTERNS = ["spatial", "temporal", "temporal", "temporal"]
KEY = jax.random.key(0)
POLICY = ct.SparsityPolicy(
    0.4, dense_steps=((0, 1),), dense_layers=(), block_q=20, block_kv=10, width_multiple=4
)
ROUTES = [["spatial", "temporal"], ["temporal", "temporal"]]


def records() -> list[ct.LayerRecord]:
    layer = ct.SparseAttention(GRID, POLICY, num_steps=3, num_layers=2)
    arrays = known_heads(GRID, ROUTES)
    return [
        layer.route(*arrays, step=step, layer=index, rng=KEY)
        for step in range(3)
        for index in range(2)
    ]


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["route", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    folder.mkdir()
    query, key, value = known_heads(GRID, ROUTES)
    for step in (2, 10):
        for layer in (0, 1):
            path = folder / f"step{step}_layer{layer}.npz"
            heads = slice(None, None, -1) if layer else slice(None)
            np.savez(path, query=query[:, :, heads], key=key[:, :, heads], value=value)
    (folder / "notes.txt").write_text("not a call")
    return folder


class TestTable:
    def test_from_records(self) -> None:
        table = ct.RouteTable.from_records(records())
        assert (table.steps, table.layers) == ((0, 1, 2), (0, 1))
        assert len(table.entries) == 6 * 4
        for (step, _), entries in table.calls().items():
            patterns = [entry["pattern"] for entry in entries]
            assert patterns == (["dense"] * 4 if step == 0 else PATTERNS)
            assert all((entry["errors"] is None) == (step == 0) for entry in entries)

    def test_stacked_records(self) -> None:
        stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *records()[2:4])
        table = ct.RouteTable.from_records([stacked])
        assert table == ct.RouteTable.from_records(records()[2:4])

    def test_from_routes(self) -> None:
        masks = ct.spatial_mask(GRID, width=9), ct.temporal_mask(GRID, width=9)
        found = ct.route_heads(*known_heads(GRID, ROUTES), masks, rng=KEY)
        choices = ct.PlanChoice("spatial", 0.3), ct.PlanChoice("temporal", 0.3)
        table = ct.RouteTable.from_routes(found, choices, step=4, layer=7)
        assert [entry["pattern"] for entry in table.entries] == PATTERNS
        assert {(entry["step"], entry["layer"]) for entry in table.entries} == {(4, 7)}
        errors = [list(entry["errors"].values()) for entry in table.entries]
        np.testing.assert_allclose(errors, np.asarray(found.errors).reshape(4, 2))

    def test_joined_is_in_order(self) -> None:
        parts = [ct.RouteTable.from_records([record]) for record in records()]
        joined = ct.RouteTable.joined(parts[::-1])
        assert joined == ct.RouteTable.from_records(records())

    def test_json(self, tmp_path: Path) -> None:
        table = ct.RouteTable.from_records(records())
        table.to_json(tmp_path / "routes.json")
        content = json.loads((tmp_path / "routes.json").read_text())
        assert content == table.to_dict()
        assert content["patterns"] == ["spatial", "temporal"]
        assert content["rows"][0]["errors"] is None
        last = content["rows"][-1]
        assert (last["step"], last["layer"], last["batch"], last["head"]) == (2, 1, 1, 1)
        assert (last["pattern"], last["density"]) == ("temporal", 0.4)
        assert last["errors"]["temporal"] < last["errors"]["spatial"]

    def test_csv(self, tmp_path: Path) -> None:
        table = ct.RouteTable.from_records(records())
        table.to_csv(tmp_path / "routes.csv")
        with (tmp_path / "routes.csv").open() as file:
            lines = list(csv.DictReader(file))
        assert len(lines) == 24
        assert lines[0]["pattern"] == "dense"
        assert lines[0]["error_spatial"] == ""
        errors = list(table.entries[-1]["errors"].values())
        assert float(lines[-1]["error_temporal"]) == errors[1]

    def test_bad_collections(self) -> None:
        with pytest.raises(ValueError, match="records must hold at least one"):
            ct.RouteTable.from_records([])
        with pytest.raises(ValueError, match="tables must be at least one"):
            ct.RouteTable.joined([])
        other = ct.RouteTable(("spatial",), ())
        with pytest.raises(ValueError, match="all of the same patterns"):
            ct.RouteTable.joined([other, ct.RouteTable.from_records(records())])


class TestPicture:
    def test_it_is_a_picture(self, tmp_path: Path) -> None:
        pictures.route_picture(ct.RouteTable.from_records(records()), tmp_path / "routes.png")
        assert (tmp_path / "routes.png").read_bytes().startswith(b"\x89PNG")

    def test_all_dense(self, tmp_path: Path) -> None:
        table = ct.RouteTable.from_records(records()[:2])
        pictures.route_picture(table, tmp_path / "routes.png")
        assert (tmp_path / "routes.png").stat().st_size > 0

    def test_colours_follow_the_routes(self) -> None:
        """The map holds an index of the pattern for each head of each step."""
        from matplotlib.figure import Figure

        axes = Figure().add_axes((0, 0, 1, 1))
        pictures._draw_routes(axes, ct.RouteTable.from_records(records()))
        drawn = np.asarray(axes.images[0].get_array())
        assert drawn.tolist() == [[0, 0, 0, 0, 1, 2, 2, 2, 1, 2, 2, 2]] * 2


class TestFiles:
    def test_names_say_step_and_layer(self, saved: Path) -> None:
        calls = find_calls([saved])
        assert sorted((call.step, call.layer) for call in calls) == [
            (2, 0),
            (2, 1),
            (10, 0),
            (10, 1),
        ]
        assert all(f"step{call.step}_layer{call.layer}" in call.path.name for call in calls)

    @pytest.mark.parametrize(
        ("names", "expected"),
        [
            (["a.npz", "b.safetensors"], [(0, 0), (0, 1)]),
            (["run-Step_3-layer-12.npz"], [(3, 12)]),
            (["layer7.npz", "layer08.npz"], [(0, 7), (0, 8)]),
            (["step5.npz"], [(5, 0)]),
        ],
        ids=str,
    )
    def test_other_names(self, names: list[str], expected: Any, tmp_path: Path) -> None:
        paths = [tmp_path / name for name in names]
        for path in paths:
            path.touch()
        assert [(call.step, call.layer) for call in find_calls(paths)] == expected

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (["layer1.npz", "b.npz"], "b.npz says no layer in its name, though others do"),
            (["layer1.npz", "x_layer1.npz"], "are both of step 0, layer 1"),
        ],
        ids=str,
    )
    def test_names_that_do_not_fit(self, names: list[str], message: str, tmp_path: Path) -> None:
        for name in names:
            (tmp_path / name).touch()
        with pytest.raises(ValueError, match=message):
            find_calls([tmp_path / name for name in names])

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"holds no \.npz or \.safetensors file"):
            find_calls([tmp_path])
        with pytest.raises(FileNotFoundError, match="there is no file or folder"):
            find_calls([tmp_path / "missing.npz"])


class TestCommand:
    def test_a_folder_as_json(self, saved: Path) -> None:
        result = run(saved, *SMALL, "--json", "-")
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        assert document["grid"] == [6, 4, 5]
        assert document["policy"]["density"] == 0.35
        places = [
            (row["step"], row["layer"], row["batch"], row["head"]) for row in document["rows"]
        ]
        assert places == sorted(places)
        assert len(places) == 16
        for row in document["rows"]:
            heads = ROUTES[row["batch"]][:: -1 if row["layer"] else 1]
            assert row["pattern"] == heads[row["head"]]

    def test_tables(self, saved: Path) -> None:
        listed = run(saved, *SMALL)
        assert listed.exit_code == 0, listed.output
        assert "temporal 0.35" in listed.stdout
        many = run(*saved.glob("*.npz"), *SMALL, "--density", "0.5")
        assert "spatial 0.5" in many.stdout

    def test_a_summary_where_there_are_many_heads(
        self, saved: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("cinetile.cli.route._MAX_HEADS_LISTED", 8)
        result = run(saved, *SMALL)
        assert result.exit_code == 0, result.output
        assert "median spatial error" in result.stdout
        lines = [" ".join(line.split()[:5]) for line in result.stdout.splitlines()]
        assert [line for line in lines if line[:1].isdigit()] == [
            "2 0 0 1 3",
            "2 1 0 1 3",
            "10 0 0 1 3",
            "10 1 0 1 3",
        ]

    def test_a_policy_with_dense_layers(self, saved: Path, tmp_path: Path) -> None:
        path = tmp_path / "policy.json"
        ct.SparsityPolicy(dense_steps=((0, 3),), dense_layers=((1, 2),)).to_file(path)
        result = run(saved, *SMALL, "--policy", path, "--density", "0.5", "--json", "-")
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        dense = {(r["step"], r["layer"]) for r in document["rows"] if r["pattern"] == "dense"}
        assert dense == {(2, 0), (2, 1), (10, 1)}
        assert document["policy"]["density"] == 0.5

    def test_files_to_write(self, saved: Path, tmp_path: Path) -> None:
        picture, table = tmp_path / "routes.png", tmp_path / "routes.csv"
        result = run(saved, *SMALL, "--picture", picture, "--csv", table, "--json", "-")
        assert result.exit_code == 0, result.output
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert len(table.read_text().splitlines()) == 17

    def test_a_clip(self) -> None:
        """Its even heads are spatial and its odd ones temporal."""
        size = ["--grid", "9x12x12", *TILES, "--head-dim", "64"]
        result = run("--clip", "sample", *size, "--heads", "2", "--json", "-")
        assert result.exit_code == 0, result.output
        rows = json.loads(result.stdout)["rows"]
        assert [row["pattern"] for row in rows] == ["spatial", "temporal"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "give either FILES or --clip"),
            (["missing.npz"], "there is no file or folder 'missing.npz'"),
            (["--clip", "sample", "x.npz"], "give either FILES or --clip"),
            (["x.npz", "--heads", "2"], "--heads and --head-dim apply only to --clip"),
            (["missing.npz", "--density", "2"], "density must lie in (0, 1]"),
            (["missing.npz", "--policy", "bold.toml"], "--policy must be one of"),
            (["missing.npz", "--policy", "moderate"], "num_steps and num_layers must be given"),
            (["missing.npz", "--patterns", "x"], "must hold names of spatial"),
        ],
        ids=str,
    )
    def test_bad_arguments(self, arguments: list[str], message: str) -> None:
        result = run(*arguments)
        assert result.exit_code == 2
        assert message in result.stderr

    def test_a_file_of_another_grid(self, saved: Path) -> None:
        result = run(
            saved, "--grid", "6x4x4", "--block-q", "16", "--block-kv", "8", "--width-multiple", "8"
        )
        assert result.exit_code == 2
        assert "do not match num_tokens 96" in result.stderr
