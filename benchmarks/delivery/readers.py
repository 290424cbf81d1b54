"""Our readers, and the ceiling: run by a zygote of our own environment."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3  # noqa: F401 (before the clock runs, as all imports)
import torch

import taas_tasks.store.s3  # noqa: F401
from benchmarks.delivery.prepared import as_tensors
from benchmarks.delivery.workloads import Sink, Witness, drain, element
from taas_tasks.delivery import feeder
from taas_tasks.delivery.loader import DeliveredLoader, Delivery
from taas_tasks.values import LaunchPlan

torch.set_num_threads(1)
Measured = Callable[[], dict[str, Any]]


def versions() -> dict[str, str]:
    return {"torch": torch.__version__}


def feed(path: str) -> Measured:
    """The host's feeder, as the node agent starts it."""

    def run() -> dict[str, Any]:
        feeder.main([path])
        return {}

    return run


def ours(plan_path: str, ranks: list[int], socket: str, counters: str, epochs: int, verify: bool) -> Measured:
    """One process with the delivered loaders of one rank (or of several in turn)."""
    plan = LaunchPlan.model_validate_json(Path(plan_path).read_bytes())
    sink = Witness() if verify else Sink()

    def loader(rank: int) -> DeliveredLoader:
        delivery = Delivery(
            rank=rank,
            world_size=plan.world_size,
            feeder_socket=socket,
            counters_dir=Path(counters),
            group_size=lambda: plan.world_size,
        )
        return DeliveredLoader(plan.loaders["data"], delivery)

    def run() -> dict[str, Any]:
        loaders = [loader(rank) for rank in ranks]
        for _ in range(epochs):
            if len(loaders) == 1:
                drain(loaders[0], sink)
            else:
                for step in zip(*loaders, strict=True):
                    drain(step, sink)
        return told(sink)

    return run


def told(sink: Sink) -> dict[str, Any]:
    """Return what a rank tells."""
    seen = {"seen": sink.seen} if isinstance(sink, Witness) else {}
    return {"elements": sink.num_elements, "bytes": sink.num_bytes, **seen}


def alone(workload: str, count: int, rank: int, epochs: int) -> Measured:
    """The consumer without delivery: its elements are in memory."""
    elements = [as_tensors(element(workload, index)) for index in range(rank, count, 2)]
    sink = Sink()

    def run() -> dict[str, Any]:
        for _ in range(epochs):
            drain(elements, sink)
        return told(sink)

    return run


def ceiling(urls_path: str, threads: int, epochs: int) -> Measured:
    """GET of presigned URLs, read into one preallocated buffer per thread."""
    urls: list[tuple[str, int]] = json.loads(Path(urls_path).read_text()) * epochs
    largest = max(size for _, size in urls)
    buffers = [bytearray(b"\1") * largest for _ in range(threads)]

    def read(place: int) -> int:
        parts = urlsplit(urls[0][0])
        connection = http.client.HTTPConnection(parts.netloc, timeout=60)
        done, view = 0, memoryview(buffers[place])
        for url, size in urls[place::threads]:
            target = urlsplit(url)
            connection.request("GET", f"{target.path}?{target.query}")
            response = connection.getresponse()
            filled = 0
            while filled < size and (gained := response.readinto(view[filled:size])):
                filled += gained
            if filled != size or response.status != 200:
                raise RuntimeError(f"{url}: status {response.status}, {filled} of {size} bytes")
            response.read()
            done += filled
        connection.close()
        return done

    def run() -> dict[str, Any]:
        began = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            done = sum(pool.map(read, range(threads)))
        return {"elements": len(urls), "bytes": done, "began": began}

    return run
