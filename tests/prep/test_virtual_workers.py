from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from taas_tasks.prep.elements import Failure
from taas_tasks.prep.virtual_workers import (
    Positioned,
    Read,
    StreamEnd,
    VirtualWorker,
    WorkerDied,
    end_all,
    receive,
)
from tests.prep import cases, stream_cases

Start = Callable[..., VirtualWorker]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts loader workers; ends them all."""
    started: list[VirtualWorker] = []

    def make(loader: DataLoader[Any], *, stream: int = 0, **more: Any) -> VirtualWorker:
        started.append(VirtualWorker(loader, stream=stream, base_seed=more.pop("base_seed", 7), **more))
        return started[-1]

    yield make
    end_all(started)


def read(worker: VirtualWorker, *positions: int, row: Any = None, epoch: int = 0, tells: bool = False) -> list[Any]:
    for position in positions:
        worker.ask(Read(epoch, position, row, tells_position=tells))
    return [worker.take()[1] for _ in positions]


def test_what_is_asked_for_behind_a_streams_end_is_its_end_until_the_next_epoch(start: Start) -> None:
    worker = start(DataLoader(cases.Numbers(2), batch_size=None, num_workers=2), stream=1)
    first, *others = read(worker, 0, 1, 2)
    assert float(first[0]) == 1.0
    assert others == [StreamEnd(), StreamEnd()]
    assert float(read(worker, 0, epoch=1)[0][0]) == 1.0


def test_the_seeds_are_those_that_torch_gives(start: Start) -> None:
    loader = DataLoader(cases.Noisy(6), batch_size=None, num_workers=2)
    torch.manual_seed(11)
    wanted = list(loader)[1::2]
    torch.manual_seed(11)
    base_seed = int(torch.empty((), dtype=torch.int64).random_().item())
    worker = start(loader, stream=1, base_seed=base_seed)
    assert [read(worker, place, row=index)[0].tolist() for place, index in enumerate((1, 3, 5))] == [
        element.tolist() for element in wanted
    ]


def test_the_user_sees_his_own_dataset(start: Start) -> None:
    worker = start(DataLoader(cases.SeesItself(3), batch_size=None, num_workers=1))
    assert read(worker, 0, row=2)[0].tolist() == [2, 1]


def test_whoever_has_an_element_ready_is_received_first(start: Start) -> None:
    slow, quick = (start(DataLoader(Waits(seconds), batch_size=None, num_workers=1)) for seconds in (3.0, 0.0))
    for worker in (slow, quick):
        worker.ask(Read(0, 0, 0))
    assert [worker for worker, _, _ in receive([slow, quick], timeout_s=20)] == [quick]
    assert receive([slow], timeout_s=0.0) == []


class Waits(cases.Squares):
    def __init__(self, seconds: float) -> None:
        super().__init__(9)
        self.seconds = seconds

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return index


class CannotBeSent(cases.Squares):
    """Its element 0 cannot be pickled."""

    def __getitem__(self, index: int) -> Any:
        return index or (lambda: 1)


def test_an_element_that_cannot_be_sent_is_told_in_its_place_and_the_next_ones_come(start: Start) -> None:
    worker = start(DataLoader(CannotBeSent(9), batch_size=None, num_workers=1))
    for index in (0, 1, 2):
        worker.ask(Read(0, index, index))
    (first, failure), (second, one), (third, two) = (worker.take() for _ in range(3))
    assert isinstance(failure, Failure)
    assert "could not be sent" in failure.error
    assert (first.position, failure.index) == (0, 0)
    assert [(second.position, one), (third.position, two)] == [(1, 1), (2, 2)]


def test_a_killed_process_is_told_with_what_it_was_asked_for(start: Start) -> None:
    worker = start(DataLoader(Waits(30.0), batch_size=None, num_workers=1))
    worker.ask(Read(4, 5, 0))
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        receive([worker], timeout_s=20)
    assert (caught.value.read.epoch, caught.value.read.position, caught.value.exit_code) == (4, 5, -9)


def test_a_worker_that_does_not_end_is_ended(start: Start) -> None:
    worker = start(DataLoader(Waits(60.0), batch_size=None, num_workers=1))
    worker.ask(Read(0, 0, 0))
    pid = worker.pid
    time.sleep(0.3)
    worker.end()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_position_continues_a_stream_bitwise_in_another_process(start: Start) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(stream_cases.Resumable(9), batch_size=2, num_workers=2)

    first = start(loader(), stream=1)
    *_, behind = read(first, 0, 1, row=[None, None], tells=True)
    assert isinstance(behind, Positioned)
    rest = read(first, 2, 3, 4, 5, row=[None, None])
    again = read(start(loader(), stream=1, position=behind.position), 2, 3, 4, 5, row=[None, None])
    assert [torch.is_tensor(one) for one in rest] == [True, True, True, False]
    assert rest[-1] == again[-1] == StreamEnd()
    assert [one.tolist() for one in rest[:3]] == [one.tolist() for one in again[:3]]


def test_a_dataset_without_a_state_tells_no_position(start: Start) -> None:
    (found,) = read(start(DataLoader(cases.Numbers(9), batch_size=None, num_workers=1)), 0, tells=True)
    assert isinstance(found, Positioned)
    assert found.position is None
