"""The project repository: per project, the files that users and rank 0 see, in object storage.

A *snapshot* is one version of all files: a canonical manifest (path -> sha256, bytes, mode) whose id is its own sha256.
The *history* is a row of numbered records, each put if absent, so of two writers of one number exactly one wins and the
other builds upon it. A record names a snapshot; the highest number is the head. Everything that a record names is in
the store before the record, so a version is visible all at once or not at all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

from taas.errors import ObjectCorrupt, ObjectMissing, ProjectConflict, ProjectError, StoreUnavailable
from taas_tasks.blobs import FileEntry, describe_file, fetch_blob, in_threads, put_blob
from taas_tasks.layout import ProjectKeys
from taas_tasks.store import ObjectStore
from taas_tasks.tree import file_above, safe_path, scan
from taas_tasks.values import Value

log = logging.getLogger(__name__)

Files = dict[str, FileEntry]
Content = bytes | Path | FileEntry  # a FileEntry: its content is a blob already


class HistoryRecord(Value):
    """One entry of a project's history. ``token`` tells a writer whose reply was lost that the record is his."""

    version: Literal[1] = 1
    number: int
    snapshot: str
    parent: int
    author: str
    run: str | None = None
    generation: int | None = None
    created_at: float
    message: str = ""
    kept_beside: dict[str, str] = {}
    token: str = ""


class Draft(Value):
    """What the next record shall hold, made for one head."""

    snapshot: str
    message: str = ""
    kept_beside: dict[str, str] = {}


