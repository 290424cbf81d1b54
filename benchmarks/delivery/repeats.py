"""A peer's dataset several times over, for long lanes: every file has other names, and the index names all of them.

The copies are hard links: they take no memory of the server, and no cache of a peer knows that they are the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Index = dict[str, Any]
_INDEX = "index.json"


def copy_name(name: str, copy: int) -> str:
    """Return a file's name in a copy: copies sort one behind the other, and keep what libraries read in a name."""
    if name.startswith("chunk-0-"):  # litdata: chunk-WRITER-NUMBER.bin
        return f"chunk-{copy}-{name.removeprefix('chunk-0-')}"
    return f"{copy}-{name}"


def mds_index(index: Index, times: int) -> Index:
    """Return the index.json of mosaicml-streaming that names every shard ``times`` times."""

    def shard(one: Index, copy: int) -> Index:
        if one["zip_data"] is not None:
            raise ValueError(f"shard {one['raw_data']['basename']} is compressed; only plain shards can be repeated")
        return {**one, "raw_data": {**one["raw_data"], "basename": copy_name(one["raw_data"]["basename"], copy)}}

    return {**index, "shards": [shard(one, copy) for copy in range(times) for one in index["shards"]]}


def litdata_index(index: Index, times: int) -> Index:
    """Return the index.json of litdata that names every chunk ``times`` times."""
    chunks = [{**one, "filename": copy_name(one["filename"], copy)} for copy in range(times) for one in index["chunks"]]
    return {**index, "chunks": chunks}


_INDEXES: dict[str, Callable[[Index, int], Index]] = {"streaming": mds_index, "litdata": litdata_index}


def repeat(library: str, source: Path, target: Path, *, times: int) -> None:
    """Make the dataset ``target`` of ``times`` copies of ``source``; libraries without an index are given all names."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.name != _INDEX:
            for copy in range(times):
                (target / copy_name(file.name, copy)).hardlink_to(file)
    index = source / _INDEX
    if library in _INDEXES and index.exists():  # where there is none its lanes are void
        (target / _INDEX).write_text(json.dumps(_INDEXES[library](json.loads(index.read_text()), times)))
