"""Our own code as one archive named by what is in it: put on a bare host once per version, in a folder of that name."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("taas", "taas_tasks")
_ELSEWHERE = ("taas_tasks/airflow/", "taas_tasks/stack/")
_SUFFIXES = (".py", ".toml", ".typed")


@dataclass(frozen=True)
class Engine:
    """What runs on a host.

    Attributes:
        digest: Names the content: equal files give an equal digest, on every machine.
        files: Text of each file by its path below the folder.
    """

    digest: str
    files: Mapping[str, bytes]

    @cached_property
    def archive(self) -> bytes:
        """The files as a tar.gz in which nothing depends on when and where it was made."""
        tarred = io.BytesIO()
        with tarfile.open(fileobj=tarred, mode="w") as tar:
            for name, content in self.files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        return gzip.compress(tarred.getvalue(), compresslevel=6, mtime=0)


@cache
def engine() -> Engine:
    """Return the engine of this installation, as it was when this process asked first."""
    return engine_of(_ROOT)


def engine_of(root: Path) -> Engine:
    """Return the engine whose packages lie in ``root``: all but what only Airflow's machines run."""
    files = {name: (root / name).read_bytes() for name in sorted(_names(root))}
    summed = hashlib.sha256()
    for name, content in files.items():
        summed.update(f"{name}\0{len(content)}\0".encode() + content)
    return Engine(summed.hexdigest()[:24], files)


def _names(root: Path) -> Iterator[str]:
    for package in _PACKAGES:
        for path in (root / package).rglob("*"):
            name = path.relative_to(root).as_posix()
            if path.suffix in _SUFFIXES and not name.startswith(_ELSEWHERE):
                yield name
