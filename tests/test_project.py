from __future__ import annotations

import hashlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taas.errors import ObjectCorrupt, ProjectConflict, ProjectError, StoreUnavailable
from taas_tasks import project
from taas_tasks.blobs import FileEntry, describe_bytes
from taas_tasks.layout import ProjectKeys
from taas_tasks.store import ObjectStore
from taas_tasks.store.memory import MemoryStore

HOSTILE_NAMES = [
    "; rm -rf ~",
    "$(x)",
    "a\nb",
    "--help",
    "q'\"",
    "sp ace",
    "日本",
    "a\\b",
    ".env",
    "x&y=z?#%20",
    "C:\\x",
]


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.store)])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    if request.param == "memory":
        return MemoryStore()
    found: ObjectStore = request.getfixturevalue("s3_store")
    return found


class Counting(MemoryStore):
    """Counts writes."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[str] = []

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.puts.append(key)
        super().put(key, data)


class LosesReplies(MemoryStore):
    """Its first conditional put succeeds and its reply is lost: asked again it says that the key is taken."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        super().put_if_absent(key, data)
        return super().put_if_absent(key, data)


def contents(store: ObjectStore, name: str, tmp_path: Path) -> dict[str, bytes]:
    folder = tmp_path / f"got-{time.monotonic_ns()}"
    files = project.get_folder(store, name, folder)
    return {path: (folder / path).read_bytes() for path in files}


def test_a_new_project_is_empty(store: ObjectStore, tmp_path: Path) -> None:
    assert project.head(store, "p") == (0, project.EMPTY_SNAPSHOT)
    assert project.snapshot_files(store, "p", project.EMPTY_SNAPSHOT) == {}
    assert contents(store, "p", tmp_path) == {}


def test_what_is_committed_comes_back(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"from a file")
    changes = {"a.py": b"print()", "deep/er/b": tmp_path / "f", "empty": b""}
    record = project.commit(store, "p", changes, author="me", message="first")
    assert (record.number, record.parent, record.author, record.message) == (1, 0, "me", "first")
    assert project.head(store, "p") == (1, record.snapshot)
    assert contents(store, "p", tmp_path) == {"a.py": b"print()", "deep/er/b": b"from a file", "empty": b""}


def test_a_snapshot_is_named_by_its_content() -> None:
    one = {"b": describe_bytes(b"1"), "a": describe_bytes(b"2")}
    assert project.snapshot_id(one) == project.snapshot_id(dict(reversed(one.items())))
    assert project.snapshot_id(one) == hashlib.sha256(project.manifest(one)).hexdigest()
    other = {**one, "b": FileEntry(sha256=one["b"].sha256, bytes=1, mode=0o755)}
    assert project.snapshot_id(one) != project.snapshot_id(other)


def test_committing_nothing_new_writes_nothing() -> None:
    store = Counting()
    first = project.commit(store, "p", {"a": b"1"}, author="me")
    num_puts = len(store.puts)
    assert project.commit(store, "p", {"a": b"1"}, author="me") == first
    assert project.commit(store, "p", {}, removed=["not there"], author="me") == first
    assert len(store.puts) == num_puts


def test_the_same_content_is_stored_once() -> None:
    store = Counting()
    project.commit(store, "p", {"a": b"same"}, author="me")
    project.commit(store, "p", {"b": b"same"}, author="me")
    assert len([key for key in store.puts if "/blobs/" in key]) == 1


def test_removed_files_are_gone_in_the_new_version_only(store: ObjectStore) -> None:
    first = project.commit(store, "p", {"a": b"1", "b": b"2"}, author="me")
    second = project.commit(store, "p", {}, removed=["a"], author="me")
    assert set(project.snapshot_files(store, "p", second.snapshot)) == {"b"}
    assert set(project.snapshot_files(store, "p", first.snapshot)) == {"a", "b"}


def test_two_sides_that_changed_other_paths_go_together() -> None:
    store = MemoryStore()
    base = project.commit(store, "p", {"a": b"1", "b": b"1"}, author="me").number
    project.commit(store, "p", {"a": b"theirs"}, base=base, author="they")
    project.commit(store, "p", {"b": b"mine", "c": b"mine"}, base=base, author="me")
    files = project.snapshot_files(store, "p", project.head(store, "p")[1])
    assert files == {"a": describe_bytes(b"theirs"), "b": describe_bytes(b"mine"), "c": describe_bytes(b"mine")}


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ({"changes": {"a": b"theirs"}}, {"changes": {"a": b"mine"}}),
        ({"changes": {}, "removed": ["a"]}, {"changes": {"a": b"mine"}}),
        ({"changes": {"a": b"theirs"}}, {"changes": {}, "removed": ["a"]}),
        ({"changes": {"new": b"theirs"}}, {"changes": {"new": b"mine"}}),
    ],
)
def test_a_path_changed_on_both_sides_is_a_conflict(theirs: dict, mine: dict) -> None:  # type: ignore[type-arg]
    store = MemoryStore()
    base = project.commit(store, "p", {"a": b"1", "b": b"1"}, author="me").number
    after = project.commit(store, "p", **theirs, base=base, author="they")
    with pytest.raises(ProjectConflict, match="someone else changed") as caught:
        project.commit(store, "p", **mine, base=base, author="me")
    assert caught.value.fields["paths"] in (["a"], ["new"])
    assert project.head(store, "p") == (after.number, after.snapshot)


