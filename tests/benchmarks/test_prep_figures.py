from __future__ import annotations

import pytest

from benchmarks.delivery.memory import by_epoch, slope
from benchmarks.delivery.prep import together
from benchmarks.delivery.preparing import Load, Measured


def measured(rate: float, *, start: float, count: int = 40) -> Measured:
    return Measured(start, [(n, start + n / rate) for n in range(4, count + 1, 4)], 0.0, 0)


def test_the_rate_of_machines_is_that_of_the_time_they_share() -> None:
    assert together([measured(10, start=0)]) == pytest.approx(10)
    assert together([measured(10, start=0), measured(10, start=0.5)]) == pytest.approx(20)
    assert together([measured(10, start=0), measured(10, start=9)]) is None


def test_the_steady_rate_leaves_out_a_slow_start() -> None:
    slow = Measured(0, [(10, 9.0), (20, 10.0), (30, 11.0)], 0.0, 0)
    assert slow.rate(behind=10) == pytest.approx(10)


def test_a_growth_shows_in_the_slope_and_the_first_epoch_does_not() -> None:
    assert slope([500, 10, 10, 10]) == 0
    assert slope([0, 10, 12, 14, 16]) == pytest.approx(2)
    assert by_epoch([(0.5, 1 << 20), (1.5, 3 << 20), (1.6, 5 << 20)], [1.0, 2.0]) == [1, 4]


def test_fewer_units_are_still_whole_lanes() -> None:
    assert Load("waits_4", 224, workers=4, sizes=(8, 16)).of(0.6).units == 128
