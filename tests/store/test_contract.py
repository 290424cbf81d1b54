"""One contract for every store: the in-memory one and S3 (a real server)."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from taas.errors import ObjectCorrupt, ObjectMissing, StoreError
from taas_tasks.store import ObjectStore
from taas_tasks.store.memory import MemoryStore
from tests.store.reading import gathered

HOSTILE_KEYS = [
    "a b/ü/漢字.txt",
    "a+b%20&=?#;$(x)`",
    "q\"'<>|x",
    "line\nbreak",
    "tab\tkey",
    "e\u0301",  # NFD: not the same key as the next
    "\u00e9",
    "...",
    ".hidden",
    "-rf",
    "x" * 200,
]


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.store)])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    if request.param == "memory":
        return MemoryStore()
    found: ObjectStore = request.getfixturevalue("s3_store")
    return found


def test_what_is_put_is_got(store: ObjectStore) -> None:
    store.put("a/b", b"one")
    store.put("a/c", memoryview(bytearray(b"two")))
    store.put("empty", b"")
    assert (store.get("a/b"), store.get("a/c"), store.get("empty")) == (b"one", b"two", b"")


def test_parts_are_put_as_one_object(store: ObjectStore) -> None:
    large = bytes(range(256)) * 10_000
    store.put("parts", [memoryview(b"ab"), memoryview(b""), memoryview(large), memoryview(bytearray(b"c"))])
    assert store.get("parts") == b"ab" + large + b"c"
    store.put("none", [])
    assert store.get("none") == b""


def test_a_put_replaces_what_was_there(store: ObjectStore) -> None:
    store.put("k", b"a long first content")
    store.put("k", b"2")
    assert store.get("k") == b"2"


@pytest.mark.parametrize("key", HOSTILE_KEYS)
def test_a_hostile_key_is_plain_data(store: ObjectStore, key: str) -> None:
    store.put("d/" + key, key.encode())
    assert store.get("d/" + key) == key.encode()
    assert store.get_range("d/" + key, 0, 1) == key.encode()[:1]
    assert [info.key for info in store.list("d/")] == ["d/" + key]
    store.delete("d/" + key)
    assert store.head("d/" + key) is None


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", ".", "a/../b", "..", "a/./b", "nul\0", "a\\b", "x" * 1025, "\ud800"]
)
def test_a_key_that_some_store_would_change_is_refused(store: ObjectStore, key: str) -> None:
    for act in (lambda: store.put(key, b""), lambda: store.get(key), lambda: store.put_if_absent(key, b"")):
        with pytest.raises(StoreError, match=r"not allowed|surrogates|1024"):
            act()


def test_a_missing_key_is_an_object_missing(store: ObjectStore, tmp_path: Path) -> None:
    for act in (
        lambda: store.get("nope"),
        lambda: store.get_range("nope", 0, 1),
        lambda: gathered(store, "nope", 0, 1),
        lambda: store.get_file("nope", tmp_path / "nope"),
    ):
        with pytest.raises(ObjectMissing) as caught:
            act()
        assert caught.value.fields["key"] == "nope"
    assert store.head("nope") is None
    assert list(tmp_path.iterdir()) == []


def test_deleting_what_is_not_there_is_fine(store: ObjectStore) -> None:
    store.put("k", b"")
    store.delete("k")
    store.delete("k")
    assert store.head("k") is None


def test_put_if_absent_writes_once(store: ObjectStore) -> None:
    assert store.put_if_absent("k", b"first") is True
    assert store.put_if_absent("k", b"second") is False
    assert store.get("k") == b"first"
    store.delete("k")
    assert store.put_if_absent("k", b"third") is True


def test_a_conditional_put_raced_by_16_threads_has_one_winner(store: ObjectStore) -> None:
    barrier = threading.Barrier(16)

    def race(n: int) -> bool:
        barrier.wait(timeout=20)
        return store.put_if_absent(f"race/{round_}", b"%d" % n)

    with ThreadPoolExecutor(16) as pool:
        for round_ in range(3):
            wins = list(pool.map(race, range(16)))
            assert wins.count(True) == 1
            assert store.get(f"race/{round_}") == b"%d" % wins.index(True)


def test_ranges_are_exact(store: ObjectStore) -> None:
    content = bytes(range(256)) * 1000
    store.put("k", content)
    assert store.get_range("k", 0, len(content)) == content
    assert store.get_range("k", 1000, 1257) == content[1000:1257]
    assert store.get_range("k", len(content) - 1, len(content)) == content[-1:]
    assert store.get_range("k", 5, 5) == b""


def test_pieces_are_just_the_range_in_order(store: ObjectStore) -> None:
    content = os.urandom((1 << 20) + 7)
    store.put("k", content)
    assert gathered(store, "k", 3, 7) == content[3:7]
    assert gathered(store, "k", 3, len(content)) == content[3:]
    assert gathered(store, "k", 5, 5) == b""


def test_what_the_user_of_pieces_raises_ends_the_reading(store: ObjectStore) -> None:
    store.put("k", b"0123456789")

    def full(_: int, __: memoryview) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        store.read_into("k", 0, memoryview(bytearray(10)), full)
    assert store.get("k") == b"0123456789"


def test_a_range_past_the_end_is_corrupt(store: ObjectStore) -> None:
    store.put("k", b"0123456789")
    for start, stop in ((5, 11), (10, 11), (20, 30), (0, 11)):
        with pytest.raises(ObjectCorrupt, match="ends"):
            store.get_range("k", start, stop)
        with pytest.raises(ObjectCorrupt, match="ends"):
            gathered(store, "k", start, stop)


def test_keys_are_listed_in_byte_order_from_behind_start_after(store: ObjectStore) -> None:
    # Servers that keep folders list "a/x" before "a-b/x"; by bytes "-" comes first.
    keys = sorted(
        ["l/a/x", "l/a-b/x", "l/a.b", "l/a b/y", "l/a", "l/B", "l/é", "l/a/y/z", "l/0000000001.json", "l/ab/x"],
        key=str.encode,
    )
    keys.remove("l/a")  # a file and a folder of one name do not go together on such a server
    for key in [*keys, "m/other", "l"]:
        store.put(key, b"12")
    assert [info.key for info in store.list("l/")] == keys
    for n, key in enumerate(keys):
        assert [info.key for info in store.list("l/", start_after=key)] == keys[n + 1 :]
    assert [info.key for info in store.list("l/", start_after="l/a-")] == keys[keys.index("l/a-b/x") :]
    assert {info.num_bytes for info in store.list("l/")} == {2}
    assert list(store.list("none/")) == []


def test_a_prefix_is_a_string_and_no_folder(store: ObjectStore) -> None:
    for key in ("p/000001.json", "p/000002.json", "p/100000.json"):
        store.put(key, b"")
    assert [info.key for info in store.list("p/00")] == ["p/000001.json", "p/000002.json"]


def test_a_long_listing_comes_whole(store: ObjectStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.put(f"many/{n:05d}", b""), range(1100)))
    assert [info.key for info in store.list("many/")] == [f"many/{n:05d}" for n in range(1100)]
    assert len(list(store.list("many/", start_after="many/01089"))) == 10


def test_a_large_file_goes_up_in_parts_and_comes_back(store: ObjectStore, tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "deep" / "er" / "back"
    block = bytes(range(256)) * 4096
    with source.open("wb") as file:
        for n in range(40):
            file.write(n.to_bytes(4, "big") + block[4:])
        file.write(b"tail")
    store.put_file("big", source)
    info = store.head("big")
    assert info is not None
    assert info.num_bytes == 40 * (1 << 20) + 4
    store.get_file("big", back)
    assert back.read_bytes() == source.read_bytes()
    assert [path.name for path in back.parent.iterdir()] == ["back"]
    assert store.get_range("big", (39 << 20), (39 << 20) + 4) == (39).to_bytes(4, "big")
    assert store.get("big")[-4:] == b"tail"


def test_get_file_replaces_a_file_whole(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old and longer")
    store.put("k", b"new")
    store.get_file("k", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"new"


def test_the_time_of_an_object_is_about_now(store: ObjectStore) -> None:
    import time

    store.put("k", b"")
    info = store.head("k")
    assert info is not None
    assert abs(info.modified_at - time.time()) < 5
