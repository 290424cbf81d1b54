"""The files of a folder as a project sees them: which paths are safe, what is a file, what is left out.

Left out without a word: byte code and caches (``IGNORED``). Left out with a note: links that leave the folder, links to
folders, sockets, pipes and devices. A link to a file inside of the folder counts as a copy of that file. Empty folders
are not kept.
"""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from taas.errors import ProjectError

IGNORED = frozenset(
    {"__pycache__", ".git", ".venv", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".DS_Store"}
)
_IGNORED_ENDS = (".pyc", ".pyo")
_IGNORED_STARTS = (".nfs",)  # what NFS makes of a file that was removed while open
_OUR_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")  # what a killed ``write_then_move`` leaves
_MAX_PART_BYTES = 255  # Linux
_MAX_PATH_BYTES = 2048


def safe_path(path: str) -> str:
    """Return a project path in its one form: relative, ``/`` between parts, unicode NFC.

    Raises:
        ProjectError: it is absolute, has a part that is empty, ``.`` or ``..``, is too long, or is no valid unicode.
    """
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise ProjectError(
            f"{path!r} is no path of a project: relative ones without '.', '..' and empty parts are", path=path
        )
    try:
        normal = unicodedata.normalize("NFC", path)
        lengths = [len(part.encode()) for part in normal.split("/")]
    except UnicodeEncodeError:
        raise ProjectError(f"{path!a} is no path of a project: its name is no valid UTF-8", path=ascii(path)) from None
    if max(lengths) > _MAX_PART_BYTES or sum(lengths) + len(lengths) > _MAX_PATH_BYTES:
        limits = f"{_MAX_PART_BYTES} bytes a name, {_MAX_PATH_BYTES} a path"
        raise ProjectError(f"path {path[:80]!r}... is too long; allowed are {limits}", path=path)
    return normal


def parents(path: str) -> Iterator[str]:
    """Yield the folders above a path: ``a/b/c`` gives ``a`` and ``a/b``."""
    for n, char in enumerate(path):
        if char == "/":
            yield path[:n]


def file_above(path: str, files: Iterable[str]) -> str | None:
    """Return the one of ``files`` (a set or dict) that is a file where ``path`` needs a folder."""
    return next((parent for parent in parents(path) if parent in files), None)


@dataclass
class Scan:
    """What a folder holds: path -> where its content is, and what was left out (path -> reason)."""

    files: dict[str, Path] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def scan(folder: Path) -> Scan:
    """Return the files below ``folder``; follows no link that leaves it.

    Raises:
        ProjectError: ``folder`` is none, a name is not allowed, or two names are the same in unicode NFC.
    """
    root = folder.resolve()
    if not root.is_dir():
        raise ProjectError(f"{folder} is no folder", path=str(folder))
    found = Scan()
    _scan_into(found, root, root, "")
    return found


def _scan_into(found: Scan, root: Path, folder: Path, prefix: str) -> None:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if is_ignored(entry.name):
                continue
            path = safe_path(prefix + entry.name)
            if entry.is_dir(follow_symlinks=False):
                _scan_into(found, root, Path(entry.path), path + "/")
            else:
                _scan_one(found, root, Path(entry.path), path)


def _scan_one(found: Scan, root: Path, where: Path, path: str) -> None:
    target = where.resolve() if where.is_symlink() else where
    reason = _reason_to_skip(root, where, target)
    if reason is not None:
        found.skipped[path] = reason
    elif path in found.files:
        raise ProjectError(
            f"two files are both named {path!r} (they differ in unicode form only): rename one", path=path
        )
    else:
        found.files[path] = target


def _reason_to_skip(root: Path, where: Path, target: Path) -> str | None:
    if not target.is_relative_to(root):
        return f"a link that leaves the project folder (to {where.readlink()})"
    try:
        mode = target.lstat().st_mode
    except OSError:
        return "a link to nothing"
    if stat.S_ISREG(mode):
        return None
    return "a link to a folder" if stat.S_ISDIR(mode) else "a socket, pipe or device"


def is_ignored(name: str) -> bool:
    """Return whether files and folders of this name are never part of a project."""
    if name in IGNORED or _OUR_TEMPORARY.fullmatch(name):
        return True
    return name.endswith(_IGNORED_ENDS) or name.startswith(_IGNORED_STARTS)
