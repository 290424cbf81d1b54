"""The peers' readers, each as its documentation says for unshuffled reading; run by a zygote of their environment.

All give the elements that were stored: numpy arrays, ints and strings. ``batch``: samples are collated to batches of so
many by torch's own ``default_collate``; else elements travel from loader workers in lists of ``message``.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import boto3
import boto3.s3.transfer  # noqa: F401
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.delivery.workloads import Element, Sink, Witness, digest, identity
from benchmarks.delivery.zygote import die_with_parent

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
_PREFETCH = 4
_NAMES = {"streaming": "mosaicml-streaming", "webdataset": "webdataset", "litdata": "litdata", "plain": "torch"}


def preload(library: str) -> None:
    """Import what a reader needs."""
    if library != "plain":
        __import__(library)


def versions() -> dict[str, str]:
    library = os.environ["BENCH_LIBRARY"]
    preload(library)
    return {_NAMES[library]: version(_NAMES[library]), "torch": torch.__version__}


class _BatchWitness(Witness):
    """Of batches that a reader collated itself, the samples are noted: which ones stand together is the peer's own."""

    def take(self, one: Element) -> None:
        Sink.take(self, one)
        for row, index in enumerate(identity(one)):
            single = {name: leaf[row].numpy() for name, leaf in one.items()}
            self.seen.append(([index], digest({**single, "id": index})))


def read(
    library: str,
    *,
    source: dict[str, Any],
    rank: int,
    ranks: int,
    workers: int,
    message: int,
    batch: int,
    workload: str,
    group: str,
    verify: bool,
    limit_s: float | None,
) -> Callable[[], dict[str, Any]]:
    """Prepare a rank of a peer's lane; it stops after ``limit_s``, and tells how long it read."""
    sink = Sink() if not verify else _BatchWitness() if batch else Witness()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    if library in ("streaming", "litdata"):
        dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=ranks)
    opened = _OPEN[library]

    def run() -> dict[str, Any]:
        loading = {"batch_size": batch or message, "collate_fn": default_collate if batch else _as_list}
        loading["num_workers"] = workers
        if workers:
            loading |= {"prefetch_factor": _PREFETCH, "worker_init_fn": _die_with_rank}
        began = time.monotonic()
        loader = opened(source, workload, rank, loading)
        for one in loader if batch else _each(loader):
            sink.take(one)
            if limit_s is not None and time.monotonic() - began > limit_s:
                break
        reading_s = time.monotonic() - began
        if limit_s is not None:
            _await_others(Path(group).parent, rank, ranks)
        seen = {"seen": sink.seen} if isinstance(sink, Witness) else {}
        return {"elements": sink.num_elements, "bytes": sink.num_bytes, "reading_s": reading_s, **seen}

    return run


def _await_others(folder: Path, rank: int, ranks: int) -> None:
    """Stay until all have stopped: ranks of mosaicml-streaming wait for what another one has begun to download."""
    (folder / f"stopped-{rank}").touch()
    while not all((folder / f"stopped-{one}").exists() for one in range(ranks)):
        time.sleep(0.01)


def _die_with_rank(_: int) -> None:
    die_with_parent()


def _as_list(elements: list[Element]) -> list[Element]:
    return elements


def _each(messages: Iterable[list[Element]]) -> Iterator[Element]:
    for elements in messages:
        yield from elements


def _open_streaming(source: dict[str, Any], workload: str, rank: int, loading: dict[str, Any]) -> Iterable[Any]:
    from streaming import StreamingDataset

    dataset = StreamingDataset(
        remote=source["s3"],
        local=source["cache"],
        shuffle=False,
        batch_size=loading["batch_size"],
        num_canonical_nodes=1,
        predownload=source["ahead"] * loading["batch_size"],
        cache_limit=source["cache_bytes"],
    )
    return DataLoader(dataset, **loading)


