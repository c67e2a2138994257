"""Half-open ranges of steps or layers, by index or as fractions of how many there are."""

import math
from typing import Any

from cinetile import _checks

FRACTION_ROUNDINGS: tuple[str, ...] = ("up", "down")

Interval = tuple[int | float, int | float | None]
"""`(start, stop)`: ints are indices, floats in [0, 1] fractions; stop None is the end."""

MAX_CALLS = 200_000
"""Most attention calls (steps x layers) that a policy is resolved for."""
MAX_ENTRIES = 64
"""Most intervals, and most rules, of a policy."""


def require_countable(num_steps: int, num_layers: int) -> None:
    """Raises ValueError if there are more steps and layers than a policy is resolved for."""
    if num_steps * num_layers > MAX_CALLS:
        raise ValueError(
            f"num_steps times num_layers must be at most {MAX_CALLS:,} attention calls, got "
            f"{_checks.shown(num_steps)} x {_checks.shown(num_layers)}"
        )


def interval(name: str, value: Any) -> Interval:
    """Returns `value` as an interval, or raises an error that names the argument."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name} must be a pair (start, stop), got {_checks.shown(value)}")
    start = _bound(f"{name}[0]", value[0])
    if value[1] is None:
        return start, None
    stop = _bound(f"{name}[1]", value[1])
    # 0 is the beginning either way; any other mixture is a slip, as 1 for the end.
    if start != 0 and isinstance(start, float) != isinstance(stop, float):
        raise ValueError(
            f"{name} must hold two indices or two fractions, got {[start, stop]}; "
            "1.0 or None is the end, 1 the index"
        )
    if start >= stop and stop != 0:  # 0 is none of them
        raise ValueError(f"{name} must start before it stops, got {[start, stop]}")
    return start, stop


def intervals(name: str, value: Any) -> tuple[Interval, ...]:
    """Returns `value` as intervals; one number stands for all up to it.

    Raises:
        TypeError: a bound is no number.
        ValueError: `value` is no list of pairs, or a bound is out of range.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        stop = _bound(name, value)
        return ((0, stop),) if stop else ()
    if not isinstance(value, tuple | list):
        raise ValueError(
            f"{name} must be a number or a list of pairs (start, stop), got {_checks.shown(value)}"
        )
    if len(value) > MAX_ENTRIES:
        raise ValueError(f"{name} must hold at most {MAX_ENTRIES} pairs, got {len(value):,}")
    return tuple(interval(f"{name}[{index}]", entry) for index, entry in enumerate(value))


def contains(entry: Interval, index: int, count: int | None, rounding: str = "up") -> bool:
    """Whether an index lies in an interval of `count` things; None where that is not known.

    Args:
        entry: the interval.
        index: the index of a step or layer.
        count: how many there are.
        rounding: "up" or "down": how a fraction of `count` becomes a whole index.

    Raises:
        ValueError: a fraction must be resolved and the count is not known.
    """
    start, stop = (_resolve(bound, count, rounding) for bound in entry)
    return start <= index and (stop is None or index < stop)


def last_bound(many: tuple[Interval, ...]) -> int:
    """The largest index at which one of the intervals starts or stops."""
    return max((bound for entry in many for bound in entry if isinstance(bound, int)), default=0)


def _bound(name: str, value: Any) -> int | float:
    if isinstance(value, float):
        fraction = _checks.finite(name, value)
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"{name} must lie in [0, 1] as a fraction, got {fraction}")
        return fraction
    return _checks.integer(name, value, minimum=0, maximum=MAX_CALLS)


def _resolve(bound: int | float | None, count: int | None, rounding: str) -> Any:
    if not isinstance(bound, float):
        return bound
    if count is None:
        raise ValueError(
            f"num_steps and num_layers must be given where a policy has fractions, as {bound}"
        )
    # A fraction that hits an index but for rounding errors must not move to the next one.
    if rounding == "down":
        return math.floor(bound * count + 1e-9)
    return math.ceil(bound * count - 1e-9)
