from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from taas.errors import ArtifactError
from taas_tasks import project
from taas_tasks.artifacts import merge, publish, read_staged, stage
from taas_tasks.blobs import FileEntry, describe_bytes
from taas_tasks.layout import ProjectKeys, RunKeys
from taas_tasks.store import ObjectStore
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import StagedArtifacts

RUN = "manual-1-abc"


class Dies(Exception):
    """Stands for a process that is killed at this point."""


class DiesAtWrite(MemoryStore):
    """Ends the caller just before, or just after, its nth write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.dies_before = self.dies_after = -1

    def _write(self) -> None:
        self.writes += 1
        if self.writes == self.dies_before:
            raise Dies

    def _written(self) -> None:
        if self.writes == self.dies_after:
            raise Dies

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._write()
        super().put(key, data)
        self._written()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self._write()
        with self._lock:
            if key in self._objects:
                return False
            MemoryStore.put(self, key, data)
        self._written()
        return True


class Meanwhile(MemoryStore):
    """Lets someone commit just before the first conditional put is done."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[dict[str, bytes]] = []

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self.others:
            project.commit(self, "p", self.others.pop(), author="someone else")
        return super().put_if_absent(key, data)


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.store)])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    if request.param == "memory":
        return MemoryStore()
    found: ObjectStore = request.getfixturevalue("s3_store")
    return found


def begin(store: ObjectStore, folder: Path, **files: bytes) -> project.HistoryRecord:
    """A run begins: its folder holds the project's head."""
    changes = {name.replace("__", "/"): data for name, data in (files or {"train": b"print()"}).items()}
    base = project.commit(store, "p", changes, author="me")
    project.materialise(store, "p", base.snapshot, folder)
    return base


def staged_by(store: ObjectStore, base: project.HistoryRecord, folder: Path, *, generation: int = 1) -> StagedArtifacts:
    return stage(store, "p", base.snapshot, folder, run=RUN, generation=generation)


def head_files(store: ObjectStore) -> dict[str, bytes]:
    files = project.snapshot_files(store, "p", project.head(store, "p")[1])
    return {path: store.get(ProjectKeys("p").blob(entry.sha256)) for path, entry in files.items()}


def test_new_and_changed_files_are_staged_and_nothing_is_visible_yet(store: ObjectStore, tmp_path: Path) -> None:
    base = begin(store, tmp_path, train=b"print()", same=b"same", config=b"lr=1")
    (tmp_path / "config").write_bytes(b"lr=2")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.pt").write_bytes(b"weights")
    (tmp_path / "train").chmod(0o755)
    staged = staged_by(store, base, tmp_path)
    assert [(item.path, item.bytes, item.mode, item.rank) for item in staged.files] == [
        ("config", 4, 0o644, 0),
        ("out/model.pt", 7, 0o644, 0),
        ("train", 7, 0o755, 0),
    ]
    assert staged.files[1].sha256 == describe_bytes(b"weights").sha256
    assert read_staged(store, RUN, 1) == staged
    assert project.head(store, "p") == (base.number, base.snapshot)


def test_a_file_rewritten_with_the_same_content_is_no_artifact(tmp_path: Path) -> None:
    store = MemoryStore()
    base = begin(store, tmp_path, a=b"same")
    (tmp_path / "a").unlink()
    (tmp_path / "a").write_bytes(b"same")
    assert staged_by(store, base, tmp_path).files == []


def test_a_change_that_keeps_size_and_times_is_found(tmp_path: Path) -> None:
    store = MemoryStore()
    base = begin(store, tmp_path, a=b"1111")
    before = (tmp_path / "a").stat()
    (tmp_path / "a").write_bytes(b"2222")
    os.utime(tmp_path / "a", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [item.path for item in staged_by(store, base, tmp_path).files] == ["a"]


def test_what_leaves_the_folder_or_is_no_file_is_left_out_with_a_note(tmp_path: Path) -> None:
    store, folder = MemoryStore(), tmp_path / "project"
    base = begin(store, folder)
    (tmp_path / "secret").write_text("secret")
    (folder / "steals").symlink_to(tmp_path / "secret")
    (folder / "climbs").symlink_to("../secret")
    (folder / "data").symlink_to("/")
    (folder / "last.ckpt").symlink_to("train")
    os.mkfifo(folder / "pipe")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_text("")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(folder / "sock"))
        staged = staged_by(store, base, folder)
    assert [item.path for item in staged.files] == ["last.ckpt"]
    assert [note.split("'")[1] for note in staged.notes] == ["climbs", "data", "pipe", "sock", "steals"]
    assert "leaves the project folder" in staged.notes[0]
    assert not any(store.get(info.key) == b"secret" for info in store.list(""))


