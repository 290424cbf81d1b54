from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taas.errors import RequestError
from taas.flavors import FLAVORS
from taas.request import LoaderRef, TrainRequest
from taas_tasks import plan
from taas_tasks.values import Inspection, LoaderPlan, PinnedRequest, Plan, SegmentSizes, Versions

SIZES = st.builds(
    lambda first, times, rest, machines: SegmentSizes(first=first, largest=first * times + rest, machines=machines),
    first=st.sampled_from([1, 2, 8, 32, 64]),
    times=st.integers(1, 40),
    rest=st.sampled_from([0, 32]),
    machines=st.integers(1, 8),
)


def inspection(**changes: object) -> Inspection:
    values: dict[str, object] = {
        "loader": "data",
        "kind": "map",
        "order": "recipe",
        "epoch_length": 10_000,
        "claimed_length": 10_000,
        "num_loader_workers": 2,
        "batch_size": 8,
        "element_bytes": 100_000.0,
        "element_seconds": 0.01,
        "sampled_elements": 16,
        "versions": Versions(python="3.11"),
    }
    return Inspection.model_validate(values | changes)


def pinned(**changes: object) -> PinnedRequest:
    values: dict[str, object] = {
        "project": "demo",
        "script": "train.py",
        "cpus": 4,
        "units": 20_000,
        "loaders": {"data": LoaderRef(source="data.py:make")},
    }
    request = TrainRequest.model_validate(values | changes)
    return PinnedRequest(run_id="r", run="r-1", request=request, snapshot="ab" * 32, base_record=1)


def planned(of: dict[str, object] | None = None, **changes: object) -> Plan:
    return plan.make_plan(pinned(**changes), {"data": inspection(**(of or {}))}, FLAVORS)


# --- segments -------------------------------------------------------------------------------------------------------


@given(sizes=SIZES)
def test_segments_follow_one_another_and_double_per_round_up_to_the_largest(sizes: SegmentSizes) -> None:
    size, awaited = sizes.first, 0
    for n in range(sizes.machines * 10):
        if n and n % sizes.machines == 0:
            size = min(size * 2, sizes.largest)
        assert plan.segment_bounds(sizes, n) == (awaited, awaited + size)
        awaited += size


@given(sizes=SIZES, index=st.integers(0, 10**12))
def test_segment_of_finds_the_segment_that_holds_an_element(sizes: SegmentSizes, index: int) -> None:
    start, stop = plan.segment_bounds(sizes, plan.segment_of(sizes, index))
    assert start <= index < stop


@given(sizes=SIZES, length=st.integers(0, 5000))
def test_num_segments_covers_an_epoch_and_no_more(sizes: SegmentSizes, length: int) -> None:
    count = plan.num_segments(sizes, length)
    covered = sum(1 for n in range(count) for _ in range(*plan.segment_bounds(sizes, n)) if _ < length)
    assert covered == length
    assert count == 0 or plan.segment_bounds(sizes, count - 1)[0] < length


@given(machines=st.integers(2, 8), epoch=st.integers(0, 50), n=st.integers(0, 500))
def test_every_other_machine_is_a_helper_of_a_segment_once(machines: int, epoch: int, n: int) -> None:
    owner = plan.owner_of(epoch, n, machines=machines)
    helpers = [plan.helper_of(epoch, n, machines=machines, turn=turn) for turn in range(machines - 1)]
    assert sorted([owner, *helpers]) == list(range(machines))


def test_one_segment_epochs_give_every_machine_work() -> None:
    owners = [plan.owner_of(epoch, 0, machines=4) for epoch in range(400)]
    assert [owners.count(machine) for machine in range(4)] == [100] * 4


def test_first_helpers_of_one_machines_segments_are_spread_over_the_others() -> None:
    helpers = [plan.helper_of(0, n, machines=8, turn=0) for n in range(3, 800, 8)]
    assert all(helpers.count(machine) >= 14 for machine in range(8) if machine != 3)


def test_20_million_units_on_8_machines_cost_milliseconds() -> None:
    began = time.process_time()
    made = planned(units=20_480_000, cpus=8, of={"epoch_length": 20_480_000})
    loader = made.loaders["data"]
    total = plan.total_segments(loader)
    assert plan.segment_of(loader.sizes, 20_479_999) == total - 1
    assert time.process_time() - began < 0.5
    assert total <= 60_000


# --- epochs ---------------------------------------------------------------------------------------------------------


