"""Puts the engine on a host: this text is sent there and run (``EXEC`` on the command line, ``shipment`` as input).

Standard library only, and readable by every Python 3 down to the line that refuses an old one.
"""

import io
import json
import os
import shutil
import sys
import tarfile
import time
from pathlib import Path

LEAST_PYTHON = (3, 11)
EXEC = "import sys; i = sys.stdin.buffer; exec(i.read(int(i.readline())))"
_STALE_S = 3600


def shipment(folder: Path, archive: bytes) -> bytes:
    """Return what ``EXEC`` reads: this file's own text, which folder, and the archive."""
    source, where = Path(__file__).read_bytes(), str(folder).encode()
    return b"%d\n%b%d\n%b%b" % (len(source), source, len(where), where, archive)


def unpack(folder: Path, archive: bytes) -> None:
    """Make ``folder`` hold the archive's files, whole or not at all; whoever does the same beside us is welcome."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep(folder.parent)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
            names = tar.getnames()
            for name in names:
                content = tar.extractfile(name)
                _write(temporary / name, content.read() if content else b"")
        _publish(temporary, folder, names)
    finally:
        shutil.rmtree(str(temporary), ignore_errors=True)


def _publish(temporary: Path, folder: Path, names: list) -> None:  # type: ignore[type-arg]
    broken = temporary.with_name(f"{temporary.name}.broken")
    try:
        if folder.is_dir() and not all((folder / name).is_file() for name in names):  # a sweeper of old files was here
            folder.rename(broken)
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(str(broken), ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # the folder's name promises its content, also after the host has lost power


def _sweep(parent: Path) -> None:
    """Remove what shippers left that were killed."""
    for path in parent.glob(".*"):
        try:
            is_stale = time.time() - path.stat().st_mtime > _STALE_S
        except OSError:
            continue  # its shipper has just finished
        if is_stale:
            shutil.rmtree(str(path), ignore_errors=True)


def main() -> dict:  # type: ignore[type-arg]
    """Read the rest of the shipment from standard input, unpack it, and return what is to be said."""
    if sys.version_info < LEAST_PYTHON:
        least = ".".join(str(part) for part in LEAST_PYTHON)
        message = f"its python {sys.executable} is {sys.version.split()[0]}, at least {least} is needed"
        return {"error": {"kind": "refused", "message": message}}
    os.umask(0o077)
    given = sys.stdin.buffer
    folder = Path(given.read(int(given.readline())).decode())
    try:
        unpack(folder, given.read())
    except OSError as error:
        return {"error": {"kind": "failed", "message": f"the engine cannot be put there: {error}"}}
    return {"ok": {}}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main()) + "\n")