def manifest(files: Mapping[str, FileEntry]) -> bytes:
    """Return the canonical form of a version: the same files give the same bytes."""
    rows = {path: [entry.sha256, entry.bytes, entry.mode] for path, entry in files.items()}
    return json.dumps({"files": rows, "version": 1}, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def snapshot_id(files: Mapping[str, FileEntry]) -> str:
    """Return the id of a version: the sha256 of its manifest."""
    return hashlib.sha256(manifest(files)).hexdigest()


EMPTY_SNAPSHOT = snapshot_id({})


def head(store: ObjectStore, project: str) -> tuple[int, str]:
    """Return the number of the newest record and its snapshot; 0 and ``EMPTY_SNAPSHOT`` for a project without files."""
    record = head_record(store, project)
    return record.number, record.snapshot


def head_record(store: ObjectStore, project: str) -> HistoryRecord:
    """Return the newest record; number 0 stands for a project that has none."""
    keys = ProjectKeys(project)
    number = 0
    for info in store.list(keys.history):
        number = int(info.key.removeprefix(keys.history).removesuffix(".json"))
    if number == 0:
        return HistoryRecord(number=0, snapshot=EMPTY_SNAPSHOT, parent=0, author="", created_at=0.0)
    return read_record(store, project, number)


def read_record(store: ObjectStore, project: str, number: int) -> HistoryRecord:
    """Return one record.

    Raises:
        ProjectError: the project has no record of this number.
    """
    try:
        return HistoryRecord.model_validate_json(store.get(ProjectKeys(project).record(number)))
    except ObjectMissing:
        raise ProjectError(f"project {project!r} has no record {number}", project=project, record=number) from None


def history(store: ObjectStore, project: str, *, after: int = 0) -> list[HistoryRecord]:
    """Return the records behind number ``after``, oldest first."""
    keys = ProjectKeys(project)
    start_after = keys.record(after) if after else ""
    found = [info.key for info in store.list(keys.history, start_after=start_after)]
    return [HistoryRecord.model_validate_json(data) for data in in_threads(store.get, found)]


def snapshot_files(store: ObjectStore, project: str, snapshot: str) -> Files:
    """Return all files of a version, verified against its id.

    Raises:
        ProjectError: the project has no such snapshot, or it names a path that is not safe.
        ObjectCorrupt: the stored manifest is not the one of this id.
    """
    if snapshot == EMPTY_SNAPSHOT:
        return {}
    key = ProjectKeys(project).snapshot(snapshot)
    try:
        data = store.get(key)
    except ObjectMissing:
        raise ProjectError(f"project {project!r} has no snapshot {snapshot!r}", project=project) from None
    if hashlib.sha256(data).hexdigest() != snapshot:
        raise ObjectCorrupt(f"object {key!r} is not the manifest of its id", key=key)
    rows = json.loads(data)["files"]
    return {safe_path(path): FileEntry(sha256=row[0], bytes=row[1], mode=row[2]) for path, row in rows.items()}


def put_snapshot(store: ObjectStore, project: str, files: Mapping[str, FileEntry]) -> str:
    """Write the manifest of a version whose contents are blobs already, and return its id.

    Raises:
        ProjectError: a path is not safe, or is a file where another needs a folder.
    """
    for path in files:
        if safe_path(path) != path:
            raise ProjectError(f"path {path!r} is not in unicode NFC", path=path)
        if (above := file_above(path, files)) is not None:
            raise ProjectError(f"{above!r} cannot be a file and the folder of {path!r}", path=above)
    data = manifest(files)
    found = hashlib.sha256(data).hexdigest()
    key = ProjectKeys(project).snapshot(found)
    if files and store.head(key) is None:
        store.put(key, data)
    return found


def append(
    store: ObjectStore,
    project: str,
    draft: Callable[[HistoryRecord], Draft | HistoryRecord],
    *,
    author: str,
    run: str | None = None,
    generation: int | None = None,
    num_tries: int = 100,
) -> HistoryRecord:
    """Add the record that ``draft(head)`` gives behind the head; drafted anew when someone else was first.

    A ``HistoryRecord`` from ``draft`` is returned as it is: nothing is to be written.

    Raises:
        StoreUnavailable: others were first ``num_tries`` times.
    """
    keys, token = ProjectKeys(project), secrets.token_hex(8)
    for attempt in range(num_tries):
        newest = head_record(store, project)
        made = draft(newest)
        if isinstance(made, HistoryRecord):
            return made
        record = HistoryRecord(
            number=newest.number + 1,
            parent=newest.number,
            author=author,
            run=run,
            generation=generation,
            created_at=time.time(),
            token=token,
            **made.model_dump(),
        )
        # A lost reply is asked for again and then says "taken": by this very record, as its token tells.
        if store.put_if_absent(keys.record(record.number), record.to_bytes()) or _is_mine(store, project, record):
            return record
        time.sleep(random.uniform(0, min(1.0, 0.01 * 2**attempt)))
    raise StoreUnavailable(f"project {project!r} was changed by others {num_tries} times in a row", project=project)


def _is_mine(store: ObjectStore, project: str, record: HistoryRecord) -> bool:
    return read_record(store, project, record.number).token == record.token


def commit(
    store: ObjectStore,
    project: str,
    changes: Mapping[str, Content],
    *,
    removed: Iterable[str] = (),
    base: int | None = None,
    author: str,
    run: str | None = None,
    message: str = "",
) -> HistoryRecord:
    """Add a version: the head with ``changes`` put in and ``removed`` taken out. Changing nothing writes nothing.

    Args:
        store: where the project is.
        project: its name.
        changes: path -> content (bytes, a file, or the entry of a blob).
        removed: paths to take out; one that is not there is fine.
        base: number of the record that the changes were made upon. When the head has moved since, paths that both
            sides changed are a conflict, all others go together. None: upon whatever the head is.
        author: who, for people.
        run: the run that does it, if one does.
        message: why, for people.

    Raises:
        ProjectConflict: paths were changed by someone else since ``base``, and differently.
        ProjectError: a path is not safe, or both a file and a folder.
    """
    entries = _put_contents(store, project, changes)
    gone = {safe_path(path) for path in removed} - set(entries)
    wanted: dict[str, FileEntry | None] = {**entries, **dict.fromkeys(gone)}
    base_files = None if base is None else _files_of_record(store, project, base)

    def draft(newest: HistoryRecord) -> Draft | HistoryRecord:
        files = snapshot_files(store, project, newest.snapshot)
        if base is not None and newest.number != base and base_files is not None:
            _refuse_conflicts(project, wanted, base_files, files)
        merged = {path: entry for path, entry in {**files, **wanted}.items() if entry is not None}
        if merged == files:
            return newest
        return Draft(snapshot=put_snapshot(store, project, merged), message=message)

    return append(store, project, draft, author=author, run=run)


def _put_contents(store: ObjectStore, project: str, changes: Mapping[str, Content]) -> Files:
    keys = ProjectKeys(project)
    normal = {safe_path(path): content for path, content in changes.items()}
    if len(normal) < len(changes):
        raise ProjectError(f"two of the paths are the same in unicode NFC: {sorted(changes)}", project=project)

    def put(content: Content) -> FileEntry:
        return content if isinstance(content, FileEntry) else put_blob(store, keys, content)

    return dict(zip(normal, in_threads(put, normal.values()), strict=True))


def _files_of_record(store: ObjectStore, project: str, number: int) -> Files:
    return snapshot_files(store, project, read_record(store, project, number).snapshot) if number else {}


def _refuse_conflicts(
    project: str, wanted: Mapping[str, FileEntry | None], base_files: Files, head_files: Files
) -> None:
    conflicts = sorted(
        path
        for path, mine in wanted.items()
        if head_files.get(path) != base_files.get(path) and head_files.get(path) != mine
    )
    if conflicts:
        raise ProjectConflict(
            f"someone else changed {', '.join(map(repr, conflicts[:10]))} in project {project!r} meanwhile: "
            "get the project again, put your changes in, and commit again",
            paths=conflicts,
        )


def put_folder(
    store: ObjectStore,
    project: str,
    folder: Path,
    *,
    author: str,
    base: int | None = None,
    mirror: bool = False,
    message: str = "",
) -> HistoryRecord:
    """Commit the files of a folder (see ``tree`` for what counts as one); only new contents travel.

    Args:
        store: where the project is.
        project: its name.
        folder: the files.
        author: who, for people.
        base: as for ``commit``.
        mirror: also take out the project's files that the folder does not have.
        message: why, for people.
    """
    found = scan(folder)
    for path, reason in found.skipped.items():
        log.warning("%s was left out: it is %s", path, reason)
    known = snapshot_files(store, project, head(store, project)[1])
    described = dict(zip(found.files, in_threads(describe_file, found.files.values()), strict=True))
    have = {(entry.sha256, entry.bytes) for entry in known.values()}
    changes: dict[str, Content] = {
        path: entry if (entry.sha256, entry.bytes) in have else found.files[path]
        for path, entry in described.items()
        if known.get(path) != entry
    }
    removed = set(known) - set(found.files) if mirror else set[str]()
    return commit(store, project, changes, removed=removed, base=base, author=author, message=message)


def materialise(store: ObjectStore, project: str, snapshot: str, folder: Path) -> Files:
    """Write all files of a version into ``folder``, each whole and verified by its sha256; return them.

    Files that are there with the right content are not fetched again. Safe to do twice and at the same time.
    Does not: remove other files of the folder.

    Raises:
        ProjectError: no such snapshot, or the folder has a link or file where the version needs a folder.
        ObjectCorrupt: a content in the store is not the one of its sha256.
    """
    files, keys = snapshot_files(store, project, snapshot), ProjectKeys(project)
    folder.mkdir(parents=True, exist_ok=True)
    for parent in sorted({path.rpartition("/")[0] for path in files}):
        _make_folder(folder, parent)

    def fetch(path: str) -> None:
        if not _is_there(folder / path, files[path]):
            fetch_blob(store, keys, files[path], folder / path)

    in_threads(fetch, files)
    return files


def get_folder(store: ObjectStore, project: str, folder: Path, *, snapshot: str | None = None) -> Files:
    """Write a version (the head's) into a folder; files of the same names are replaced, others stay."""
    return materialise(store, project, head(store, project)[1] if snapshot is None else snapshot, folder)


def _make_folder(root: Path, inside: str) -> None:
    """Make a folder below ``root``; a link on the way could lead the files out of it."""
    here = root
    for part in filter(None, inside.split("/")):
        here = here / part
        if here.is_symlink() or (here.exists() and not here.is_dir()):
            raise ProjectError(f"{here} is in the way: the project has a folder there; remove it", path=str(here))
        here.mkdir(exist_ok=True)


def _is_there(path: Path, entry: FileEntry) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != entry.bytes:
        return False
    return describe_file(path) == entry
