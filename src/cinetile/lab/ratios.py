"""When measured times allow a statement: speed-ups and shares, or the reason why there is none."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_ROUNDS = 3
"""Rounds below which nothing is stated."""
_COVERAGE = 0.95


@dataclass(frozen=True)
class Stated:
    """A speed-up or a share, or the reason why the measurement does not support it.

    Attributes:
        value: the figure; None where it cannot be stated.
        reason: why not; None where it can.
    """

    value: float | None
    reason: str | None = None

    def to_dict(self, name: str) -> dict[str, float | str | None]:
        """Entries for a JSON document: the figure as `name`, the reason as `no_<name>_reason`."""
        return {name: self.value, f"no_{name}_reason": self.reason}

    def words(self, unit: str = "x") -> str:
        """The figure for a table, "-" where there is none."""
        return "-" if self.value is None else f"{self.value:.2f}{unit}"


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """An interval that holds the true median with a confidence of 95 %, whatever the distribution.

    Of n sorted samples, the median lies between number k + 1 and number n - k with probability
    1 - 2 P(B <= k), where B counts n tosses of a fair coin. Up to 8 samples no k > 0 gives 95 %, so
    the interval runs from the shortest to the longest time.
    """
    ordered = sorted(samples)
    count = len(ordered)
    below, skipped = 0.5**count, 0
    while True:
        below += math.comb(count, skipped + 1) * 0.5**count
        if 1 - 2 * below < _COVERAGE:
            return ordered[skipped], ordered[count - 1 - skipped]
        skipped += 1


def differs(first: Sequence[float], second: Sequence[float]) -> str | None:
    """None if the samples tell the two medians apart; else the reason why they do not.

    Args:
        first: times of one candidate, one entry per interleaved round.
        second: times of the other candidate in the same rounds.
    """
    rounds = min(len(first), len(second))
    if rounds < MIN_ROUNDS:
        counted = f"{rounds} round" + ("" if rounds == 1 else "s")
        return f"measured in {counted}, at least {MIN_ROUNDS} are needed"
    (low, high), (other_low, other_high) = median_interval(first), median_interval(second)
    if low <= other_high and other_low <= high:
        return f"the times overlap: {low:.3g} to {high:.3g} and {other_low:.3g} to {other_high:.3g}"
    return None


def speedup(before: Sequence[float], after: Sequence[float]) -> Stated:
    """How many times as fast `after` is: the median of `before` over that of `after`.

    Below 1 where `after` is slower.

    Args:
        before: times, one entry per interleaved round.
        after: times in the same rounds.
    """
    reason = differs(before, after)
    if reason is not None:
        return Stated(None, reason)
    return Stated(statistics.median(before) / statistics.median(after))


def share(whole: Sequence[float], rest: Sequence[float]) -> Stated:
    """The share of `whole` that is not `rest`, both measured in the same rounds: in (0, 1).

    Args:
        whole: times of everything, one entry per interleaved round.
        rest: times of everything but the part in question, in the same rounds.
    """
    reason = differs(whole, rest)
    if reason is None and statistics.median(rest) > statistics.median(whole):
        reason = "without the part in question it takes longer"
    if reason is not None:
        return Stated(None, reason)
    return Stated(statistics.median(1 - r / w for w, r in zip(whole, rest, strict=True)))


def speedup_without(
    before: Sequence[float], after: Sequence[float], rest: Sequence[float]
) -> Stated:
    """`speedup` of what is left when `rest` is taken from both, round by round.

    Args:
        before: times, one entry per interleaved round.
        after: times in the same rounds.
        rest: times in the same rounds of what both have in common.
    """
    for times in (before, after):
        found = share(times, rest)
        if found.value is None:
            return found
    return speedup(
        [time - common for time, common in zip(before, rest, strict=True)],
        [time - common for time, common in zip(after, rest, strict=True)],
    )
