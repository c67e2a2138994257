"""Policies: what they say about each step and layer, their files, and the plans they ask for."""

import dataclasses
import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cinetile as ct
from cinetile.layer.layer_plan import plan_layer
from cinetile.layer.plans import visited_share
from cinetile.policy import PRESETS

GRID = ct.TokenGrid(6, 4, 8)
SMALL_TILES: dict[str, Any] = {"block_q": 16, "block_kv": 8, "width_multiple": 8}
HD = ct.TokenGrid.from_video(81, 720, 1280)


def levels(policy: ct.SparsityPolicy, steps: int, layers: int, **options: Any) -> list[list[Any]]:
    return [
        [
            policy.densities(step, layer, num_steps=steps, num_layers=layers, **options)
            for layer in range(layers)
        ]
        for step in range(steps)
    ]


class TestDensities:
    def test_warm_up_by_fraction_and_by_layer(self) -> None:
        policy = ct.SparsityPolicy(0.4, dense_steps=((0, 0.3),), dense_layers=((0, 1), (3, None)))
        half = (0.4, 0.4)
        assert levels(policy, 5, 4) == [[None] * 4] * 2 + [[None, half, half, None]] * 3

    def test_a_number_is_what_comes_first(self) -> None:
        assert ct.SparsityPolicy.from_dict({"dense_steps": 0.25, "dense_layers": 2}) == (
            ct.SparsityPolicy(dense_steps=((0, 0.25),), dense_layers=((0, 2),))
        )

    @pytest.mark.parametrize("count", [10, 40, 50, 100])
    def test_fractions_of_whole_steps_are_exact(self, count: int) -> None:
        """0.14 of 50 is 7 although the product is a little more; the rest is rounded up."""
        for percent in range(101):
            policy = ct.SparsityPolicy(dense_steps=((0, percent / 100),), dense_layers=())
            dense = [policy.densities(step, 0, num_steps=count) is None for step in range(count)]
            assert sum(dense) == -(-percent * count // 100)

    def test_later_rules_count(self) -> None:
        policy = ct.SparsityPolicy(
            0.3,
            rules=(
                ct.DensityRule(0.5, steps=(0, 2)),
                ct.DensityRule(0.6, layers=(1, 2)),
                ct.DensityRule(0.7, pattern="temporal", steps=(0.5, None)),
            ),
            dense_steps=(),
            dense_layers=(),
        )
        assert levels(policy, 4, 2) == [
            [(0.5, 0.5), (0.6, 0.6)],
            [(0.5, 0.5), (0.6, 0.6)],
            [(0.3, 0.7), (0.6, 0.7)],
            [(0.3, 0.7), (0.6, 0.7)],
        ]

    def test_experts(self) -> None:
        policy = ct.SparsityPolicy.preset("moderate")
        known: dict[str, Any] = {"num_steps": 40, "num_layers": 40}
        assert policy.densities(11, 1, **known, expert="high_noise") == (0.5, 0.5)
        assert policy.densities(39, 39, **known, expert="low_noise") == (0.2, 0.2)
        assert policy.densities(20, 20, **known) == (0.35, 0.35)

    def test_unknown_counts(self) -> None:
        policy = ct.SparsityPolicy(dense_steps=((0, 3),), dense_layers=((0, 1),))
        assert policy.densities(2, 5) is None
        assert policy.densities(3, 5) == (0.35, 0.35)
        with pytest.raises(ValueError, match="num_steps and num_layers must be given where"):
            ct.SparsityPolicy().densities(0, 5)


class TestPresets:
    def test_moderate_is_what_was_published(self) -> None:
        """Sparse in steps 11 to 39 of 40 and layers 1 to 39 of 40."""
        for expert, density in (("high_noise", 0.5), ("low_noise", 0.2)):
            found = levels(ct.SparsityPolicy.preset("moderate"), 40, 40, expert=expert)
            for step, layer in np.ndindex(40, 40):
                sparse = step >= 11 and layer >= 1
                assert found[step][layer] == ((density, density) if sparse else None)

    def test_svg_is_what_was_published(self) -> None:
        policy = ct.SparsityPolicy.preset("svg")
        found = levels(policy, 50, 40)
        assert [row[1] for row in found] == [None] * 10 + [(0.3, 0.3)] * 40
        assert found[49] == [None] + [(0.3, 0.3)] * 39
        assert levels(policy, 50, 30)[49] == [(0.3, 0.3)] * 30
        assert (policy.num_samples, policy.first_tokens) == (64, 10_000)
        planned = plan_layer(policy, HD, num_steps=50, num_layers=40)
        for plan, pattern in zip(planned.plans[1:], ("spatial", "temporal"), strict=True):
            assert plan.mask == ct.svg_mask(HD, pattern, 0.3)
            assert plan.mode == "split"
        assert planned.probes[1] == ct.svg_probe_masks(HD)

    @pytest.mark.parametrize(("name", "fraction"), [("svg", 0.2), ("svg-hunyuan", 0.1)])
    def test_svg_rounds_down_as_upstream(self, name: str, fraction: float) -> None:
        """33 steps: the first 6 are dense, not 7."""
        policy = ct.SparsityPolicy.preset(name)
        for count in range(1, 101):
            of = functools.partial(policy.densities, num_steps=count, num_layers=count)
            last = count - 1
            dense_steps = sum(of(step, last) is None for step in range(count))
            dense_layers = sum(of(last, layer) is None for layer in range(count))
            assert dense_steps == math.floor(fraction * count)
            assert dense_layers == math.floor(0.03 * count)

    def test_svg_hunyuan_is_what_was_published(self) -> None:
        policy = ct.SparsityPolicy.preset("svg-hunyuan")
        found = levels(policy, 50, 60)
        assert [row[1] for row in found] == [None] * 5 + [(0.25, 0.25)] * 45
        assert found[49] == [None] + [(0.25, 0.25)] * 59
        others = dataclasses.asdict(ct.SparsityPolicy.preset("svg"))
        changed = {"density": 0.25, "dense_steps": ((0, 0.1),)}
        assert dataclasses.asdict(policy) == {**others, **changed}

    @pytest.mark.parametrize("name", PRESETS)
    def test_they_fit_a_real_grid(self, name: str) -> None:
        policy = ct.SparsityPolicy.preset(name)
        assert len(plan_layer(policy, HD, num_steps=40, num_layers=40).plans) >= 3

    def test_more_aggressive_ones_save_more(self) -> None:
        saved = [
            ct.expected_work(
                ct.SparsityPolicy.preset(name), HD, num_steps=40, num_layers=40, high_noise_steps=16
            ).saved
            for name in ("conservative", "moderate", "aggressive")
        ]
        assert saved == sorted(set(saved))

    @pytest.mark.usefixtures("unchecked")
    def test_unknown_name(self) -> None:
        with pytest.raises(ValueError, match="name must be one of 'conservative', 'moderate'"):
            ct.SparsityPolicy.preset("bold")


EVERYTHING = ct.SparsityPolicy(
    0.4,
    rules=(ct.DensityRule(0.5, steps=(0.2, 0.5), layers=(1, None), expert="high_noise"),),
    dense_steps=((0, 0.1), (9, 10)),
    patterns=("temporal", "spatial"),
    sink_frames=0,
    mode="split",
    rounding="row",
    block_q=512,
    block_kv=256,
    width_multiple=1,
    num_samples=32,
    first_tokens=100,
    probe="svg",
    fraction_rounding="down",
)


class TestFiles:
    @pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml"])
    @pytest.mark.parametrize("policy", [EVERYTHING, ct.SparsityPolicy()], ids=["all", "default"])
    def test_round_trip(self, policy: ct.SparsityPolicy, suffix: str, tmp_path: Path) -> None:
        path = tmp_path / f"policy{suffix}"
        policy.to_file(path)
        assert ct.SparsityPolicy.from_file(path) == policy
        assert hash(ct.SparsityPolicy.from_file(path)) == hash(policy)

    @pytest.mark.parametrize("name", PRESETS)
    def test_presets_round_trip(self, name: str, tmp_path: Path) -> None:
        policy = ct.SparsityPolicy.preset(name)
        policy.to_file(tmp_path / "policy.json")
        assert ct.SparsityPolicy.from_file(tmp_path / "policy.json") == policy

    def test_no_setting_is_forgotten(self) -> None:
        fields = {field.name for field in dataclasses.fields(ct.SparsityPolicy)}
        assert EVERYTHING.to_dict().keys() == fields
        default = ct.SparsityPolicy()
        assert all(
            getattr(EVERYTHING, name) != getattr(default, name)
            for name in fields - {"dense_layers"}
        )

    def test_written_by_hand(self, tmp_path: Path) -> None:
        path = tmp_path / "policy.yaml"
        path.write_text(
            "density: 0.4\n"
            "dense_steps: 0.25\n"
            "dense_layers: [[0, 2], [38, null]]\n"
            "rules:\n"
            "  - {density: 0.5, expert: high_noise}\n"
            "  - density: 0.3\n"
            "    steps: [0.5, 1.0]\n"
        )
        assert ct.SparsityPolicy.from_file(path) == ct.SparsityPolicy(
            0.4,
            rules=(ct.DensityRule(0.5, expert="high_noise"), ct.DensityRule(0.3, (0.5, 1.0))),
            dense_steps=((0, 0.25),),
            dense_layers=((0, 2), (38, None)),
        )

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ({"dense": 0.3}, "policy has no dense; it takes density, rules, dense_steps"),
            ({"rules": [{"density": 0.3, "step": [0, 1]}]}, "rule has no step; it takes density"),
            ({"rules": [{"steps": [0, 1]}]}, "rule must have a density"),
            ({"rules": {"density": 0.3}}, "rules must be a list of rules"),
            ({"rules": [0.3]}, "rule must be settings by name, got float"),
            ([0.3], "policy must be settings by name, got list"),
            ({"density": "high"}, "density must be a number, got 'high'"),
            ({"density": 1.5}, r"density must lie in \(0, 1\], got 1.5"),
            ({"density": True}, "density must be a number, got True"),
            ({"dense_steps": [[0]]}, r"dense_steps\[0\] must be a pair \(start, stop\), got \[0\]"),
            ({"dense_steps": [[0, 1.5]]}, r"dense_steps\[0\]\[1\] must lie in \[0, 1\]"),
            ({"dense_steps": [[-1, 2]]}, r"dense_steps\[0\]\[0\] must be at least 0"),
            ({"dense_steps": "all"}, "dense_steps must be a number or a list of pairs"),
            ({"patterns": []}, "patterns must name at least one"),
            ({"patterns": ["diagonal"]}, "patterns must be one of 'spatial', 'temporal'"),
            ({"patterns": ["spatial", "spatial"]}, "patterns must name none twice"),
            ({"patterns": "spatial"}, "patterns must name at least one pattern, got 'spatial'"),
            ({"sink_frames": -1}, "sink_frames must be at least 0"),
            ({"sink_frames": 2, "patterns": ["svg-spatial"]}, "sink_frames must be at most 1"),
            ({"mode": "naive"}, "mode must be one of 'split', 'aligned', got 'naive'"),
            ({"rounding": "up"}, "rounding must be one of"),
            ({"block_q": 0}, "block_q must be at least 1"),
            ({"num_samples": 0}, "num_samples must be at least 1"),
            ({"probe": "all"}, "probe must be one of 'plan', 'svg'"),
            ({"fraction_rounding": "half"}, "fraction_rounding must be one of 'up', 'down'"),
            (
                {"rules": [{"density": 0.3, "pattern": "svg-spatial"}]},
                "pattern of a rule must be one of 'spatial', 'temporal'",
            ),
            ({"rules": [{"density": 0.3, "expert": "both"}]}, "expert must be one of 'high_noise'"),
        ],
        ids=str,
    )
    @pytest.mark.usefixtures("unchecked")
    def test_bad_content(self, content: Any, message: str, tmp_path: Path) -> None:
        path = tmp_path / "policy.json"
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"policy.json: {message}.*; expected a policy"):
            ct.SparsityPolicy.from_file(path)

    @pytest.mark.parametrize(
        ("name", "text"), [("p.json", "{"), ("p.yaml", "density: [")], ids=["json", "yaml"]
    )
    def test_damaged(self, name: str, text: str, tmp_path: Path) -> None:
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(ValueError, match=f"{name}: it is no (JSON|YAML) file"):
            ct.SparsityPolicy.from_file(path)

    def test_other_suffix(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"path must end in .json, .yaml, .yml, got"):
            EVERYTHING.to_file(tmp_path / "policy.toml")

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="path must be an existing file"):
            ct.SparsityPolicy.from_file(tmp_path / "policy.json")

    def test_without_pyyaml(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "yaml", None)
        EVERYTHING.to_file(tmp_path / "policy.json")
        assert ct.SparsityPolicy.from_file(tmp_path / "policy.json") == EVERYTHING
        with pytest.raises(ImportError, match=r'PyYAML: run .*"\.\[yaml\]"'):
            EVERYTHING.to_file(tmp_path / "policy.yaml")