def test_the_same_change_on_both_sides_is_no_conflict() -> None:
    store = MemoryStore()
    base = project.commit(store, "p", {"a": b"1"}, author="me").number
    project.commit(store, "p", {"a": b"2"}, base=base, author="they")
    assert project.commit(store, "p", {"a": b"2"}, base=base, author="me").author == "they"


def test_an_unknown_base_or_snapshot_is_named() -> None:
    store = MemoryStore()
    with pytest.raises(ProjectError, match="no record 7"):
        project.commit(store, "p", {"a": b""}, base=7, author="me")
    with pytest.raises(ProjectError, match="no snapshot"):
        project.snapshot_files(store, "p", "0" * 64)


def test_commits_raced_by_8_threads_are_all_kept(store: ObjectStore) -> None:
    barrier = threading.Barrier(8)

    def race(n: int) -> int:
        barrier.wait(timeout=20)
        return project.commit(store, "p", {f"f{n}": b"%d" % n}, author=f"a{n}").number

    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(race, range(8)))
    assert sorted(numbers) == list(range(1, 9))
    assert set(project.snapshot_files(store, "p", project.head(store, "p")[1])) == {f"f{n}" for n in range(8)}
    records = project.history(store, "p")
    assert [record.number for record in records] == list(range(1, 9))
    assert [record.parent for record in records] == list(range(8))
    assert [record.number for record in project.history(store, "p", after=6)] == [7, 8]


def test_a_lost_reply_makes_one_record() -> None:
    store = LosesReplies()
    assert project.commit(store, "p", {"a": b"1"}, author="me").number == 1
    assert [record.number for record in project.history(store, "p")] == [1]


def test_appending_gives_up_when_others_are_always_first() -> None:
    class AlwaysLate(MemoryStore):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            number = int(key[-15:-5])
            other = project.HistoryRecord(
                number=number, parent=number - 1, snapshot=project.EMPTY_SNAPSHOT, author="they", created_at=0.0
            )
            super().put_if_absent(key, other.to_bytes())
            return super().put_if_absent(key, data)

    def draft(_: project.HistoryRecord) -> project.Draft:
        return project.Draft(snapshot=project.EMPTY_SNAPSHOT)

    store = AlwaysLate()
    with pytest.raises(StoreUnavailable, match="changed by others 3 times"):
        project.append(store, "p", draft, author="me", num_tries=3)
    assert {record.author for record in project.history(store, "p")} == {"they"}


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../up", "a/../../b", "a//b", "a/./b", "", ".", "a/", "nul\0", "\udcff", "x" * 256]
)
def test_an_unsafe_path_is_refused(path: str) -> None:
    store = MemoryStore()
    with pytest.raises(ProjectError):
        project.commit(store, "p", {path: b""}, author="me")
    assert project.head(store, "p")[0] == 0


def test_a_file_cannot_be_a_folder_too() -> None:
    store = MemoryStore()
    project.commit(store, "p", {"out": b""}, author="me")
    with pytest.raises(ProjectError, match="cannot be a file and the folder"):
        project.commit(store, "p", {"out/x": b""}, author="me")


def test_a_manifest_with_an_unsafe_path_is_not_written_to_disk(tmp_path: Path) -> None:
    store = MemoryStore()
    data = project.manifest({"../evil": describe_bytes(b"x")})
    snapshot = hashlib.sha256(data).hexdigest()
    store.put(ProjectKeys("p").snapshot(snapshot), data)
    with pytest.raises(ProjectError, match="no path of a project"):
        project.materialise(store, "p", snapshot, tmp_path / "in")
    assert not (tmp_path / "evil").exists()


