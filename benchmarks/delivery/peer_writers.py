"""Writes the peers' datasets, in the peers' environment.

    python -m benchmarks.delivery.peer_writers LIBRARY SPEC.json

The spec has ``jobs``: workload, layout ("elements" or "samples"), count and folder of each. Every library gets
``shards`` shards of equal numbers of items.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.delivery.workloads import Element, element, sample

Make = Callable[[int], Element]


def _encoding(leaf: Any, *, ragged: bool) -> str:
    if isinstance(leaf, str):
        return "str"
    if isinstance(leaf, int):
        return "int"
    shape = "" if ragged else ":" + ",".join(map(str, leaf.shape))
    return f"ndarray:{leaf.dtype}{shape}"


def write_streaming(make: Make, count: int, folder: Path, shards: int, ragged: bool) -> None:
    from streaming import MDSWriter

    columns = {name: _encoding(leaf, ragged=ragged) for name, leaf in make(0).items()}
    sizes = [sum(getattr(leaf, "nbytes", 64) for leaf in make(index).values()) + 64 for index in range(0, count, 97)]
    limit = int(np.mean(sizes) * count / shards * 1.01)
    with MDSWriter(out=str(folder), columns=columns, size_limit=limit) as out:
        for index in range(count):
            out.write(make(index))


def write_litdata(make: Make, count: int, folder: Path, shards: int, ragged: bool) -> None:
    from litdata.streaming.cache import Cache

    cache = Cache(str(folder), chunk_size=count // shards)
    for index in range(count):
        cache[index] = make(index)
    cache.done()
    cache.merge()


def write_webdataset(make: Make, count: int, folder: Path, shards: int, ragged: bool) -> None:
    per_shard = count // shards
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for index in range(shard * per_shard, (shard + 1) * per_shard):
                for name, leaf in make(index).items():
                    if not isinstance(leaf, int):  # a sample's id is its key
                        _add(tar, f"{index:08d}.{name}", leaf)


def write_objects(make: Make, count: int, folder: Path, shards: int, ragged: bool) -> None:
    """One object per item, as plain loaders read them: the arrays' bytes one after the other, a str as it is."""
    for index in range(count):
        leaves = [leaf for leaf in make(index).values() if not isinstance(leaf, int)]
        (folder / f"{index:08d}").write_bytes(b"".join(_raw(leaf) for leaf in leaves))


def _raw(leaf: Any) -> bytes:
    return leaf.encode() if isinstance(leaf, str) else bytes(leaf.tobytes())


def _add(tar: tarfile.TarFile, name: str, leaf: Any) -> None:
    info, data = tarfile.TarInfo(name), _raw(leaf)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


WRITERS = {
    "streaming": write_streaming,
    "litdata": write_litdata,
    "webdataset": write_webdataset,
    "plain": write_objects,
}


def main(argv: list[str]) -> int:
    spec = json.loads(Path(argv[1]).read_text())
    for job in spec["jobs"]:
        folder = Path(job["folder"])
        folder.mkdir(parents=True)
        make_one = sample if job["layout"] == "samples" else element
        workload = job["workload"]

        def make(index: int, made: Any = make_one, of: str = workload) -> Element:
            found: Element = made(of, index)
            return found

        WRITERS[argv[0]](make, job["count"], folder, spec["shards"], workload == "ragged")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
