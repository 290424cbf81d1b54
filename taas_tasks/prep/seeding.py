"""Seeding python, numpy and torch per element, so that values do not depend on machines, loader workers or retries.

The seeds are a hash of (seed, epoch, index). What is seeded: the ``random`` module, numpy's legacy global generator
and torch's default CPU generator, each by its generator's own seeding (``torch.manual_seed`` costs 74 us, as it also
visits every accelerator). Generators that a dataset makes for itself are its own affair: seed them from these, or from
the index. Where preparation loads elements nothing is restored after one: the next is seeded anew, so nothing before it
shows, and what a ``worker_init_fn`` seeds is overwritten by the first element. ``kept_states`` restores them where
samplers draw from the same generators (``elements.element_seeded`` in one process).
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def element_seeds(seed: int, epoch: int, index: int) -> tuple[int, int, int]:
    """Return the seeds of one element for python (64 bits), numpy (32 bits) and torch (63 bits)."""
    packed = struct.pack("<QQQ", seed % (1 << 64), epoch, index)
    for_python, for_torch, for_numpy = struct.unpack("<QQI", hashlib.blake2b(packed, digest_size=20).digest())
    return for_python, for_numpy, for_torch >> 1


def seed_element(seed: int, epoch: int, index: int) -> None:
    """Seed the three global generators for one element."""
    for_python, for_numpy, for_torch = element_seeds(seed, epoch, index)
    random.seed(for_python)
    np.random.seed(for_numpy)
    torch.default_generator.manual_seed(for_torch)


@contextmanager
def kept_states() -> Iterator[None]:
    """Leave the three global generators behind as they were before."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_start(seed: int) -> None:
    """Seed the three global generators as a script does at its start: ``torch.manual_seed(seed)`` and the like."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
