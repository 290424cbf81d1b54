"""How far is this host's clock from the store's? S3 refuses requests signed by a clock that is 15 minutes off."""

from __future__ import annotations

import time
from collections.abc import Callable

from taas_tasks.store.base import ObjectStore

_MAX_SKEW_S = 60.0


def skew_s(store: ObjectStore, key: str, *, clock: Callable[[], float] = time.time) -> float:
    """Return by how many seconds this host's clock is ahead of the store's, to about a second.

    The store dates an object that is written under ``key`` for this. What can be explained by the time that the write
    took, or by the store's dates being whole seconds, counts as no difference.
    """
    before = clock()
    store.put(key, b"")
    after = clock()
    info = store.head(key)
    if info is None:
        return 0.0
    earliest, latest = before - 1.0, after  # the date is cut to whole seconds
    if earliest <= info.modified_at <= latest:
        return 0.0
    return before - 1.0 - info.modified_at if info.modified_at < earliest else after - info.modified_at


def findings(skew: float) -> list[str]:
    """Return what to say of a clock that is ``skew`` seconds ahead of the store's."""
    if abs(skew) <= _MAX_SKEW_S:
        return []
    text = f"the clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the object store's"
    return [f"{text}; at most {_MAX_SKEW_S:.0f} s are allowed (S3 refuses 900 s): run NTP or chrony on the host"]
