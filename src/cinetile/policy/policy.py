"""`SparsityPolicy`: the settings of sparse attention in a model."""

import dataclasses
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cinetile import _checks
from cinetile.files import reading
from cinetile.patterns import Pattern, as_pattern, canonical_pattern, name_of
from cinetile.plans import ROUNDINGS
from cinetile.policy import files
from cinetile.policy.intervals import (
    FRACTION_ROUNDINGS,
    MAX_ENTRIES,
    Interval,
    contains,
    interval,
    intervals,
)
from cinetile.policy.presets import PRESETS

POLICY_MODES: tuple[str, ...] = ("split", "aligned")
EXPERTS: tuple[str, ...] = ("high_noise", "low_noise")
PROBES: tuple[str, ...] = ("plan", "svg")
LOWEST_SAFE_DENSITY = 0.2


@dataclass(frozen=True)
class DensityRule:
    """A density for some steps, layers, an expert or a pattern only.

    Attributes:
        density: fraction of pairs that the band keeps, in (0, 1].
        steps: `(start, stop)`, as in `SparsityPolicy`; None for all steps.
        layers: `(start, stop)` in the same form; None for all layers.
        expert: "high_noise" or "low_noise" (Wan 2.2); None for any model.
        pattern: one of the policy's patterns; None for all.

    Raises:
        TypeError: a setting has the wrong type.
        ValueError: a setting is out of range or names something unknown.
    """

    density: float
    steps: Interval | None = None
    layers: Interval | None = None
    expert: str | None = None
    pattern: str | Pattern | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", _density("density", self.density))
        for name in ("steps", "layers"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, interval(name, value))
        if self.expert is not None:
            _checks.choice("expert", self.expert, EXPERTS)
        if self.pattern is not None:
            object.__setattr__(self, "pattern", canonical_pattern("pattern", self.pattern))


