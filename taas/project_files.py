"""A project's files, put from a folder and got into one. What is to happen is planned first, then done."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from taas.client import Client, FileInfo, ProjectFiles
from taas.errors import ClientError
from taas.transfer import download, file_sha256, in_parallel, is_partial, safe_target, upload_file

_SKIPPED_FOLDERS = frozenset(
    [".git", ".hg", ".svn", ".venv", "__pycache__", ".ipynb_checkpoints", ".mypy_cache", ".ruff_cache", ".pytest_cache"]
)
_SKIPPED_SUFFIXES = (".pyc", ".pyo")


@dataclass(frozen=True)
class PutPlan:
    """What makes a project's files those of a folder: files that are new or differ, and paths that go."""

    changes: list[FileInfo]
    removed: list[str]

    @property
    def is_empty(self) -> bool:
        """Whether all is there already."""
        return not self.changes and not self.removed


@dataclass(frozen=True)
class PutResult:
    """What ``put_folder`` did: the project's record now, and how many files changed and went."""

    record: int
    num_changed: int
    num_removed: int


def scan_folder(folder: Path) -> dict[str, FileInfo]:
    """Return a folder's files by path, without caches and version control.

    Raises:
        ClientError: there is no such folder, a link leads out of it, or a file cannot be read.
    """
    if not folder.is_dir():
        raise ClientError(f"there is no folder {folder}")
    try:
        return {info.path: info for info in _scan(folder)}
    except OSError as error:
        raise ClientError(f"cannot read {error.filename or folder}: {error.strerror or error}") from error


def plan_put(local: Mapping[str, FileInfo], head: ProjectFiles, *, delete: bool) -> PutPlan:
    """Return what to commit; with ``delete``, what is not in the folder goes from the project."""
    changes = [file for path, file in sorted(local.items()) if not _is_same(file, head.files.get(path))]
    removed = sorted(head.files.keys() - local.keys()) if delete else []
    return PutPlan(changes, removed)


def put_folder(client: Client, project: str, folder: Path, *, delete: bool = False) -> PutResult:
    """Upload what is new or differs and commit it as one record, on top of the head that was looked at.

    Raises:
        ClientError: also when someone else committed meanwhile.
    """
    local = scan_folder(folder)
    head = client.project_files(project)
    plan = plan_put(local, head, delete=delete)
    if plan.is_empty:
        return PutResult(head.record, 0, 0)
    _upload(client, project, folder, plan.changes)
    record = client.commit(project, changes=plan.changes, removed=plan.removed, base=head.record)
    return PutResult(record, len(plan.changes), len(plan.removed))


def get_project(client: Client, project: str, folder: Path, *, overwrite: bool = False) -> int:
    """Write the files of a project's head below a folder; return how many were not there already.

    Raises:
        ClientError: also, unless ``overwrite``, when a file is there with another content: nothing is written then.
    """
    files = client.project_files(project).files
    wanted = _to_write(files.values(), folder, overwrite=overwrite)
    in_parallel(lambda file: download(client, file, folder, url=lambda: client.blob_url(project, file.sha256)), wanted)
    return len(wanted)


def get_artifacts(client: Client, run_id: str, folder: Path) -> list[FileInfo]:
    """Write the files that a run published below a folder, over what is there; return all of them."""
    files = client.artifacts(run_id)
    wanted = _to_write(files, folder, overwrite=True)
    in_parallel(lambda file: download(client, file, folder, url=lambda: str(file.url)), wanted)
    return files


def _scan(folder: Path) -> Iterator[FileInfo]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
        for name in folders:
            _refuse_link(Path(root, name), folder)
        for name in sorted(names):
            path = Path(root, name)
            if not name.endswith(_SKIPPED_SUFFIXES) and not is_partial(name):
                yield _file_info(path, folder)


def _file_info(path: Path, folder: Path) -> FileInfo:
    relative = path.relative_to(folder).as_posix()
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise ClientError(
            f"{relative} is a link that leaves the folder; a project holds plain files: copy it, or remove it"
        )
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ClientError(f"{relative} is no plain file; a project holds plain files: remove it")
    mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
    return FileInfo(relative, file_sha256(path), status.st_size, mode)


def _refuse_link(path: Path, folder: Path) -> None:
    if path.is_symlink():
        relative = path.relative_to(folder).as_posix()
        raise ClientError(f"{relative} is a link to a folder; a project holds plain files: copy it, or remove it")


def _is_same(file: FileInfo, other: FileInfo | None) -> bool:
    return other is not None and (file.sha256, file.mode) == (other.sha256, other.mode)


def _upload(client: Client, project: str, folder: Path, files: list[FileInfo]) -> None:
    urls = client.missing_blobs(project, [(file.sha256, file.bytes) for file in files])
    first = {file.sha256: file for file in reversed(files)}

    def upload(item: tuple[str, str]) -> None:
        sha256, url = item
        file = first[sha256]
        upload_file(client, folder / file.path, url=url, sha256=sha256, num_bytes=file.bytes)

    in_parallel(upload, urls.items())


def _to_write(files: Iterable[FileInfo], folder: Path, *, overwrite: bool) -> list[FileInfo]:
    """Return the files that are not there with the right content; all paths are checked before anything is written."""
    targets = [(file, safe_target(folder, file.path)) for file in files]
    wanted = [(file, target) for file, target in targets if not _is_there(file, target)]
    in_the_way = [file.path for file, target in wanted if target.exists()]
    if in_the_way and not overwrite:
        listed = ", ".join(in_the_way[:5]) + (", ..." if len(in_the_way) > 5 else "")
        raise ClientError(
            f"{folder} holds {len(in_the_way)} file(s) that differ: {listed}; nothing was written. "
            "Choose another folder, or give --overwrite"
        )
    return [file for file, _ in wanted]


def _is_there(file: FileInfo, target: Path) -> bool:
    return target.is_file() and target.stat().st_size == file.bytes and file_sha256(target) == file.sha256