@given(units=st.integers(1, 10**6), length=st.integers(1, 10**5))
def test_epochs_of_one_length_add_up_to_the_units(units: int, length: int) -> None:
    epochs = plan.epochs_of(units, length)
    assert epochs.num is not None
    assert (epochs.num - 1) * length + (epochs.length_of(epochs.num - 1) or 0) == units
    assert epochs.start_of(epochs.num - 1) == (epochs.num - 1) * length
    assert epochs.length_of(epochs.num) == 0


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20), data=st.data())
def test_epochs_of_many_lengths_are_cut_at_the_units(lengths: list[int], data: st.DataObject) -> None:
    units = data.draw(st.integers(1, sum(lengths)))
    epochs = plan.epochs_of(units, None, lengths)
    assert sum(epochs.lengths) == units
    assert epochs.lengths[:-1] == tuple(lengths[: len(epochs.lengths) - 1])
    assert [epochs.start_of(epoch) for epoch in range(len(epochs.lengths) + 1)] == [
        sum(epochs.lengths[:epoch]) for epoch in range(len(epochs.lengths) + 1)
    ]
    assert all(epochs.lengths)


def test_epochs_of_an_unknown_length_are_unknown() -> None:
    epochs = plan.epochs_of(100, None)
    assert (epochs.num, epochs.length_of(0), epochs.start_of(1)) == (None, None, None)


def test_an_empty_epoch_and_too_few_elements_are_refused() -> None:
    with pytest.raises(ValueError, match="a length of 0"):
        plan.epochs_of(10, 0)
    with pytest.raises(ValueError, match="do not hold 10 units"):
        plan.epochs_of(10, None, [4, 5])


def test_segments_in_order_and_total_segments_agree() -> None:
    made = planned(units=2_500, cpus=2, of={"epoch_length": 1000})
    loader = made.loaders["data"]
    segments = list(plan.segments_in_order(loader))
    assert segments == sorted(segments)
    assert len(segments) == plan.total_segments(loader)
    assert {epoch for epoch, _ in segments} == {0, 1, 2}


# --- sizes ----------------------------------------------------------------------------------------------------------


@given(
    element_bytes=st.floats(1, 2**30),
    units=st.integers(1, 10**8),
    epoch_length=st.one_of(st.none(), st.integers(1, 10**8)),
    machines=st.integers(1, 8),
)
def test_sizes_are_small_first_bounded_and_even(
    element_bytes: float, units: int, epoch_length: int | None, machines: int
) -> None:
    cache = 64 << 30
    found = inspection(element_bytes=element_bytes, epoch_length=epoch_length)
    sizes = plan.choose_sizes(found, units=units, machines=machines, cache_bytes=cache)
    assert 1 <= sizes.first <= 32
    assert sizes.first <= sizes.largest
    assert sizes.largest % 32 == 0 or sizes.largest in (1, 2, 4, 8, 16)
    assert sizes.largest == 1 or sizes.largest * element_bytes <= 256 << 20
    assert sizes.largest * element_bytes <= cache


def test_a_segment_is_never_larger_than_a_fraction_of_the_cache() -> None:
    found = inspection(element_bytes=1 << 20)
    sizes = plan.choose_sizes(found, units=10**6, machines=1, cache_bytes=64 << 20)
    assert sizes.largest * (1 << 20) <= 8 << 20


def test_an_element_larger_than_the_cache_is_refused_with_both_numbers() -> None:
    with pytest.raises(RequestError, match=r"is 2\.0 GiB, the cache of a host is 1\.0 GiB"):
        plan.choose_sizes(inspection(element_bytes=2 << 30), units=10, machines=1, cache_bytes=1 << 30)


def test_few_elements_are_shared_by_all_machines() -> None:
    sizes = plan.choose_sizes(inspection(epoch_length=64), units=64, machines=8, cache_bytes=1 << 30)
    assert plan.num_segments(sizes, 64) >= 8


STREAMS: dict[str, object] = {
    "order": "sequential", "epoch_length": None, "kind": "iterable", "read_by": "workers", "num_streams": 4,
    "num_loader_workers": 4,
}  # fmt: skip