def test_hostile_names_survive_the_round_trip(store: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in HOSTILE_NAMES:
        (source / name).write_text(name)
    project.put_folder(store, "p", source, author="me")
    assert contents(store, "p", tmp_path) == {name: name.encode() for name in HOSTILE_NAMES}


def test_names_are_kept_in_nfc_and_two_of_one_form_are_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    (tmp_path / "e\u0301").write_text("nfd")
    project.put_folder(store, "p", tmp_path, author="me")
    assert list(project.snapshot_files(store, "p", project.head(store, "p")[1])) == ["\u00e9"]
    (tmp_path / "\u00e9").write_text("nfc")
    with pytest.raises(ProjectError, match="unicode form"):
        project.put_folder(store, "p", tmp_path, author="me")
    with pytest.raises(ProjectError, match="NFC"):
        project.commit(store, "p", {"e\u0301": b"", "\u00e9": b""}, author="me")


def test_the_executable_bit_is_kept_and_nothing_else_of_the_mode(tmp_path: Path) -> None:
    store, source = MemoryStore(), tmp_path / "source"
    source.mkdir()
    for name, mode in (("run.sh", 0o777), ("plain", 0o600), ("private", 0o700)):
        (source / name).write_text(name)
        (source / name).chmod(mode)
    project.put_folder(store, "p", source, author="me")
    project.get_folder(store, "p", tmp_path / "back")
    modes = {path.name: path.stat().st_mode & 0o7777 for path in (tmp_path / "back").iterdir()}
    assert modes == {"run.sh": 0o755, "plain": 0o644, "private": 0o755}


def test_caches_are_ignored_and_what_leaves_the_folder_is_left_out(tmp_path: Path) -> None:
    store, source = MemoryStore(), tmp_path / "source"
    (source / "__pycache__").mkdir(parents=True)
    (source / "__pycache__" / "x.pyc").write_text("")
    (source / ".0123456789abcdef.tmp").write_text("left by a killed writer")
    (source / "a.py").write_text("a")
    (source / "inside").symlink_to("a.py")
    (tmp_path / "secret").write_text("secret")
    (source / "outside").symlink_to("../secret")
    (source / "folder-outside").symlink_to(tmp_path)
    (source / "to-nothing").symlink_to("nowhere")
    os.mkfifo(source / "pipe")
    project.put_folder(store, "p", source, author="me")
    assert contents(store, "p", tmp_path) == {"a.py": b"a", "inside": b"a"}


def test_putting_an_unchanged_folder_writes_nothing_and_a_mirror_takes_out(tmp_path: Path) -> None:
    store = Counting()
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    first = project.put_folder(store, "p", tmp_path, author="me")
    num_puts = len(store.puts)
    assert project.put_folder(store, "p", tmp_path, author="me") == first
    assert len(store.puts) == num_puts
    (tmp_path / "b").unlink()
    assert project.put_folder(store, "p", tmp_path, author="me") == first
    mirrored = project.put_folder(store, "p", tmp_path, author="me", mirror=True)
    assert set(project.snapshot_files(store, "p", mirrored.snapshot)) == {"a"}


def test_materialising_twice_changes_nothing_and_repairs_what_differs(tmp_path: Path) -> None:
    store = MemoryStore()
    snapshot = project.commit(store, "p", {"a": b"1", "b/c": b"2"}, author="me").snapshot
    project.materialise(store, "p", snapshot, tmp_path)
    kept = (tmp_path / "a").stat()
    (tmp_path / "b" / "c").write_text("x")
    (tmp_path / "mine").write_text("stays")
    project.materialise(store, "p", snapshot, tmp_path)
    assert (tmp_path / "a").stat().st_ino == kept.st_ino
    assert (tmp_path / "b" / "c").read_bytes() == b"2"
    assert (tmp_path / "mine").read_text() == "stays"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "mine"]


def test_a_corrupt_content_is_never_written(tmp_path: Path) -> None:
    store = MemoryStore()
    snapshot = project.commit(store, "p", {"a": b"good"}, author="me").snapshot
    store.put(ProjectKeys("p").blob(hashlib.sha256(b"good").hexdigest()), b"evil")
    with pytest.raises(ObjectCorrupt, match="sha256"):
        project.materialise(store, "p", snapshot, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_corrupt_manifest_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    snapshot = project.commit(store, "p", {"a": b"good"}, author="me").snapshot
    store.put(ProjectKeys("p").snapshot(snapshot), project.manifest({"a": describe_bytes(b"evil")}))
    with pytest.raises(ObjectCorrupt, match="manifest"):
        project.snapshot_files(store, "p", snapshot)


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    store = MemoryStore()
    snapshot = project.commit(store, "p", {"sub/a": b"1", "b": b"2"}, author="me").snapshot
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (inside / "sub").symlink_to(outside)
    with pytest.raises(ProjectError, match="in the way"):
        project.materialise(store, "p", snapshot, inside)
    assert list(outside.iterdir()) == []
    (inside / "sub").unlink()
    (outside / "b").write_text("outside")
    (inside / "b").symlink_to(outside / "b")
    project.materialise(store, "p", snapshot, inside)
    assert (outside / "b").read_text() == "outside"
    assert not (inside / "b").is_symlink()


def test_a_large_file_travels_by_file(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    big = tmp_path / "in" / "big"
    with big.open("wb") as file:
        for n in range(20):
            file.write(bytes([n]) * (1 << 20))
    big.chmod(0o755)
    record = project.put_folder(store, "p", tmp_path / "in", author="me")
    project.materialise(store, "p", record.snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "big").read_bytes() == big.read_bytes()
    assert (tmp_path / "out" / "big").stat().st_mode & 0o777 == 0o755
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["big"]


names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20)
paths = st.lists(names, min_size=1, max_size=3).map("/".join)


@settings(deadline=None)
@given(st.dictionaries(paths, st.binary(max_size=20), max_size=6))
def test_any_version_that_is_accepted_comes_back_whole(files: dict[str, bytes]) -> None:
    store = MemoryStore()
    try:
        record = project.commit(store, "p", files, author="me")
    except ProjectError:
        return
    found = project.snapshot_files(store, "p", record.snapshot)
    assert sorted(entry.sha256 for entry in found.values()) == sorted(
        hashlib.sha256(data).hexdigest() for data in files.values()
    )
