from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from taas.errors import DeliveryError, ObjectCorrupt, StoreUnavailable
from taas_tasks.delivery.cache import _Check, _Checker, fetch_part
from taas_tasks.delivery.cache_files import CacheFile, CacheFiles
from taas_tasks.delivery.parts import Segment, lay_out
from taas_tasks.store.base import UsePiece
from taas_tasks.store.memory import MemoryStore
from tests.delivery.support import Prepared

LANES = 0x00FF00FF


def prepared() -> tuple[MemoryStore, Segment]:
    store = MemoryStore()
    one = Prepared(store, units=64, length=64)
    return store, Segment.of(one.commit(0, 2))


def fetch(
    store: MemoryStore, segment: Segment, folder: Path, pause: Callable[[float], None] = lambda _: None, **more: Any
) -> CacheFile:
    layout = lay_out(segment, LANES)
    files = CacheFiles(folder, most_bytes=0)
    return fetch_part(store, segment, LANES, layout, files=files, host="h1", pause=pause, **more)


def test_a_part_is_a_file_without_a_name_that_holds_schema_and_lanes(tmp_path: Path) -> None:
    store, segment = prepared()
    file = fetch(store, segment, tmp_path)
    assert not list(tmp_path.iterdir())
    assert zlib.crc32(file.view[: segment.schema_length]) == segment.schema_crc32
    for one, (lane, place, length) in zip(segment.lanes(LANES), lay_out(segment, LANES).lanes, strict=True):
        assert lane == one.lane and zlib.crc32(file.view[place : place + length]) == one.crc32
    file.close()


def test_wrong_bytes_are_fetched_three_times_with_growing_pauses(tmp_path: Path) -> None:
    store, segment = prepared()
    store.put(segment.key, b"\0" * len(store.get(segment.key)))
    pauses: list[float] = []
    with pytest.raises(DeliveryError, match=r"segment 2 of epoch 0 .*host h1: the schema has checksum") as caught:
        fetch(store, segment, tmp_path, pauses.append)
    assert pauses == [0.2, 0.4]
    assert caught.value.fields["key"] == segment.key


def test_an_object_that_is_too_short_is_called_changed(tmp_path: Path) -> None:
    store, segment = prepared()
    store.put(segment.key, store.get(segment.key)[:1000])
    with pytest.raises(DeliveryError, match="changed or removed since"):
        fetch(store, segment, tmp_path)


def test_trouble_of_the_store_passes_through_and_leaves_no_file_open(tmp_path: Path) -> None:
    class Down(MemoryStore):
        def read_into(self, key: str, start: int, buffer: memoryview, use: UsePiece) -> None:
            raise StoreUnavailable("no answer")

    _, segment = prepared()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(StoreUnavailable):
        fetch(Down(), segment, tmp_path, store_patience_s=0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_span_that_is_read_anew_is_checked_anew() -> None:
    whole = bytes(range(256)) * 4
    wrong = whole[:100] + b"!" + whole[101:]
    checker = _Checker(0, [_Check("the lane", 0, 1024, zlib.crc32(whole))], key="k")
    checker.take(0, memoryview(whole)[:512])
    checker.take(0, memoryview(wrong)[:600])
    with pytest.raises(ObjectCorrupt, match="the lane has checksum"):
        checker.take(600, memoryview(wrong)[600:])


def test_a_store_that_is_down_is_waited_for_with_pauses_that_grow_and_vary(tmp_path: Path) -> None:
    store, segment = prepared()

    class Down(MemoryStore):
        turns = 0

        def read_into(self, key: str, start: int, buffer: memoryview, use: UsePiece) -> None:
            self.turns += 1
            if self.turns <= 12:
                raise StoreUnavailable("no answer")
            store.read_into(key, start, buffer, use)

    pauses: list[float] = []
    fetch(Down(), segment, tmp_path, pauses.append).close()
    assert len(pauses) == 12 and len(set(pauses)) == 12
    assert max(pauses[:3]) <= 0.8 and max(pauses) <= 20 and max(pauses[6:]) > max(pauses[:3])


def test_a_pause_that_is_broken_off_ends_the_waiting_and_leaves_no_file_open(tmp_path: Path) -> None:
    class Down(MemoryStore):
        def read_into(self, key: str, start: int, buffer: memoryview, use: UsePiece) -> None:
            raise StoreUnavailable("no answer")

    def feeder_ends(_: float) -> None:
        raise DeliveryError("the feeder ends")

    _, segment = prepared()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(DeliveryError, match="the feeder ends"):
        fetch(Down(), segment, tmp_path, feeder_ends)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_lost_segment_is_repaired_and_fetched_again(tmp_path: Path) -> None:
    store, segment = prepared()
    whole = store.get(segment.key)
    store.delete(segment.key)
    asked: list[str] = []

    def repair(lost: Segment, why: str) -> None:
        assert lost is segment
        asked.append(why)
        if len(asked) == 2:
            store.put(segment.key, whole)

    fetch(store, segment, tmp_path, repair=repair).close()
    assert len(asked) == 2 and segment.key in asked[0]


def test_a_segment_that_is_lost_after_each_repair_is_given_up(tmp_path: Path) -> None:
    store, segment = prepared()
    store.delete(segment.key)
    asked: list[str] = []
    with pytest.raises(DeliveryError, match=r"segment 2 of epoch 0 .* changed or removed since"):
        fetch(store, segment, tmp_path, repair=lambda _, why: asked.append(why))
    assert len(asked) == 2
