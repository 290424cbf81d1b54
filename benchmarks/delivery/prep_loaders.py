"""The loaders that preparation is measured with. This text is also the measured project's ``data.py``.

Each is bound by something else: by waiting for reads, by decoding on the CPU, by bytes, or by the number of elements.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

SAMPLES = 1 << 20
IMAGE = (3, 224, 224)  # 150 KB


class SlowReads(Dataset[Any]):
    """Each read waits, as for a remote store."""

    def __init__(self, wait_s: float, size: int = 12_288) -> None:
        self._wait_s = wait_s
        self._size = size

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._wait_s)
        return torch.full((self._size,), index % 251, dtype=torch.uint8), index


class Compressed(Dataset[Any]):
    """Images of 150 KB that are decompressed and mirrored: about 1 ms of CPU for each of ``passes``."""

    def __init__(self, passes: int, samples: int = SAMPLES) -> None:
        self._passes = passes
        self._samples = samples
        drawn = np.random.default_rng(0).integers(0, 60, IMAGE, dtype=np.uint8)
        self._blob = zlib.compress(drawn.tobytes(), 6)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        for _ in range(self._passes):
            image = np.frombuffer(zlib.decompress(self._blob), np.uint8).reshape(IMAGE)
        return torch.from_numpy(image[:, :, ::-1].copy()), index


class Records(Dataset[Any]):
    """Records of 3 KB that cost nothing to make."""

    def __init__(self) -> None:
        self._table = torch.arange(1000 * 768, dtype=torch.float32).reshape(1000, 768)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self._table[index % 1000].clone(), index


class SlowStream(IterableDataset[Any]):
    """A stream whose reads wait; its loader workers share it."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(start, SAMPLES, step):
            time.sleep(self._wait_s)
            yield torch.full((12_288,), index % 251, dtype=torch.uint8), index


def waits_1() -> DataLoader[Any]:
    """20 ms a read, one loader worker."""
    return DataLoader(SlowReads(0.02), batch_size=1, num_workers=1)


def waits_4() -> DataLoader[Any]:
    """20 ms a read, four loader workers."""
    return DataLoader(SlowReads(0.02), batch_size=1, num_workers=4)


def decodes_1() -> DataLoader[Any]:
    """4 images of 5 ms each, one loader worker."""
    return DataLoader(Compressed(5), batch_size=4, num_workers=1)


def decodes_2() -> DataLoader[Any]:
    """4 images of 5 ms each, two loader workers."""
    return DataLoader(Compressed(5), batch_size=4, num_workers=2)


def large_1() -> DataLoader[Any]:
    """Batches of 32 images of 2 ms, 4.8 MB, one loader worker."""
    return DataLoader(Compressed(2), batch_size=32, num_workers=1)


def tiny_2() -> DataLoader[Any]:
    """3 KB each, two loader workers."""
    return DataLoader(Records(), batch_size=None, num_workers=2)


def tiny_batched_2() -> DataLoader[Any]:
    """Batches of 32 records, two loader workers."""
    return DataLoader(Records(), batch_size=32, num_workers=2)


def stream_4() -> DataLoader[Any]:
    """An iterable, 20 ms a read, four loader workers that share it."""
    return DataLoader(SlowStream(0.02), batch_size=1, num_workers=4)


def cheap_96() -> DataLoader[Any]:
    """4 images of 1 ms each, one loader worker; 96 elements an epoch."""
    return DataLoader(Compressed(1, 4 * 96), batch_size=4, num_workers=1)


def cheap_32() -> DataLoader[Any]:
    """The same with 32 elements an epoch."""
    return DataLoader(Compressed(1, 4 * 32), batch_size=4, num_workers=1)
