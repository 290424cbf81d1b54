"""Which segments of a loader are committed, from listings of the ledger's keys: what a machine skips, and who lags."""

from __future__ import annotations

import threading
from collections import deque

from taas.errors import ObjectMissing
from taas_tasks.layout import RunKeys
from taas_tasks.ledger import read_record
from taas_tasks.plan import segments_in_order
from taas_tasks.store.base import ObjectStore
from taas_tasks.values import LoaderPlan

SegmentId = tuple[int, int]
_LOOKED_AHEAD = 256


def committed_segments(
    store: ObjectStore, keys: RunKeys, loader: str, *, behind: SegmentId | None = None
) -> set[SegmentId]:
    """Return the segments ``(epoch, n)`` in the ledger, those after ``behind`` only where it is given. One listing."""
    prefix = keys.ledger(loader)
    start_after = "" if behind is None else keys.ledger_record(loader, behind[0], 0, behind[1])
    found = set()
    for info in store.list(prefix, start_after=start_after):
        epoch, _stream, name = info.key.removeprefix(prefix).split("/")
        found.add((int(epoch), int(name.removesuffix(".json"))))
    return found


class Progress:
    """Follows the ledger of a loader whose epochs' lengths are known. A refresh lists only what is after the prefix.

    Safe to use from several threads.
    """

    def __init__(self, store: ObjectStore, keys: RunKeys, plan: LoaderPlan) -> None:
        self._store = store
        self._keys = keys
        self._loader = plan.loader
        self._order = segments_in_order(plan)
        self._next: deque[SegmentId] = deque()
        self._last: SegmentId | None = None
        self._seen: set[SegmentId] = set()
        self._lock = threading.RLock()
        self._look_ahead()

    @property
    def is_complete(self) -> bool:
        """Whether every segment is committed."""
        return not self._next

    @property
    def frontier(self) -> SegmentId | None:
        """The first segment that is missing; None when none is."""
        return self._next[0] if self._next else None

    def has(self, segment: SegmentId) -> bool:
        """Return whether a segment was committed at the last refresh."""
        with self._lock:
            return self.is_complete or segment < self._next[0] or segment in self._seen

    def missing(self, count: int) -> list[SegmentId]:
        """Return the first ``count`` missing segments (of the next few hundred)."""
        with self._lock:
            return [segment for segment in self._next if segment not in self._seen][:count]

    def machine_of(self, segment: SegmentId) -> int | None:
        """Return the machine whose result of a segment counts; None while there is none."""
        key = self._keys.ledger_record(self._loader, segment[0], 0, segment[1])
        try:
            return read_record(self._store.get(key), key).machine
        except ObjectMissing:
            return None

    def note(self, segment: SegmentId) -> None:
        """Take in that a segment is committed, without a request."""
        with self._lock:
            if not self.has(segment):
                self._seen.add(segment)
                self._advance()

    def refresh(self) -> None:
        """List what was committed since."""
        if self.is_complete:
            return
        found = committed_segments(self._store, self._keys, self._loader, behind=self._last)
        with self._lock:
            self._seen |= {segment for segment in found if not self.has(segment)}
            self._advance()

    def _advance(self) -> None:
        while self._next and self._next[0] in self._seen:
            self._last = self._next.popleft()
            self._seen.discard(self._last)
            self._look_ahead()

    def _look_ahead(self) -> None:
        while len(self._next) < _LOOKED_AHEAD and (segment := next(self._order, None)) is not None:
            self._next.append(segment)