def test_a_deleted_file_stays_in_the_project_with_a_note(store: ObjectStore, tmp_path: Path) -> None:
    base = begin(store, tmp_path, a=b"1", b=b"2")
    (tmp_path / "a").unlink()
    staged = staged_by(store, base, tmp_path)
    assert staged.notes == ["'a' was deleted by the run and stays in the project"]
    publish(store, staged, project="p")
    assert head_files(store) == {"a": b"1", "b": b"2"}


def test_a_name_that_no_project_can_keep_is_an_artifact_error(tmp_path: Path) -> None:
    store = MemoryStore()
    base = begin(store, tmp_path)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff")).write_text("")
    with pytest.raises(ArtifactError, match="UTF-8"):
        staged_by(store, base, tmp_path)


def test_publishing_adds_one_record_that_names_the_run(store: ObjectStore, tmp_path: Path) -> None:
    base = begin(store, tmp_path)
    (tmp_path / "model.pt").write_bytes(b"weights")
    record = publish(store, staged_by(store, base, tmp_path), project="p", base_record=base.number)
    assert (record.record, record.kept_beside) == (base.number + 1, {})
    assert head_files(store) == {"train": b"print()", "model.pt": b"weights"}
    entry = project.read_record(store, "p", record.record)
    assert (entry.run, entry.generation, entry.parent, entry.snapshot) == (RUN, 1, base.number, record.snapshot)


def test_publishing_twice_gives_the_same_record(store: ObjectStore, tmp_path: Path) -> None:
    base = begin(store, tmp_path)
    (tmp_path / "model.pt").write_bytes(b"weights")
    staged = staged_by(store, base, tmp_path)
    first = publish(store, staged, project="p", base_record=base.number)
    project.commit(store, "p", {"model.pt": b"mine now"}, author="me")
    assert publish(store, staged, project="p", base_record=base.number) == first
    assert head_files(store)["model.pt"] == b"mine now"


def test_publishing_at_once_by_8_threads_gives_one_record(store: ObjectStore, tmp_path: Path) -> None:
    base = begin(store, tmp_path)
    (tmp_path / "model.pt").write_bytes(b"weights")
    staged = staged_by(store, base, tmp_path)
    barrier = threading.Barrier(8)

    def race(_: int) -> int:
        barrier.wait(timeout=20)
        return publish(store, staged, project="p", base_record=base.number).record

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(race, range(8))) == {base.number + 1}
    assert project.head(store, "p")[0] == base.number + 1


def test_a_run_that_wrote_nothing_publishes_a_record_without_files(tmp_path: Path) -> None:
    store = MemoryStore()
    base = begin(store, tmp_path)
    record = publish(store, staged_by(store, base, tmp_path), project="p")
    assert (record.record, record.files, record.snapshot) == (base.number + 1, [], base.snapshot)


def test_another_try_of_the_run_is_another_record(tmp_path: Path) -> None:
    store = MemoryStore()
    base = begin(store, tmp_path)
    first = publish(store, staged_by(store, base, tmp_path, generation=1), project="p")
    second = publish(store, staged_by(store, base, tmp_path, generation=2), project="p")
    assert (first.record, second.record) == (base.number + 1, base.number + 2)


def test_nothing_staged_is_an_artifact_error() -> None:
    with pytest.raises(ArtifactError, match="staged no artifacts"):
        read_staged(MemoryStore(), RUN, 1)


def test_a_missing_content_is_found_before_anything_is_published(tmp_path: Path) -> None:
    store = MemoryStore()
    base = begin(store, tmp_path)
    (tmp_path / "model.pt").write_bytes(b"weights")
    staged = staged_by(store, base, tmp_path)
    store.delete(ProjectKeys("p").blob(staged.files[0].sha256))
    with pytest.raises(ArtifactError, match=r"model\.pt"):
        publish(store, staged, project="p")
    assert project.head(store, "p")[0] == base.number


def test_a_file_that_someone_else_changed_is_kept_beside(store: ObjectStore, tmp_path: Path) -> None:
    base = begin(store, tmp_path, config=b"1")
    (tmp_path / "config").write_bytes(b"the run's")
    (tmp_path / "model.tar.gz").write_bytes(b"the run's")
    (tmp_path / ".env").write_bytes(b"the run's")
    staged = staged_by(store, base, tmp_path)
    project.commit(store, "p", {"config": b"user's", "model.tar.gz": b"user's", ".env": b"user's"}, author="me")
    record = publish(store, staged, project="p", base_record=base.number)
    beside = {
        "config": f"config.from-{RUN}",
        "model.tar.gz": f"model.tar.from-{RUN}.gz",
        ".env": f".env.from-{RUN}",
    }
    assert record.kept_beside == beside
    found = head_files(store)
    assert {path: found[path] for path in beside} == dict.fromkeys(beside, b"user's")
    assert {found[kept] for kept in beside.values()} == {b"the run's"}
    assert publish(store, staged, project="p") == record


