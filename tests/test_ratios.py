"""Speed-ups and shares are stated only where the rounds support them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cinetile.lab.ratios import Stated, median_interval, share, speedup, speedup_without

TIMES = st.lists(st.floats(0.1, 1000.0), min_size=1, max_size=20)


class TestMedianInterval:
    @pytest.mark.parametrize(
        ("count", "skipped"), [(1, 0), (3, 0), (8, 0), (9, 1), (12, 2), (20, 5), (50, 17)]
    )
    def test_leaves_out_what_the_sign_test_allows(self, count: int, skipped: int) -> None:
        samples = [float(number) for number in range(count)]
        assert median_interval(samples[::-1]) == (skipped, count - 1 - skipped)
        outside = sum(math.comb(count, number) for number in range(skipped + 1)) / 2**count
        assert count <= 5 or 1 - 2 * outside >= 0.95

    @given(TIMES)
    def test_holds_the_median(self, times: list[float]) -> None:
        low, high = median_interval(times)
        assert low <= sorted(times)[len(times) // 2] <= high


class TestSpeedup:
    def test_is_the_ratio_of_medians(self) -> None:
        assert speedup([10.0, 12.0, 11.0], [5.0, 5.5, 6.0]) == Stated(2.0)

    def test_may_be_below_1(self) -> None:
        assert speedup([5.0, 5.5, 6.0], [11.0, 11.0, 11.0]) == Stated(0.5)

    @pytest.mark.parametrize(
        ("rounds", "words"), [(1, "measured in 1 round,"), (2, "measured in 2 rounds,")]
    )
    def test_needs_three_rounds(self, rounds: int, words: str) -> None:
        found = speedup([10.0] * rounds, [1.0] * rounds)
        assert found.value is None
        assert str(found.reason).startswith(words)

    def test_is_not_stated_where_times_overlap(self) -> None:
        found = speedup([10.0, 12.0, 6.0], [5.0, 5.5, 6.5])
        assert found == Stated(None, "the times overlap: 6 to 12 and 5 to 6.5")
        assert found.words() == "-"
        assert found.to_dict("speedup") == {"speedup": None, "no_speedup_reason": found.reason}

    @given(TIMES)
    def test_is_never_stated_of_the_same_times(self, times: list[float]) -> None:
        assert speedup(times, times).value is None

    @given(TIMES, TIMES)
    def test_agrees_with_itself_the_other_way_round(
        self, first: list[float], second: list[float]
    ) -> None:
        there, back = speedup(first, second), speedup(second, first)
        assert (there.value is None) == (back.value is None)
        if there.value is not None and back.value is not None:
            assert there.value * back.value == pytest.approx(1.0)


class TestShare:
    def test_is_of_the_same_rounds(self) -> None:
        assert share([10.0, 20.0, 40.0], [4.0, 8.0, 9.0]).value == pytest.approx(0.6)

    def test_is_never_negative(self) -> None:
        found = share([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
        assert found == Stated(None, "without the part in question it takes longer")

    @given(st.lists(st.tuples(st.floats(0.1, 99.0), st.floats(0.1, 99.0)), min_size=1))
    def test_is_a_share(self, rounds: list[tuple[float, float]]) -> None:
        whole, rest = zip(*rounds, strict=True)
        found = share(whole, rest)
        assert (found.value is None) == (found.reason is not None)
        assert found.value is None or 0 < found.value < 1


class TestSpeedupWithout:
    def test_takes_the_common_part_from_both(self) -> None:
        rest = [1.0, 2.0, 3.0]
        before, after = [11.0, 12.0, 13.0], [6.0, 7.0, 8.0]
        assert speedup_without(before, after, rest) == Stated(2.0)

    def test_gives_the_reason_of_the_part_that_cannot_be_told(self) -> None:
        found = speedup_without([9.0, 9.0, 9.0], [1.0, 1.0, 1.1], [1.0, 1.0, 1.0])
        assert found.value is None
        assert str(found.reason).startswith("the times overlap")
