from __future__ import annotations

import time

import pytest

from taas_tasks.launch.clock import findings, skew_s
from taas_tasks.store import ObjectStore
from taas_tasks.store.memory import MemoryStore


def test_clock_that_is_right_has_no_skew() -> None:
    assert skew_s(MemoryStore(), "clock") == 0.0


@pytest.mark.parametrize(("off_s", "word"), [(1000.0, "ahead of"), (-1000.0, "behind")])
def test_clock_that_is_off_is_told_with_its_size_and_both_limits(off_s: float, word: str) -> None:
    skew = skew_s(MemoryStore(), "clock", clock=lambda: time.time() + off_s)
    assert skew == pytest.approx(off_s, abs=2.0)
    (found,) = findings(skew)
    assert f"s {word} the object store's" in found
    assert "60 s" in found
    assert "900 s" in found


def test_a_minute_is_allowed() -> None:
    assert findings(59.0) == []
    assert findings(-61.0) != []


@pytest.mark.parametrize("off_s", [0.0, 1000.0, -1000.0])
def test_real_store_dates_tell_how_far_the_clock_is_off(s3_store: ObjectStore, off_s: float) -> None:
    found = skew_s(s3_store, "clock", clock=lambda: time.time() + off_s)
    assert found == pytest.approx(off_s, abs=2.0)
