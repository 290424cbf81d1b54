"""The books of a loader: what closes, what is explained, what is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taas_tasks.accounting import account_loader, expected_steps
from taas_tasks.values import Inspection, LoaderPlan, RankPass, SegmentSizes, ShardRecord, Versions


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


@pytest.mark.parametrize(("remainder", "steps"), [("pad", 3), ("drop", 2)])
def test_expected_steps_follow_the_remainder(remainder, steps):
    assert expected_steps(10, offset=0, world_size=4, remainder=remainder) == steps
