"""Contents on their way between this machine and the store, by presigned URLs; each verified by its sha256."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TypeVar

import httpx

from taas.client import Client, FileInfo
from taas.errors import ClientError

_CHUNK_BYTES = 1 << 20
_THREADS = 4
_PAUSES_S = (0.3, 1.0, 3.0)
_PART = (".taas-", ".part")
_T = TypeVar("_T")


def is_partial(name: str) -> bool:
    """Return whether a file of this name is an unfinished download."""
    return name.startswith(_PART[0]) and name.endswith(_PART[1])


def file_sha256(path: Path) -> str:
    """Return a file's sha256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def upload_file(client: Client, path: Path, *, url: str, sha256: str, num_bytes: int) -> None:
    """PUT a file; one that changed meanwhile is noticed before its last byte is sent, so that nothing is stored.

    Raises:
        ClientError: the file changed, or the store refused or cannot be reached.
    """
    _retried(client, lambda: _put(client, url, _verified(path, sha256), num_bytes), what=f"upload of {path}")


def upload_bytes(client: Client, data: bytes, *, url: str, what: str) -> None:
    """PUT bytes."""
    _retried(client, lambda: _put(client, url, iter((data,)), len(data)), what=f"upload of {what}")


def download(client: Client, file: FileInfo, folder: Path, *, url: Callable[[], str]) -> None:
    """Write a file below a folder: a temporary beside it, verified, then moved into place.

    Raises:
        ClientError: the path leaves the folder, the content is not the right one, or the store cannot be reached.
    """
    target = safe_target(folder, file.path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _retried(client, lambda: _fetch(client, url(), file, target), what=f"download of {file.path}")
    except OSError as error:
        raise ClientError(f"cannot write {target}: {error.strerror or error}") from error


def safe_target(folder: Path, path: str) -> Path:
    """Return where a file of this path goes; raises ClientError when that is not inside the folder."""
    parts = PurePosixPath(path).parts
    target = folder.joinpath(*parts)
    if not parts or path.startswith("/") or ".." in parts or "\x00" in path:
        raise ClientError(f"got the path '{path}', which leaves the folder; allowed: paths below it")
    if not target.parent.resolve().is_relative_to(folder.resolve()):
        raise ClientError(f"got the path '{path}', which leaves the folder by a link; remove the link from {folder}")
    return target


def in_parallel(action: Callable[[_T], None], items: Iterable[_T]) -> None:
    """Do something for each item, a few at a time; the first error is raised when all have ended."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for future in [pool.submit(action, item) for item in items]:
            future.result()


def _verified(path: Path, sha256: str) -> Iterator[bytes]:
    """Yield a file's chunks, the last one only when the whole has the right hash."""
    digest = hashlib.sha256()
    held = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            if held:
                yield held
            held = chunk
    if digest.hexdigest() != sha256:
        raise ClientError(f"{path} changed while it was uploaded; nothing was committed. Do it again")
    yield held


def _put(client: Client, url: str, chunks: Iterator[bytes], num_bytes: int) -> None:
    # With a length the body goes as it is: stores refuse chunked encoding on presigned URLs.
    reply = client.storage.put(url, content=chunks, headers={"Content-Length": str(num_bytes)})
    reply.raise_for_status()


def _fetch(client: Client, url: str, file: FileInfo, target: Path) -> None:
    handle, name = tempfile.mkstemp(prefix=_PART[0], suffix=_PART[1], dir=target.parent)
    part = Path(name)
    digest = hashlib.sha256()
    try:
        with os.fdopen(handle, "wb") as out, client.storage.stream("GET", url) as reply:
            reply.raise_for_status()
            for chunk in reply.iter_bytes(_CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
        if digest.hexdigest() != file.sha256:
            raise ClientError(f"what came down as {file.path} is not what was stored (sha256 differs); do it again")
        part.chmod(file.mode & 0o777)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _retried(client: Client, action: Callable[[], None], *, what: str) -> None:
    for pause_s in (*_PAUSES_S, None):
        try:
            return action()
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            if pause_s is None or (code < 500 and code != 429):
                raise ClientError(f"the {what} was refused by the store: status {code}", status=code) from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            if pause_s is None:
                raise ClientError(
                    f"the {what} failed: the store cannot be reached ({error})", transient=True
                ) from error
        client.sleep(pause_s)
    raise AssertionError("the last try returns or raises")