class TestGuardRails:
    @pytest.mark.parametrize(
        "settings",
        [{"density": 0.19}, {"rules": (ct.DensityRule(0.1, expert="low_noise"),)}],
        ids=str,
    )
    def test_low_density(self, settings: dict[str, Any]) -> None:
        with pytest.warns(UserWarning, match=r"density 0.1\d? is below 0.2: published results"):
            ct.SparsityPolicy(**settings)

    def test_the_limit_itself_is_quiet(self) -> None:
        ct.SparsityPolicy(0.2)

    def test_a_density_that_tiles_and_rounding_lose(self) -> None:
        policy = ct.SparsityPolicy(0.35, block_q=96, block_kv=96, width_multiple=128)
        with pytest.warns(UserWarning, match="density 0.35 is lost on 6x4x8 = 192 tokens"):
            plan_layer(policy, GRID, num_steps=4, num_layers=2)

    @pytest.mark.parametrize("sizes", [(9, 8, 8), (5, 15, 26), (21, 20, 20)])
    @pytest.mark.parametrize("density", [0.2, 0.35])
    def test_defaults_keep_the_density_of_small_grids(
        self, sizes: tuple[int, int, int], density: float
    ) -> None:
        """No warning either: the sink is what the plans visit beyond the band."""
        grid = ct.TokenGrid(*sizes)
        planned = plan_layer(ct.SparsityPolicy(density), grid, num_steps=4, num_layers=2)
        for plan in planned.plans[1:]:
            assert visited_share(plan) < density + 1.3 / grid.frames

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (((0.4, 1),), "two indices or two fractions, got \\[0.4, 1\\]; 1.0 or None is the end"),
            (((1, 0.5),), "two indices or two fractions"),
            (((5, 2),), "must start before it stops"),
            (((0.5, 0.2),), "must start before it stops"),
            (((3, 3),), "must start before it stops"),
        ],
    )
    def test_intervals_that_hold_nothing(self, value: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ct.SparsityPolicy(dense_steps=value)

    def test_coarse_tiles(self) -> None:
        policy = ct.SparsityPolicy(
            0.25, dense_steps=(), width_multiple=8, block_q=192, block_kv=192
        )
        with pytest.warns(UserWarning, match="tiles of 192 x 192 are too coarse for 6x4x8 = 192"):
            plan_layer(policy, GRID, num_layers=2)


class TestPlans:
    def policy(self, **options: Any) -> ct.SparsityPolicy:
        return ct.SparsityPolicy(0.3, **{**SMALL_TILES, **options})

    def test_each_density_is_planned_once(self) -> None:
        policy = self.policy(
            rules=(
                ct.DensityRule(0.5, steps=(2, 3)),
                ct.DensityRule(0.5, layers=(2, 3), pattern="spatial"),
            ),
            dense_steps=((0, 1),),
        )
        planned = plan_layer(policy, GRID, num_steps=4, num_layers=3, dtype="float32")
        assert [str(choice) for choice in planned.choices] == [
            "dense",
            "spatial 0.3",
            "temporal 0.3",
            "spatial 0.5",
            "temporal 0.5",
        ]
        assert [[planned.levels[level] for level in row] for row in planned.level_of] == [
            [(), (), ()],
            [(), (1, 2), (3, 2)],
            [(), (3, 4), (3, 4)],
            [(), (1, 2), (3, 2)],
        ]
        assert planned.probes == (
            (),
            *(tuple(planned.plans[plan] for plan in level) for level in planned.levels[1:]),
        )

    def test_plans_are_what_the_policy_says(self) -> None:
        policy = self.policy(dense_steps=(), sink_frames=2, rounding="row")
        planned = plan_layer(policy, GRID, num_layers=2)
        assert planned.plans == (
            ct.plan_tiles(ct.dense_mask(GRID), 16, 8, "dense"),
            *(
                ct.plan_tiles(
                    build(GRID, 0.3, sink_frames=2, multiple=8), 16, 8, "aligned", rounding="row"
                )
                for build in (ct.spatial_mask, ct.temporal_mask)
            ),
        )

    def test_without_counts_the_last_row_stands_for_the_rest(self) -> None:
        planned = plan_layer(self.policy(dense_steps=((2, 4),)), GRID)
        assert planned.level_of.tolist() == [[0, 1], [0, 1], [0, 0], [0, 0], [0, 1]]

    @pytest.mark.parametrize(
        ("grid", "name"),
        [
            (ct.TokenGrid(6, 8, 32), "svg-wan-spatial"),
            (ct.TokenGrid(6, 8, 32, text_tokens=16), "svg-hunyuan-spatial"),
            (ct.TokenGrid(6, 8, 32, text_tokens=16, text_first=True), "svg-cogvideox-spatial"),
        ],
        ids=str,
    )
    def test_published_masks_by_where_the_text_stands(self, grid: Any, name: str) -> None:
        policy = dataclasses.replace(
            ct.SparsityPolicy.preset("svg"), dense_steps=(), block_q=64, block_kv=64
        )
        planned = plan_layer(policy, grid, num_layers=2)
        assert planned.plans[1].mask.name == name
        assert planned.probes[1][0].grid == grid

    def test_probes_follow_the_patterns(self) -> None:
        policy = self.policy(patterns=("temporal", "spatial"), probe="svg", dense_steps=())
        planned = plan_layer(policy, GRID, num_layers=2)
        spatial, temporal = ct.svg_probe_masks(GRID)
        assert planned.probes[1] == (temporal, spatial)


class TestExpectedWork:
    def test_counted_by_hand(self) -> None:
        """Each pattern and density visits what its plan visits; dense calls visit all."""
        policy = ct.SparsityPolicy(
            0.3,
            rules=(ct.DensityRule(0.5, expert="low_noise"),),
            dense_steps=((0, 1),),
            dense_layers=(),
            mode="split",
            **SMALL_TILES,
        )
        work = ct.expected_work(policy, GRID, num_steps=4, num_layers=2, high_noise_steps=2)
        visited = {
            density: np.mean(
                [
                    ct.plan_tiles(build(GRID, density, multiple=8), 16, 8).stats.tiles_visited
                    * 16
                    * 8
                    / 192**2
                    for build in (ct.spatial_mask, ct.temporal_mask)
                ]
            )
            for density in (0.3, 0.5)
        }
        assert work.sparse_calls == pytest.approx(6 / 8)
        assert work.visited == pytest.approx((2 * visited[0.3] + 4 * visited[0.5]) / 6)
        assert work.saved == pytest.approx((2 * (1 - visited[0.3]) + 4 * (1 - visited[0.5])) / 8)
        assert "75.0% of the attention calls are sparse" in str(work)

    def test_ragged_tiles_count_what_they_hold(self) -> None:
        policy = ct.SparsityPolicy(
            1.0, dense_steps=(), dense_layers=(), block_q=50, block_kv=70, mode="split"
        )
        work = ct.expected_work(policy, GRID, num_steps=1, num_layers=1)
        assert (work.saved, work.visited) == (0.0, 1.0)

    def test_all_dense(self) -> None:
        policy = ct.SparsityPolicy(dense_steps=((0, None),))
        work = ct.expected_work(policy, GRID, num_steps=4, num_layers=2)
        assert work == ct.ExpectedWork(0.0, 0.0, None)
        assert str(work) == "all attention is dense"

    @pytest.mark.usefixtures("unchecked")
    def test_bad_counts(self) -> None:
        policy = ct.SparsityPolicy()
        with pytest.raises(ValueError, match="num_steps must be at least 1"):
            ct.expected_work(policy, GRID, num_steps=0, num_layers=2)
        with pytest.raises(ValueError, match="high_noise_steps must be at most 4"):
            ct.expected_work(policy, GRID, num_steps=4, num_layers=2, high_noise_steps=5)