def _open_litdata(source: dict[str, Any], workload: str, rank: int, loading: dict[str, Any]) -> Iterable[Any]:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no option for a server without TLS
    options = {
        "endpoint_url": os.environ["S3_ENDPOINT_URL"],
        "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
    }
    dataset = StreamingDataset(
        source["s3"],
        cache_dir=f"{source['cache']}/{rank}",  # a shared one fails: ranks race for the index when the host is busy
        shuffle=False,
        drop_last=True,
        storage_options=options,
        max_pre_download=source["ahead"],
        max_cache_size=source["cache_bytes"] and source["cache_bytes"] // source["ranks"],  # of this rank's folder
    )
    found: Iterable[Any] = StreamingDataLoader(dataset, **loading)
    return found


def _open_webdataset(source: dict[str, Any], workload: str, rank: int, loading: dict[str, Any]) -> Iterable[Any]:
    import webdataset

    urls = [f"pipe:curl -s -f '{url}'" for url in json.loads(Path(source["urls"]).read_text())]
    pipeline = webdataset.WebDataset(
        urls, shardshuffle=False, nodesplitter=webdataset.split_by_node, workersplitter=webdataset.split_by_worker
    ).compose(_Decode(workload, collated=source["collated"]))
    return DataLoader(pipeline, **loading)


def _open_plain(source: dict[str, Any], workload: str, rank: int, loading: dict[str, Any]) -> Iterable[Any]:
    urls = json.loads(Path(source["urls"]).read_text())
    return DataLoader(_Objects(urls, workload, rank, count=source["count"]), **loading)


_OPEN = {"streaming": _open_streaming, "litdata": _open_litdata, "webdataset": _open_webdataset, "plain": _open_plain}
_SHAPES = {"images": (3, 224, 224), "batches": (3, 64, 64)}


class _Decode:
    """From the bytes of a tar's members to an element: views, no copy (faster than any format with a header)."""

    def __init__(self, workload: str, *, collated: bool) -> None:
        self._workload = workload
        self._shape = ((-1,) if collated else ()) + _SHAPES.get(workload, ())
        self._collated = collated

    def __call__(self, samples: Iterable[dict[str, Any]]) -> Iterator[Element]:
        return map(self._element, samples)

    def _element(self, stored: dict[str, Any]) -> Element:
        if self._workload in _SHAPES:
            found = np.frombuffer(stored["id"], np.int64) if self._collated else int(stored["__key__"])
            return {"id": found, "image": np.frombuffer(stored["image"], np.uint8).reshape(self._shape)}
        tokens = np.frombuffer(stored["tokens"], np.int32)
        if self._workload == "ragged":
            return {"id": int(stored["__key__"]), "tokens": tokens}
        features = np.frombuffer(stored["features"], np.float32)
        return {"id": int(stored["__key__"]), "features": features, "name": stored["name"].decode(), "tokens": tokens}


class _Objects(Dataset[Any]):
    """One object per sample, by kept-alive connections; rank r has the objects r, r + 2, ...

    ``count``: of different samples; of more objects, the later ones are the same samples again.
    """

    def __init__(self, urls: list[str], workload: str, rank: int, *, count: int) -> None:
        self._urls, self._workload, self._rank, self._count = urls, workload, rank, count
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._urls) // 2

    def __getitem__(self, place: int) -> Element:
        import urllib3

        self._pool = self._pool or urllib3.PoolManager()
        index = 2 * place + self._rank
        answer = self._pool.request("GET", self._urls[index])
        if answer.status != 200:
            raise RuntimeError(f"{self._urls[index]}: status {answer.status}")
        return _from_object(self._workload, index % self._count, answer.data)


def _from_object(workload: str, index: int, data: bytes) -> Element:
    if workload in _SHAPES:
        return {"id": index, "image": np.frombuffer(data, np.uint8).reshape(_SHAPES[workload])}
    if workload == "ragged":
        return {"id": index, "tokens": np.frombuffer(data, np.int32)}
    features, tokens = np.frombuffer(data, np.float32, 512), np.frombuffer(data, np.int32, 224, 2112)
    return {"id": index, "features": features, "name": data[2048:2112].decode(), "tokens": tokens}