def test_a_commit_between_reading_the_head_and_writing_the_record_is_not_overwritten(tmp_path: Path) -> None:
    store = Meanwhile()
    base = begin(store, tmp_path, config=b"1", other=b"1")
    (tmp_path / "config").write_bytes(b"the run's")
    (tmp_path / "model.pt").write_bytes(b"weights")
    staged = staged_by(store, base, tmp_path)
    store.others = [{"config": b"user's", "other": b"user's"}]
    record = publish(store, staged, project="p")
    assert record.record == base.number + 2
    assert head_files(store) == {
        "config": b"user's",
        f"config.from-{RUN}": b"the run's",
        "other": b"user's",
        "model.pt": b"weights",
    }


def test_the_same_change_by_someone_else_is_not_kept_twice(tmp_path: Path) -> None:
    store = MemoryStore()
    base = begin(store, tmp_path, a=b"1")
    (tmp_path / "a").write_bytes(b"2")
    staged = staged_by(store, base, tmp_path)
    project.commit(store, "p", {"a": b"2"}, author="me")
    assert publish(store, staged, project="p").kept_beside == {}


def test_a_file_that_the_user_removed_meanwhile_is_not_brought_back_under_its_name(tmp_path: Path) -> None:
    store = MemoryStore()
    base = begin(store, tmp_path, a=b"1", b=b"1")
    (tmp_path / "a").write_bytes(b"2")
    staged = staged_by(store, base, tmp_path)
    project.commit(store, "p", {}, removed=["a"], author="me")
    publish(store, staged, project="p")
    assert head_files(store) == {"b": b"1", f"a.from-{RUN}": b"2"}


A, B = describe_bytes(b"a"), describe_bytes(b"b")


@pytest.mark.parametrize(
    ("head", "wrote", "expected"),
    [
        # someone made a file where the run made a folder, and the other way round
        ({"out": A}, {"out/x.pt": B, "out/y.pt": B}, {"out": A, "out.from-r/x.pt": B, "out.from-r/y.pt": B}),
        ({"out/x": A}, {"out": B}, {"out/x": A, "out.from-r": B}),
        ({"d/out.d": A}, {"d/out.d/x": B}, {"d/out.d": A, "d/out.from-r.d/x": B}),
        # the name beside is taken as well
        ({"m.pt": A, "m.from-r.pt": A}, {"m.pt": B}, {"m.pt": A, "m.from-r.pt": A, "m.from-r-2.pt": B}),
        ({"m.pt": A, "m.from-r.pt": B}, {"m.pt": B}, {"m.pt": A, "m.from-r.pt": B}),
    ],
)
def test_merging_finds_a_place_for_every_file(
    head: dict[str, FileEntry], wrote: dict[str, FileEntry], expected: dict[str, FileEntry]
) -> None:
    merged, _ = merge(wrote, base={}, head=head, run="r")
    assert merged == expected


def test_a_name_beside_stays_within_the_limit_of_a_name() -> None:
    long = "ü" * 125 + ".ckpt"
    merged, beside = merge({long: B}, base={}, head={long: A}, run="r" * 59)
    assert set(merged) == {long, beside[long]}
    assert len(beside[long].encode()) <= 255


def test_a_publisher_killed_at_any_write_leaves_all_or_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    before = {"train": b"print()"}
    after = {"train": b"print()", "a": b"1", "b": b"2"}
    for dies_before, dies_after in [(n, -1) for n in range(1, 5)] + [(-1, n) for n in range(1, 5)]:
        store, folder = DiesAtWrite(), tmp_path / f"{dies_before}.{dies_after}"
        base = begin(store, folder)
        (folder / "a").write_bytes(b"1")
        (folder / "b").write_bytes(b"2")
        staged = staged_by(store, base, folder)
        store.writes, store.dies_before, store.dies_after = 0, dies_before, dies_after
        try:
            publish(store, staged, project="p")
        except Dies:
            assert head_files(store) in (before, after)
        store.dies_before = store.dies_after = -1
        record = publish(store, staged, project="p")
        assert record.record == base.number + 1
        assert head_files(store) == after


def test_a_stager_killed_at_any_write_shows_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    for n in range(1, 5):
        store, folder = DiesAtWrite(), tmp_path / str(n)
        base = begin(store, folder)
        (folder / "a").write_bytes(b"1")
        (folder / "b").write_bytes(b"2")
        store.writes, store.dies_before = 0, n
        try:
            staged_by(store, base, folder)
        except Dies:
            with pytest.raises(ArtifactError):
                read_staged(store, RUN, 1)
        assert head_files(store) == {"train": b"print()"}
        store.dies_before = -1
        assert [item.path for item in staged_by(store, base, folder).files] == ["a", "b"]
        assert store.head(RunKeys(RUN).staged(1)) is not None
