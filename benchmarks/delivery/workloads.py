"""The elements that delivery is measured with. Needs numpy alone: every peer's environment imports it.

Element ``i`` is the same bytes wherever it is made, so that what a lane delivers can be compared with the truth.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

BATCH = 32
Element = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """A kind of element and how many of them; ``message``: how many a peer's loader worker sends at once."""

    name: str
    about: str
    full: int
    quick: int
    message: int
    collated: bool = False  # an element is a batch of 32 samples

    def num_elements(self, *, quick: bool) -> int:
        return self.quick if quick else self.full


WORKLOADS = {
    one.name: one
    for one in (
        Workload("images", "uint8 images of 3x224x224 (147 KiB)", 1280, 320, 8),
        Workload("records", "dicts of float32[512], int32[224], a str of 64 and an int (3 KB)", 8192, 4096, 64),
        Workload("ragged", "int32 token sequences of 16 to 2048 tokens (4 KB in the mean)", 8192, 4096, 64),
        Workload("batches", "32 uint8 images of 3x64x64 and their ids, collated (384 KiB)", 512, 128, 1, collated=True),
    )
}


def element(workload: str, index: int) -> Element:
    """Return element ``index`` of a workload: numpy arrays, ints and strings."""
    if workload == "batches":
        samples = [sample(workload, BATCH * index + row) for row in range(BATCH)]
        return {"id": np.array([one["id"] for one in samples]), "image": np.stack([one["image"] for one in samples])}
    return sample(workload, index)


def sample(workload: str, index: int) -> Element:
    """Return sample ``index``: what a dataset's ``__getitem__`` gives."""
    rng = np.random.Generator(np.random.SFC64([index, len(workload)]))
    if workload == "images":
        return {"id": index, "image": _bytes(rng, (3, 224, 224))}
    if workload == "batches":
        return {"id": index, "image": _bytes(rng, (3, 64, 64))}
    if workload == "ragged":
        count = int(rng.integers(16, 2049))
        return {"id": index, "tokens": rng.integers(0, 50_000, count, dtype=np.int32)}
    features, tokens = rng.random(512, dtype=np.float32), rng.integers(0, 50_000, 224, dtype=np.int32)
    return {"id": index, "features": features, "name": f"{index:064d}", "tokens": tokens}


def _bytes(rng: Any, shape: tuple[int, ...]) -> Any:
    return np.frombuffer(rng.bytes(int(np.prod(shape))), np.uint8).reshape(shape)


def num_bytes(one: Element) -> int:
    """Return the payload of an element: the bytes of its arrays and strings."""
    return sum(len(leaf) if isinstance(leaf, str) else getattr(leaf, "nbytes", 0) for leaf in one.values())


def identity(one: Element) -> list[int]:
    """Return the ids in an element: one, or those of a batch's samples."""
    found = one["id"]
    return [int(found)] if getattr(found, "ndim", 0) == 0 else [int(each) for each in found]


def digest(one: Element) -> str:
    """Return a digest over the names, dtypes, shapes and bytes of an element's leaves."""
    found = hashlib.blake2b(digest_size=8)
    for name in sorted(one):
        leaf = one[name]
        array = np.asarray(leaf)
        shape = "x".join(map(str, array.shape))
        kind = "str" if isinstance(leaf, str) else "int" if name == "id" else f"{array.dtype} {shape}"
        found.update(f"{name} {kind} ".encode())
        found.update(leaf.encode() if isinstance(leaf, str) else np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


class Sink:
    """Copies every byte of what it is given into one buffer, as a copy to a device does."""

    def __init__(self) -> None:
        self._buffer = np.empty(1 << 22, np.uint8)
        self._buffer.fill(1)  # its pages are there before the clock runs
        self.num_bytes = 0
        self.num_elements = 0

    def take(self, one: Element) -> None:
        """Copy an element."""
        for leaf in one.values():
            if isinstance(leaf, int):
                continue
            if isinstance(leaf, str):
                flat = np.frombuffer(leaf.encode(), np.uint8)
            else:
                flat = (leaf if isinstance(leaf, np.ndarray) else leaf.numpy()).reshape(-1).view(np.uint8)
            self._buffer[: len(flat)] = flat
            self.num_bytes += len(flat)
        self.num_elements += 1


class Witness(Sink):
    """Also notes the ids and digests of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[list[int], str]] = []

    def take(self, one: Element) -> None:
        """Note an element."""
        super().take(one)
        self.seen.append((identity(one), digest(one)))


def drain(elements: Iterable[Element], sink: Sink) -> None:
    """Give all elements to a sink."""
    for one in elements:
        sink.take(one)