@given(
    element_bytes=st.floats(1, 2**28),
    element_seconds=st.floats(1e-7, 30),
    units=st.integers(1, 10**8),
    num_streams=st.integers(1, 128),
    cache=st.sampled_from([1 << 30, 8 << 30, 64 << 30]),
)
def test_sizes_of_streams_fit_the_machine_that_holds_all_and_the_cache_of_a_host(
    element_bytes: float, element_seconds: float, units: int, num_streams: int, cache: int
) -> None:
    found = inspection(
        **STREAMS | {"num_streams": num_streams, "element_bytes": element_bytes, "element_seconds": element_seconds}
    )
    sizes = plan.choose_sizes(found, units=units, machines=min(8, num_streams), cache_bytes=cache)
    assert sizes.machines == 1
    assert sizes.first <= sizes.largest
    assert sizes.first in (1, 2, 4, 8, 16, 32)
    assert sizes.largest % 32 == 0 or sizes.largest in (1, 2, 4, 8, 16)
    if sizes.largest > 1:
        assert num_streams * sizes.largest * element_bytes <= 1 << 30
        assert 2 * num_streams * sizes.largest * element_bytes <= cache


@given(units=st.integers(1, 10**8), element_seconds=st.floats(1e-7, 1), num_streams=st.integers(1, 64))
def test_streams_of_tiny_elements_have_about_50_000_segments_at_most(
    units: int, element_seconds: float, num_streams: int
) -> None:
    found = inspection(**STREAMS | {"num_streams": num_streams, "element_bytes": 8, "element_seconds": element_seconds})
    sizes = plan.choose_sizes(found, units=units, machines=1, cache_bytes=64 << 30)
    in_stream = -(-units // num_streams)
    assert num_streams * plan.num_segments(sizes, in_stream) <= 50_000 + num_streams * 32


@pytest.mark.parametrize(("num_streams", "first"), [(1, 32), (3, 32), (4, 8), (6, 16), (8, 4), (32, 1), (64, 1)])
def test_the_first_segments_of_streams_are_as_small_as_even_lanes_allow(num_streams: int, first: int) -> None:
    found = inspection(**STREAMS | {"num_streams": num_streams})
    assert plan.choose_sizes(found, units=10**6, machines=1, cache_bytes=64 << 30).first == first


@pytest.mark.parametrize(("units", "machines"), [(10_000, 1), (10_000, 4), (10**6, 8)])
def test_training_waits_for_a_small_part_of_the_work_at_the_end(units: int, machines: int) -> None:
    found = inspection(element_bytes=8, element_seconds=0.01, num_loader_workers=1, epoch_length=units)
    sizes = plan.choose_sizes(found, units=units, machines=machines, cache_bytes=64 << 30)
    assert sizes.largest <= max(64, units / machines / 32)
    quick = inspection(element_bytes=8, element_seconds=1e-6, num_loader_workers=1, epoch_length=units)
    assert plan.choose_sizes(quick, units=units, machines=1, cache_bytes=64 << 30).largest == 500_000 // 32 * 32


def test_no_segment_takes_long_to_make_unless_there_would_be_too_many() -> None:
    slow = inspection(element_bytes=100, element_seconds=0.5, num_loader_workers=2, epoch_length=10**6)
    sizes = plan.choose_sizes(slow, units=10**6, machines=1, cache_bytes=64 << 30)
    assert sizes.largest * 0.5 / 2 <= 20
    sizes = plan.choose_sizes(slow, units=10**9, machines=1, cache_bytes=64 << 30)
    assert sizes.largest >= 10**9 / 50_000 - 32


# --- the plan -------------------------------------------------------------------------------------------------------


def test_a_plan_says_where_training_and_preparation_run() -> None:
    made = planned(gpus=16)
    assert (made.nnodes, made.nproc_per_node, made.world_size, made.cpus) == (2, 8, 16, 4)
    loader = made.loaders["data"]
    assert (loader.units, loader.machines, loader.source) == (20_000, 4, "data.py:make")
    assert Plan.model_validate_json(made.to_bytes()) == made


def test_a_loader_may_carry_its_own_units() -> None:
    made = planned(loaders={"data": LoaderRef(source="data.py:make", units=77)})
    assert made.loaders["data"].units == 77


IN_SEQUENCE: dict[str, object] = {"order": "sequential", "epoch_length": None, "kind": "iterable"}


@pytest.mark.parametrize(
    ("of", "machines"),
    [
        (IN_SEQUENCE | {"read_by": "process"}, 1),
        (IN_SEQUENCE | {"read_by": "workers", "num_streams": 3}, 3),
        (IN_SEQUENCE | {"read_by": "workers", "num_streams": 3, "is_shared": False}, 1),
    ],
)
def test_what_few_machines_can_share_gets_no_more_and_the_plan_says_so(of: dict[str, object], machines: int) -> None:
    made = planned(of)
    assert made.loaders["data"].machines == machines
    assert any(f"{machines} of the 4" in text for text in made.warnings)


def test_a_reading_that_does_not_fit_its_order_is_refused() -> None:
    with pytest.raises(ValueError, match="read_by is 'index'"):
        inspection(**IN_SEQUENCE)  # type: ignore[arg-type]


def test_a_request_without_loaders_prepares_nothing() -> None:
    made = plan.make_plan(pinned(cpus=None, units=None, loaders={}), {}, FLAVORS)
    assert made.loaders == {}
    assert "preparation: none" in plan.describe(made, FLAVORS)


def test_dropping_the_remainder_is_refused_when_it_leaves_no_step() -> None:
    with pytest.raises(RequestError, match="leaves no step") as caught:
        planned({"epoch_length": 7}, remainder="drop")
    assert caught.value.fields["faults"][0]["field"] == "remainder"


def test_a_plan_that_costs_more_than_allowed_is_refused() -> None:
    # 20,000 elements of 0.01 s, two at once per machine, at 4 units of price a second
    with pytest.raises(RequestError, match="estimated at 400 units of price, max_cost is 100"):
        planned(max_cost=100)


def test_a_plan_for_people_names_bytes_seconds_price_and_warnings() -> None:
    made = planned({"warnings": ["len() claims 3"]})
    text = plan.describe(made, FLAVORS)
    for part in ("1 x g2.8 = 8 ranks", "20,000 elements", "1.9 GiB in all", "4 x c1.4", "25 s", "400 units of price"):
        assert part in text
    assert "warning: loader 'data': len() claims 3" in text


def test_very_many_short_epochs_are_warned_of() -> None:
    made = planned({"epoch_length": 29}, units=20_480_000)
    assert any("segments, as an epoch has only 29 elements" in text for text in made.warnings)


def test_streams_are_spread_over_the_machines_in_turn() -> None:
    assert [plan.stream_owner(stream, machines=3) for stream in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("num_streams", "cpus", "told"),
    [
        (4, 4, None),
        (8, 4, None),
        (6, 4, "its 6 streams are uneven on 4 machines: 2 of them read 2, the others 1; 3 machines would be as quick"),
        (5, 3, "its 5 streams are uneven on 3 machines: 2 of them read 2, the others 1"),
    ],
)
def test_streams_that_do_not_divide_among_the_machines_are_told(num_streams: int, cpus: int, told: str | None) -> None:
    made = planned(STREAMS | {"num_streams": num_streams, "num_loader_workers": num_streams}, cpus=cpus)
    assert made.warnings == ([] if told is None else [f"loader 'data': {told}"])


def test_a_plan_of_streams_says_on_how_many_machines_they_are_read_and_what_that_costs() -> None:
    made = planned(STREAMS, cpus=2)
    loader = made.loaders["data"]
    assert plan.total_segments(loader) is None
    with pytest.raises(ValueError, match="not known before they are committed"):
        list(plan.segments_in_order(loader))
    assert plan.preparation_seconds(loader) == pytest.approx(20_000 / 4 * 0.01)
    text = plan.describe(made, FLAVORS)
    # 50 s on two machines of 4 units of price a second
    for part in ("as 4 streams of its loader workers on 2 x c1.4 in about 50 s", "400 units of price"):
        assert part in text


def test_streams_of_very_many_short_epochs_are_warned_of() -> None:
    made = planned(STREAMS | {"kind": "map", "order": "recipe", "epoch_length": 29}, units=20_480_000, cpus=4)
    assert any("segments, as an epoch has only 29 elements" in text for text in made.warnings)


def test_dropping_the_remainder_is_refused_when_every_epoch_is_too_short() -> None:
    lengths = [5, 6, 7] * 7000
    with pytest.raises(RequestError, match="gives 7 elements in a pass"):
        planned({"order": "chunks", "epoch_length": None, "epoch_lengths": lengths}, remainder="drop")
    assert planned({"order": "chunks", "epoch_length": None, "epoch_lengths": [5, 20_000]}, remainder="drop").loaders


def test_dropping_the_remainder_of_streams_of_unknown_length_is_refused_for_too_few_units() -> None:
    with pytest.raises(RequestError, match="gives 7 elements in a pass, fewer than the 8 ranks"):
        planned(STREAMS, units=7, remainder="drop")


def test_all_segments_of_a_plan_have_an_owner_among_the_machines() -> None:
    loader: LoaderPlan = planned(units=5_000).loaders["data"]
    owners = {
        plan.owner_of(e, n, machines=loader.machines) for e, n in itertools.islice(plan.segments_in_order(loader), 99)
    }
    assert owners == {0, 1, 2, 3}
