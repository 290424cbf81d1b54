from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from taas.errors import ElementError, StoreUnavailable
from taas_tasks.prep.commit import Producer, Segment
from taas_tasks.prep.pipeline import LoadedSegment, Pipeline
from taas_tasks.store.memory import MemoryStore
from tests.prep.oracle import records_of

WHO = Producer("run", "data", 0, "host", 1)


def loaded(n: int, *, element: Any = None) -> LoadedSegment:
    elements = [torch.tensor(at) if element is None else element for at in range(4 * n, 4 * n + 4)]
    return LoadedSegment(Segment(0, n, 4 * n, 4 * n + 4), elements, 0.0, 0.0)


def pipeline(store: MemoryStore, done: list[int] | None = None) -> Pipeline:
    def note(segment: Segment, _: Any) -> None:
        if done is not None:
            done.append(segment.n)

    return Pipeline(store, WHO, allow_pickle=False, on_commit=note)


class SlowStore(MemoryStore):
    """Puts wait until they are let go; counts those under way."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go = threading.Event()
        self.waiting = threading.Event()

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.waiting.set()
        assert self.may_go.wait(20)
        super().put(key, data)


class FailingStore(MemoryStore):
    def put(self, key: str, data: bytes | memoryview) -> None:
        raise StoreUnavailable("the store is down")


def test_leaving_waits_until_all_is_committed(memory_store: MemoryStore) -> None:
    done: list[int] = []
    with pipeline(memory_store, done) as pipe:
        for n in range(10):
            pipe.submit(loaded(n))
    assert done == list(range(10))
    assert [record.n for record in records_of(memory_store, "run", "data")] == list(range(10))


def test_a_loader_faster_than_the_store_waits() -> None:
    store = SlowStore()
    submitted: list[int] = []

    def load() -> None:
        with pipeline(store) as pipe:
            for n in range(8):
                pipe.submit(loaded(n))
                submitted.append(n)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        assert store.waiting.wait(20)
        time.sleep(0.3)
        assert submitted == [0, 1, 2]
    finally:
        store.may_go.set()
        thread.join(20)
    assert len(records_of(store, "run", "data")) == 8


def test_an_error_of_the_store_ends_the_loading() -> None:
    submitted = 0
    with pytest.raises(StoreUnavailable, match="the store is down"), pipeline(FailingStore()) as pipe:
        for n in range(100):
            pipe.submit(loaded(n))
            submitted += 1
    assert submitted < 10


def test_an_error_of_the_last_segment_is_raised_on_leaving() -> None:
    with pytest.raises(StoreUnavailable), pipeline(FailingStore()) as pipe:
        pipe.submit(loaded(0))


def test_an_element_that_fits_no_column_names_loader_and_elements(memory_store: MemoryStore) -> None:
    message = "loader 'data', epoch 0, elements 4 to 7: .*fits no column"
    with pytest.raises(ElementError, match=message), pipeline(memory_store) as pipe:
        pipe.submit(loaded(0))
        pipe.submit(loaded(1, element=object()))
    assert [record.n for record in records_of(memory_store, "run", "data")] == [0]


def test_what_is_on_its_way_is_committed_when_the_loading_fails(memory_store: MemoryStore) -> None:
    with pytest.raises(KeyError), pipeline(memory_store) as pipe:
        pipe.submit(loaded(0))
        pipe.submit(loaded(1))
        raise KeyError("the loader")
    assert [record.n for record in records_of(memory_store, "run", "data")] == [0, 1]
