"""A dataset several times over: other names for the same bytes, all of them in the index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.delivery.repeats import copy_name, litdata_index, mds_index, repeat


def mds(*names: str) -> dict[str, Any]:
    shards = [
        {"raw_data": {"basename": name, "bytes": 5, "hashes": {}}, "zip_data": None, "samples": 7} for name in names
    ]
    return {"version": 2, "shards": shards}


def litdata(*names: str) -> dict[str, Any]:
    return {"chunks": [{"filename": name, "chunk_bytes": 5, "chunk_size": 7} for name in names], "config": {"x": 1}}


def dataset(folder: Path, names: list[str], index: dict[str, Any] | None) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(name.encode())
    if index is not None:
        (folder / "index.json").write_text(json.dumps(index))
    return folder


def named_by(library: str, index: dict[str, Any]) -> list[str]:
    if library == "litdata":
        return [one["filename"] for one in index["chunks"]]
    return [one["raw_data"]["basename"] for one in index["shards"]]


@pytest.mark.parametrize(
    ("library", "names", "index"),
    [
        ("streaming", ["shard.00000.mds", "shard.00001.mds"], mds("shard.00000.mds", "shard.00001.mds")),
        ("litdata", ["chunk-0-0.bin", "chunk-0-1.bin"], litdata("chunk-0-0.bin", "chunk-0-1.bin")),
    ],
)
def test_index_names_every_copy_in_order_and_each_is_a_link_to_the_same_bytes(
    tmp_path: Path, library: str, names: list[str], index: dict[str, Any]
) -> None:
    source = dataset(tmp_path / "once", names, index)
    repeat(library, source, tmp_path / "often", times=3)
    found = named_by(library, json.loads((tmp_path / "often/index.json").read_text()))
    assert found == [copy_name(name, copy) for copy in range(3) for name in names]
    assert len(set(found)) == 6
    assert sorted([*found, "index.json"]) == sorted(one.name for one in (tmp_path / "often").iterdir())
    for copy in range(3):
        for name in names:
            assert (tmp_path / "often" / copy_name(name, copy)).samefile(source / name)


def test_index_keeps_what_it_says_of_each_file() -> None:
    shard = mds_index(mds("a.mds"), 2)["shards"][1]
    assert (shard["samples"], shard["raw_data"]["bytes"], shard["zip_data"]) == (7, 5, None)
    found = litdata_index(litdata("chunk-0-0.bin"), 2)
    assert found["config"] == {"x": 1}
    assert found["chunks"][1] == {"filename": "chunk-1-0.bin", "chunk_bytes": 5, "chunk_size": 7}


def test_files_without_an_index_sort_copy_by_copy(tmp_path: Path) -> None:
    names = ["00000.tar", "00001.tar"]
    repeat("webdataset", dataset(tmp_path / "once", names, None), tmp_path / "often", times=2)
    found = sorted(one.name for one in (tmp_path / "often").iterdir())
    assert found == ["0-00000.tar", "0-00001.tar", "1-00000.tar", "1-00001.tar"]


def test_compressed_shards_are_refused() -> None:
    index = mds("a.mds")
    index["shards"][0]["zip_data"] = {"basename": "a.mds.zstd"}
    with pytest.raises(ValueError, match=r"a\.mds is compressed"):
        mds_index(index, 2)
