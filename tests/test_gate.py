from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taas.errors import RequestError
from taas_tasks import gate
from taas_tasks.values import GateDecision, LoaderPlan, Watermark
from tests.test_ledger import loader_plan
from tests.test_ledger_reader import merged_plan


def mark(units: int, asked: int = 1000, loader: str = "data") -> Watermark:
    return Watermark(loader=loader, units=units, asked=asked, num_segments=1, complete=units == asked)


def decide(start: str | int | float, units: int, *, world_size: int = 8, **more: object) -> GateDecision:
    return gate.decide(
        start, loaders={"data": loader_plan(1000, 1000)}, watermarks=[mark(units)], world_size=world_size, **more
    )


@pytest.mark.parametrize(
    ("start", "opens_at"),
    [("auto", 8), ("all", 1000), (300, 300), (0.25, 250), (0.2501, 251), (5000, 1000), (1.0, 1000), (1, 1), (0, 0)],
)
def test_the_gate_opens_at_the_starting_units_and_not_before(start: str | int | float, opens_at: int) -> None:
    assert decide(start, opens_at).is_open
    assert decide(start, opens_at).starts_at_units == {"data": opens_at}
    if opens_at:
        assert not decide(start, opens_at - 1).is_open


def test_auto_waits_for_one_step_of_every_rank() -> None:
    # the first segments of the two machines hold 8 elements
    assert decide("auto", 31, world_size=8).is_open
    assert not decide("auto", 31, world_size=32).is_open
    assert decide("auto", 32, world_size=32).is_open


def test_auto_with_fewer_units_than_ranks_waits_for_all_of_them() -> None:
    loaders = {"data": loader_plan(5, 5)}
    found = gate.decide("auto", loaders=loaders, watermarks=[mark(5, 5)], world_size=8)
    assert found.is_open
    assert found.starts_at_units == {"data": 5}


@pytest.mark.parametrize(("num_streams", "world_size", "starts_at"), [(5, 2, 5), (5, 8, 8), (3, 1, 3)])
def test_auto_waits_for_the_first_segment_of_every_stream(num_streams: int, world_size: int, starts_at: int) -> None:
    loaders = {"data": merged_plan(1000, num_streams)}  # first segments of 1 element
    found = gate.decide("auto", loaders=loaders, watermarks=[mark(starts_at - 1)], world_size=world_size)
    assert not found.is_open
    assert found.starts_at_units == {"data": starts_at}
    assert gate.decide("auto", loaders=loaders, watermarks=[mark(starts_at)], world_size=world_size).is_open


@pytest.mark.parametrize("start", ["soon", -1, 1.5, True])
def test_a_start_that_means_nothing_is_refused_with_what_is_allowed(start: str | int | float) -> None:
    with pytest.raises(RequestError, match='allowed: "auto", "all", a number of units, or a fraction'):
        decide(start, 0)


def test_the_latest_loader_decides() -> None:
    loaders: dict[str, LoaderPlan] = {"a": loader_plan(1000, 1000), "b": loader_plan(1000, 1000)}
    marks = [mark(900, loader="a"), mark(10, loader="b")]
    found = gate.decide(0.5, loaders=loaders, watermarks=marks, world_size=8)
    assert not found.is_open
    assert found.reason == "b: 1 % there, starts at 50 %"
    assert found.watermarks == marks


def test_a_loader_without_a_watermark_keeps_the_gate_closed() -> None:
    found = gate.decide("auto", loaders={"data": loader_plan(1000, 1000)}, watermarks=[], world_size=8)
    assert not found.is_open
    assert found.reason.startswith("data: 0 % there")


def test_without_loaders_the_gate_is_open() -> None:
    assert gate.decide("auto", loaders={}, watermarks=[], world_size=8).is_open


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (0.72, "data: 61 % there, starts at 74 %, in about 3 min"),
        (20.0, "data: 61 % there, starts at 74 %, in about 6 s"),
        (0.01, "data: 61 % there, starts at 74 %, in about 3.6 h"),
        (None, "data: 61 % there, starts at 74 %"),
    ],
)
def test_the_sentence_tells_how_far_it_is_and_when_it_starts(rate: float | None, expected: str) -> None:
    rates = {} if rate is None else {"data": rate}
    assert decide(0.74, 610, units_per_second=rates).reason == expected


def test_the_sentence_of_an_open_gate_says_that_it_is_enough() -> None:
    assert decide(0.5, 1000).reason == "data: 100 % there, enough to start (50 %)"


@given(
    start=st.one_of(st.sampled_from(["auto", "all"]), st.integers(0, 2000), st.floats(0, 1)), units=st.integers(0, 1000)
)
def test_a_gate_never_asks_for_more_than_is_asked_and_all_units_open_it(start: str | int | float, units: int) -> None:
    found = decide(start, units)
    assert found.starts_at_units["data"] <= 1000
    assert found.is_open == (units >= found.starts_at_units["data"])
    assert decide(start, 1000).is_open
