"""The books of a loader: what closes, what is explained, what is not."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taas_tasks.accounting import account_loader, expected_steps
from taas_tasks.result_values import RankPass
from taas_tasks.values import Inspection, LoaderPlan, SegmentSizes, ShardRecord, Versions
from tests.test_ledger_reader import SHAPES, merged_plan, produced, stream_record


def loader_plan(units: int) -> LoaderPlan:
    inspection = Inspection(
        loader="data_loader",
        kind="map",
        order="recipe",
        epoch_length=None,
        claimed_length=None,
        num_loader_workers=0,
        batch_size=1,
        element_bytes=8,
        element_seconds=0.001,
        sampled_elements=1,
        versions=Versions(python="3.11"),
    )
    sizes = SegmentSizes(first=32, largest=32, machines=1)
    return LoaderPlan(loader="data_loader", units=units, machines=1, inspection=inspection, sizes=sizes)


def record(epoch: int, length: int, *, is_last: bool = True) -> ShardRecord:
    return ShardRecord(
        loader="data_loader",
        epoch=epoch,
        stream=0,
        n=0,
        start=0,
        stop=length,
        last_of_epoch=is_last,
        epoch_length=length if is_last else None,
        key="k",
        num_bytes=1,
        schema_length=1,
        schema_crc32=0,
        lanes=[],
        content_digest="d",
        machine=0,
        host="c1-0",
        generation=1,
        started_at=0.0,
        committed_at=1.0,
        load_s=0.0,
        encode_s=0.0,
        upload_s=0.0,
    )


def rank_pass(rank: int, number: int, epoch: int, steps: int, **more) -> RankPass:
    values = {"offset": 0, "complete": True, "replay": False, "wait_s": 0.0, "num_bytes": 0} | more
    return RankPass(loader="data_loader", rank=rank, number=number, epoch=epoch, num_steps=steps, **values)


def books(lengths: list[int], passes: list[RankPass], *, world_size: int, remainder: str = "pad", units=None):
    return account_loader(
        loader_plan(sum(lengths) if units is None else units),
        records=[record(epoch, length) for epoch, length in enumerate(lengths)],
        passes=passes,
        world_size=world_size,
        remainder=remainder,
        delivered=sum(lengths),
    )


def closes(account) -> bool:
    return account.consumed == (
        account.committed - account.dropped - account.unread + account.padded + account.replayed
    )


def test_full_passes_with_padding_close_and_are_explained():
    account = books([10], [rank_pass(rank, 0, 0, 3) for rank in range(4)], world_size=4)
    assert (account.consumed, account.padded, account.unread, account.dropped) == (12, 2, 0, 0)
    assert closes(account)
    assert account.explained


def test_dropped_remainder_is_counted_and_explained():
    account = books([10], [rank_pass(rank, 0, 0, 2) for rank in range(4)], world_size=4, remainder="drop")
    assert (account.consumed, account.dropped, account.unread) == (8, 2, 0)
    assert closes(account)
    assert account.explained


def test_an_early_break_leaves_unread_elements_with_a_reason():
    account = books([40], [rank_pass(rank, 0, 0, 4, complete=False) for rank in range(4)], world_size=4)
    assert (account.consumed, account.unread) == (16, 24)
    assert closes(account)
    assert account.explained
    assert "stopped before the end" in account.notes[0]


def test_iteration_on_rank_0_alone_is_explained():
    account = books([8], [rank_pass(0, 0, 0, 2)], world_size=4)
    assert account.unread == 6
    assert account.explained
    assert "3 ranks (1..3) did not iterate" in account.notes[0]


def test_an_epoch_that_no_pass_read_is_explained():
    account = books([8, 8], [rank_pass(rank, 0, 0, 2) for rank in range(4)], world_size=4)
    assert account.unread == 8
    assert account.explained
    assert "epoch 1 (8 elements) was not read" in account.notes[0]


def test_more_passes_than_epochs_are_replays():
    passes = [rank_pass(rank, number, 0, 2, replay=number > 0) for rank in range(4) for number in range(3)]
    account = books([8], passes, world_size=4)
    assert (account.consumed, account.replayed) == (24, 16)
    assert closes(account)
    assert account.explained


def test_a_resumed_pass_counts_no_element_twice():
    before = [rank_pass(rank, 0, 0, 3, complete=False) for rank in range(4)]
    after = [rank_pass(rank, 1, 0, 7, offset=12) for rank in range(4)]
    account = books([40], before + after, world_size=4)
    assert (account.consumed, account.unread, account.replayed) == (40, 0, 0)
    assert account.explained


def test_units_that_the_ledger_lacks_are_unexplained():
    account = books([8], [rank_pass(rank, 0, 0, 2) for rank in range(4)], world_size=4, units=16)
    assert not account.explained
    assert "asked for 16 units, the ledger holds 8" in account.notes[0]


def test_unequal_complete_passes_are_unexplained():
    passes = [rank_pass(0, 0, 0, 2), rank_pass(1, 0, 0, 1)]
    account = books([4], passes, world_size=2)
    assert not account.explained
    assert "different numbers of steps" in account.notes[0]


def test_complete_passes_that_leave_elements_unread_are_unexplained():
    """A rank whose pass says complete at the right step count but began elsewhere would hide a loss."""
    passes = [rank_pass(0, 0, 0, 2), rank_pass(1, 0, 0, 2), rank_pass(1, 1, 0, 1, offset=2)]
    assert books([4], passes, world_size=2).unread == 0
    wrong = [rank_pass(0, 0, 0, 2, offset=0), rank_pass(1, 0, 0, 2, offset=1)]
    account = books([4], wrong, world_size=2)
    assert account.unread == 2
    assert not account.explained


def test_complete_passes_of_too_few_steps_are_unexplained_though_all_ranks_agree():
    account = books([40], [rank_pass(rank, 0, 0, 4) for rank in range(4)], world_size=4)
    assert account.unread == 24
    assert not account.explained


def test_a_pass_broken_off_beside_one_that_resumed_later_is_explained():
    resumed = [rank_pass(rank, 0, 0, 2, offset=32) for rank in range(4)]
    broken = [rank_pass(rank, 1, 0, 3, complete=False) for rank in range(4)]
    account = books([40], resumed + broken, world_size=4)
    assert account.unread == 20
    assert account.explained


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    world_size=st.sampled_from([1, 2, 4, 8, 16, 32]),
    remainder=st.sampled_from(["pad", "drop"]),
    data=st.data(),
)
def test_books_of_any_reading_close(lengths, world_size, remainder, data):
    passes = []
    for number in range(data.draw(st.integers(0, 2 * len(lengths)))):
        epoch = number % len(lengths)
        steps = expected_steps(lengths[epoch], offset=0, world_size=world_size, remainder=remainder)
        for rank in range(world_size):
            taken = data.draw(st.integers(0, steps)) if rank == 0 else steps
            passes.append(rank_pass(rank, number, epoch, taken, complete=taken == steps))
    account = books(lengths, passes, world_size=world_size, remainder=remainder)
    assert closes(account)
    ids = [(one.epoch, one.offset + step * world_size + one.rank) for one in passes for step in range(one.num_steps)]
    real = {(epoch, index) for epoch, index in ids if index < lengths[epoch]}
    assert account.consumed == len(ids)
    assert account.unread + account.dropped == sum(lengths) - len(real)
    assert account.padded == len({found for found in ids if found not in real})
    assert account.explained


# --- loaders whose workers are their streams ------------------------------------------------------------------------


@st.composite
def readings(draw):
    """Streams of some lengths, what their producers commit, and ranks that pass over them in some way."""
    shapes = draw(SHAPES)
    units, world_size = draw(st.integers(1, 60)), draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
    remainder = draw(st.sampled_from(["pad", "drop"]))
    plan = merged_plan(units, len(shapes[0]))
    records = list(produced(plan, shapes, random.Random(draw(st.integers(0, 99)))))
    lengths = []
    while sum(lengths) < units:
        lengths.append(min(sum(shapes[len(lengths) % len(shapes)]), units - sum(lengths)))
    passes = []
    for number in range(draw(st.integers(0, 2 * len(lengths)))):
        epoch = number % len(lengths)
        offset = draw(st.integers(0, lengths[epoch])) if draw(st.booleans()) else 0
        steps = expected_steps(lengths[epoch], offset=offset, world_size=world_size, remainder=remainder)
        upto = draw(st.integers(0, steps)) if draw(st.booleans()) else steps
        for rank in range(world_size):
            more = {"offset": offset, "complete": upto == steps, "replay": number >= len(lengths)}
            passes.append(rank_pass(rank, number, epoch, upto, **more))
    return plan, records, lengths, passes, world_size, remainder


@settings(max_examples=150, deadline=None)
@given(readings())
def test_books_of_merged_streams_are_those_of_a_plain_enumeration(reading):
    plan, records, lengths, passes, world_size, remainder = reading
    random.Random(1).shuffle(records)
    account = account_loader(
        plan, records=records, passes=passes, world_size=world_size, remainder=remainder, delivered=plan.units
    )
    taken = [(one.epoch, one.offset + step * world_size + one.rank) for one in passes for step in range(one.num_steps)]
    real = {(epoch, index) for epoch, index in taken if index < lengths[epoch]}
    dropped = 0
    for epoch, length in enumerate(lengths):
        left = length - min((one.offset for one in passes if one.epoch == epoch), default=0)
        unread = length - len([one for one in real if one[0] == epoch])
        dropped += min(left % world_size, unread) if remainder == "drop" else 0
    assert (account.asked, account.extracted, account.committed) == (plan.units, plan.units, plan.units)
    assert account.consumed == len(taken)
    assert account.padded == len({one for one in taken if one not in real})
    assert account.replayed == len(taken) - len(set(taken))
    assert account.dropped == dropped
    assert account.unread == plan.units - len(real) - dropped
    assert closes(account)
    assert account.explained, account.notes
    told = [
        (one["epoch"], one["offset"] + step * world_size + int(rank))
        for rank, own in account.per_rank.items()
        for one in own["passes"]
        for step in range(one["steps"])
    ]
    assert sorted(told) == sorted(taken)
    assert sum(own["consumed"] for own in account.per_rank.values()) == len(taken)


def test_a_cut_last_epoch_of_streams_is_whole_once_the_units_are_there():
    plan = merged_plan(7, 3)  # 3 streams that would go on: nobody tells an end
    there = [
        stream_record(0, 0, 0, start=0, stop=3),
        stream_record(0, 1, 0, start=0, stop=2),
        stream_record(0, 2, 0, start=0, stop=2),
    ]
    passes = [rank_pass(rank, 0, 0, 3) for rank in range(2)]

    def account_of(records):
        return account_loader(plan, records=records, passes=passes, world_size=2, remainder="drop", delivered=7)

    whole = account_of(there)
    assert (whole.extracted, whole.dropped, whole.unread) == (7, 1, 0)
    assert whole.explained
    part = account_of(there[:2])
    assert (part.extracted, part.dropped) == (5, 0)
    assert "asked for 7 units, the ledger holds 5" in part.notes[0]


@pytest.mark.parametrize(("remainder", "steps"), [("pad", 3), ("drop", 2)])
def test_expected_steps_follow_the_remainder(remainder, steps):
    assert expected_steps(10, offset=0, world_size=4, remainder=remainder) == steps


def test_elements_that_came_to_two_hosts_are_told_and_the_books_close():
    plan = merged_plan(7, 3)
    there = [
        stream_record(0, 0, 0, start=0, stop=3),
        stream_record(0, 1, 0, start=0, stop=2),
        stream_record(0, 2, 0, start=0, stop=2),
    ]
    passes = [rank_pass(rank, 0, 0, 4) for rank in range(2)]
    account = account_loader(plan, records=there, passes=passes, world_size=2, remainder="pad", delivered=10)
    assert account.explained
    assert account.consumed == account.committed - account.dropped - account.unread + account.padded + account.replayed
    (note,) = account.notes
    assert note.startswith("at least 3 elements were brought to more than one host")
