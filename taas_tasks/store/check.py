"""Proves at start that a store can be built upon."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from taas.errors import StoreRefused
from taas_tasks.store.base import ObjectStore

_NUM_RACERS = 4


@dataclass(frozen=True)
class StoreFitness:
    """What was found out; ``clock_skew_s``: the store's clock minus ours, good to about a second."""

    clock_skew_s: float
    round_trip_s: float


def refuse_unfit_store(store: ObjectStore) -> StoreFitness:
    """Prove that the store obeys ``If-None-Match: *``, alone and under a race, and measure its clock.

    Everything that must happen once (ledger records, project history) hangs on that condition.

    Raises:
        StoreRefused: two writers of one key both won, or the content is not the winner's.
        StoreUnavailable: the store does not answer.
    """
    key = f"checks/{secrets.token_hex(16)}"
    started = time.time()
    try:
        with ThreadPoolExecutor(_NUM_RACERS) as pool:
            wins = list(pool.map(lambda n: store.put_if_absent(key, b"%d" % n), range(_NUM_RACERS)))
        ended = time.time()
        wins.append(store.put_if_absent(key, b"late"))
        info, content = store.head(key), store.get(key)
    finally:
        store.delete(key)
    if wins.count(True) != 1 or content != b"%d" % wins.index(True) or info is None:
        raise StoreRefused(
            f"the store does not obey 'If-None-Match: *': {wins.count(True)} of {len(wins)} writers of one key won; "
            "TaaS needs conditional writes: use AWS S3, SeaweedFS, MinIO or Cloudflare R2, "
            "or switch off what rewrites requests before it (rclone serve and some proxies drop the header)"
        )
    return StoreFitness(_skew(info.modified_at, started, ended), ended - started)


def _skew(modified_at: float, started: float, ended: float) -> float:
    """Return how far outside [started, ended] a stamp in whole seconds lies; 0 when it may lie inside."""
    if modified_at > ended:
        return modified_at - ended
    return min(0.0, modified_at + 1 - started)