@dataclass(frozen=True)
class SparsityPolicy:
    """Which steps and layers use sparse attention, with which patterns and densities.

    Steps and layers are given as half-open intervals `(start, stop)`: ints are indices, floats
    in [0, 1] fractions of the run's steps or the model's layers (made whole as
    `fraction_rounding` says), and a stop of None is the end. In a file, a single number `x` may
    stand for `[[0, x]]`.

    Attributes:
        density: fraction of pairs that a pattern's band keeps, in (0, 1]; rules override it. The
            sink is added to it.
        rules: other densities; the last rule that applies wins.
        dense_steps: steps with dense attention in every head. Denoising fixes layout and motion
            early, so a dense warm-up pays.
        dense_layers: layers with dense attention in every head.
        patterns: what a head can be routed to, by the names of `PATTERNS` or as `Pattern` objects:
            "spatial" and "temporal" are the library's masks, "svg-spatial" and "svg-temporal"
            those of Sparse VideoGen (for Wan on grids without text, HunyuanVideo with text after
            the video, CogVideoX with text before it). With a single pattern, heads are not routed.
        sink_frames: first frames of the video that every query keeps; 0 or 1 for svg patterns.
        mode: "aligned" or "split", as in `plan_tiles`.
        rounding: how aligned plans round boundary tiles.
        block_q: queries in a tile; None for what suits the implementation and, on grids under
            8,192 tokens, the mask.
        block_kv: keys in a tile; None as for `block_q`.
        width_multiple: band widths are rounded up to a multiple of this; by default 128, or on
            grids under 4,096 tokens a smaller power of two. svg patterns keep upstream's 128.
        num_samples: query rows on which a head is routed.
        first_tokens: the rows are drawn from this many first video tokens; None for all.
        probe: "plan" routes by the pairs that will run, "svg" by the patterns' probes: upstream's
            masks of two frames, whatever the density.
        fraction_rounding: "up" or "down": how fractions of steps and layers become whole.

    Raises:
        TypeError: a setting has the wrong type.
        ValueError: a setting is out of range or names something unknown.

    Warns:
        UserWarning: a density is below 0.2, where published results lose quality visibly.
    """

    density: float = 0.35
    rules: tuple[DensityRule, ...] = ()
    dense_steps: tuple[Interval, ...] = ((0, 0.2),)
    dense_layers: tuple[Interval, ...] = ((0, 1),)
    patterns: tuple[str | Pattern, ...] = ("spatial", "temporal")
    sink_frames: int = 1
    mode: str = "aligned"
    rounding: str = "balanced"
    block_q: int | None = None
    block_kv: int | None = None
    width_multiple: int | None = None
    num_samples: int = 64
    first_tokens: int | None = None
    probe: str = "plan"
    fraction_rounding: str = "up"

    def __post_init__(self) -> None:
        changed: dict[str, Any] = {
            "density": _density("density", self.density),
            "rules": _rules(self.rules),
            "dense_steps": intervals("dense_steps", self.dense_steps),
            "dense_layers": intervals("dense_layers", self.dense_layers),
            "patterns": _patterns(self.patterns),
        }
        for name, value in changed.items():
            object.__setattr__(self, name, value)
        for rule in self.rules:
            if rule.pattern is not None:
                _checks.choice("pattern of a rule", name_of(rule.pattern), self.pattern_names)
        limits = [as_pattern("patterns", pattern).max_sink_frames for pattern in self.patterns]
        lowest = min((limit for limit in limits if limit is not None), default=None)
        _checks.integer("sink_frames", self.sink_frames, minimum=0, maximum=lowest)
        _checks.choice("mode", self.mode, POLICY_MODES)
        _checks.choice("rounding", self.rounding, ROUNDINGS)
        for name in ("block_q", "block_kv", "first_tokens", "width_multiple", "num_samples"):
            size = getattr(self, name)
            if size is not None or name == "num_samples":
                object.__setattr__(self, name, _checks.integer(name, size, minimum=1))
        _checks.choice("probe", self.probe, PROBES)
        _checks.choice("fraction_rounding", self.fraction_rounding, FRACTION_ROUNDINGS)
        if self.probe == "svg":
            for pattern in self.patterns:
                if as_pattern("patterns", pattern).probe is None:
                    raise ValueError(
                        f"probe must be 'plan' with the pattern {name_of(pattern)!r}, which has no "
                        f"probe of its own, got {self.probe!r}"
                    )
        self._warn_of_low_density()

    def _warn_of_low_density(self) -> None:
        lowest = min([self.density, *(rule.density for rule in self.rules)])
        if lowest < LOWEST_SAFE_DENSITY:
            warnings.warn(
                f"density {lowest} is below {LOWEST_SAFE_DENSITY}: published results lose quality "
                "visibly under 0.2 to 0.25, small models sooner; compare a few videos with dense "
                "ones before relying on it",
                stacklevel=4,
            )

    @staticmethod
    def preset(name: str) -> "SparsityPolicy":
        """A policy by name.

        - "conservative": density 0.5, exact masks, the first 40 % of the steps and the first
          layer and the last 5 % (rounded down) dense. All of it is this library's choice.
        - "moderate": published for Wan 2.2's experts on TPUs: density 0.50 in the high-noise
          and 0.20 in the low-noise expert, steps 11 to 39 of 40 and layers 1 to 39 sparse,
          aligned (1.20x, 26.14 dB against dense). 0.35 for other models is this library's choice.
        - "aggressive": density 0.35, the mask of the published case study's kernels (38.87 %
          of the pairs at 720p), aligned. Its steps are not published: the first 10 % dense,
          the first layer dense and 0.20 in the low-noise expert are this library's choice.
        - "svg": as Sparse VideoGen ships it for Wan 14B at 720p: density 0.3, its masks and
          probes, the first 20 % of the steps and the first 3 % of the layers dense (rounded down:
          6 of 33 steps, 1 of 40 layers), 64 rows from the first 10,000 tokens. All of it is
          published.
        - "svg-hunyuan": as Sparse VideoGen ships it for HunyuanVideo at 720p: density 0.25 and
          the first 10 % of the steps dense; otherwise like "svg". All of it is published.
        """
        _checks.choice("name", name, tuple(PRESETS))
        return SparsityPolicy.from_dict(PRESETS[name])

    @staticmethod
    def from_dict(settings: Mapping[str, Any]) -> "SparsityPolicy":
        """Builds a policy from settings by name, as a file holds them.

        Raises:
            TypeError: a setting has the wrong type.
            ValueError: a setting is unknown or out of range.
        """
        known = _field_names(SparsityPolicy)
        _require_known("policy", settings, known)
        values = dict(settings)
        for name in ("dense_steps", "dense_layers"):
            if name in values:
                values[name] = intervals(name, values[name])
        if "patterns" in values:
            values["patterns"] = _patterns(values["patterns"])
        rules = values.get("rules", ())
        if not isinstance(rules, tuple | list):
            raise ValueError(f"rules must be a list of rules, got {_checks.shown(rules)}")
        values["rules"] = tuple(_rule(rule) for rule in rules)
        return SparsityPolicy(**values)

    @property
    def pattern_names(self) -> tuple[str, ...]:
        """Names of the patterns, in their order."""
        return tuple(name_of(pattern) for pattern in self.patterns)

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings by name, with lists instead of tuples and names of patterns."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        settings["patterns"] = self.pattern_names
        settings["rules"] = [_rule_settings(rule) for rule in self.rules]
        return _as_lists(settings)

    @staticmethod
    def from_file(path: str | os.PathLike[str]) -> "SparsityPolicy":
        """Reads a policy from a `.json`, `.yaml` or `.yml` file; missing settings are defaults.

        Raises:
            FileNotFoundError: there is no such file.
            ImportError: it is YAML and PyYAML is not installed.
            ValueError: the file is damaged or holds no valid policy.
        """
        content = files.read(path)
        with reading(path, files.EXPECTED):
            return SparsityPolicy.from_dict(content)

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Writes the policy to a `.json`, `.yaml` or `.yml` file, whole or not at all.

        Raises:
            ValueError: the suffix is unknown, or the policy has a pattern that is not in
                `PATTERNS`, which a file cannot name.
        """
        for pattern in self.patterns:
            if isinstance(pattern, Pattern):
                raise ValueError(
                    f"patterns must be in PATTERNS for a file to name them, got {pattern.name!r}"
                )
        files.write(path, self.to_dict())

    def densities(
        self,
        step: int,
        layer: int,
        *,
        num_steps: int | None = None,
        num_layers: int | None = None,
        expert: str | None = None,
    ) -> tuple[float, ...] | None:
        """Density of each pattern in one step and layer; None where attention is dense.

        Args:
            step: index of the denoising step, from 0.
            layer: index of the layer, from 0.
            num_steps: steps of the run; needed where the policy has fractions of them.
            num_layers: layers of the model, needed for fractions of layers.
            expert: "high_noise" or "low_noise" for Wan 2.2; None for other models.
        """
        rounding = self.fraction_rounding
        if any(contains(item, step, num_steps, rounding) for item in self.dense_steps):
            return None
        if any(contains(item, layer, num_layers, rounding) for item in self.dense_layers):
            return None
        densities = dict.fromkeys(self.pattern_names, self.density)
        for rule in self.rules:
            if rule.expert not in (None, expert):
                continue
            if rule.steps is not None and not contains(rule.steps, step, num_steps, rounding):
                continue
            if rule.layers is not None and not contains(rule.layers, layer, num_layers, rounding):
                continue
            chosen = self.patterns if rule.pattern is None else (rule.pattern,)
            densities.update(dict.fromkeys(map(name_of, chosen), rule.density))
        return tuple(densities.values())


def _density(name: str, value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {_checks.shown(value)}")
    return _checks.fraction(name, value)


def _rules(rules: Any) -> tuple[DensityRule, ...]:
    if not isinstance(rules, tuple | list):
        raise TypeError(f"rules must be a tuple of DensityRule, got {_checks.shown(rules)}")
    for rule in rules:
        if not isinstance(rule, DensityRule):
            raise TypeError(f"rules must hold DensityRule, got {type(rule).__name__}")
    if len(rules) > MAX_ENTRIES:
        raise ValueError(f"rules must be at most {MAX_ENTRIES}, got {len(rules):,}")
    return tuple(rules)


def _patterns(patterns: Any) -> tuple[str | Pattern, ...]:
    if not isinstance(patterns, tuple | list) or not patterns:
        raise ValueError(f"patterns must name at least one pattern, got {_checks.shown(patterns)}")
    canonical = tuple(canonical_pattern("patterns", pattern) for pattern in patterns)
    names = tuple(map(name_of, canonical))
    if len(set(names)) < len(names):
        raise ValueError(f"patterns must name none twice, got {_checks.shown(names)}")
    return canonical


def _rule(settings: Any) -> DensityRule:
    if isinstance(settings, DensityRule):
        return settings
    _require_known("rule", settings, _field_names(DensityRule))
    if "density" not in settings:
        raise ValueError(f"rule must have a density, got {_checks.shown(dict(settings))}")
    values = dict(settings)
    for name in ("steps", "layers"):
        if values.get(name) is not None:
            values[name] = interval(name, values[name])
    return DensityRule(**values)


def _rule_settings(rule: DensityRule) -> dict[str, Any]:
    settings = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    if rule.pattern is not None:
        settings["pattern"] = name_of(rule.pattern)
    return {name: value for name, value in settings.items() if value is not None}


def _require_known(what: str, settings: Any, known: tuple[str, ...]) -> None:
    if not isinstance(settings, Mapping):
        raise ValueError(f"{what} must be settings by name, got {type(settings).__name__}")
    unknown = [str(name) for name in settings if name not in known]
    if unknown:
        listed = ", ".join(_checks.shown(name)[1:-1] for name in unknown[:8])
        raise ValueError(f"{what} has no {listed}; it takes {', '.join(known)}")


def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_lists(item) for name, item in value.items()}
    return [_as_lists(item) for item in value] if isinstance(value, tuple | list) else value
