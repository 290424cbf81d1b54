"""Reading a loader's ledger as it grows: asks for the next records by name, so a poll costs what is new."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from taas.errors import ObjectMissing
from taas_tasks import ledger
from taas_tasks.layout import RunKeys
from taas_tasks.ledger import Frontier, MergedPrefix, OneStreamPrefix, SegmentId
from taas_tasks.store.base import ObjectStore
from taas_tasks.streams import MergedProgress
from taas_tasks.values import LoaderPlan, ShardRecord, Watermark

_MAX_AT_ONCE = 32
_THREADS = 8


class LedgerReader:
    """Follows one loader's ledger. Not for several threads at once.

    A poll asks for the record that comes next in every stream that may have one; then for as many at once of a stream
    as it has found, up to 32, so that catching up with a long ledger is quick and waiting costs one request per stream.
    Streams that have ended, or of which nothing more is certain to be needed, cost none.
    """

    def __init__(self, store: ObjectStore, run: str, loader_plan: LoaderPlan) -> None:
        self._store = store
        self._keys = RunKeys(run)
        self._plan = loader_plan
        self._prefix = ledger.prefix_of(loader_plan)
        self._ahead: dict[SegmentId, ShardRecord] = {}
        self._gained: list[ShardRecord] = []

    @property
    def is_complete(self) -> bool:
        """Whether all units were committed at the last poll."""
        return self._prefix.is_complete

    @property
    def merged(self) -> MergedProgress | None:
        """What is there of a merged loader, and in which order; None of another one."""
        return self._prefix.merged if isinstance(self._prefix, MergedPrefix) else None

    @property
    def frontier(self) -> Frontier:
        """How far the contiguous prefix of a loader that is not merged reached at the last poll.

        Raises:
            ValueError: The loader is merged: each of its streams has a frontier of its own.
        """
        if not isinstance(self._prefix, OneStreamPrefix):
            raise ValueError(f"loader {self._plan.loader!r} has {self._plan.num_streams} streams; ask `merged`")
        return self._prefix.frontier

    @property
    def watermark(self) -> Watermark:
        """How many units are there without a gap."""
        return ledger.watermark(self._plan, self._prefix)

    @property
    def ahead(self) -> dict[SegmentId, ShardRecord]:
        """Records that were seen behind a hole of their stream, by ``(epoch, stream, n)``."""
        return dict(self._ahead)

    @property
    def awaited(self) -> list[SegmentId]:
        """The next segment of every stream that is certain to have one, by ``(epoch, stream, n)``."""
        return self._prefix.awaited()

    def poll(self, *, enough: int | None = None) -> list[ShardRecord]:
        """Return the records gained since the last poll: of every stream those without a gap, in their order.

        With ``enough`` it may return once it has gained so many, though there are more: for who works on them
        meanwhile. What was gained before an error is returned by the next poll.

        Raises:
            ObjectCorrupt: An object of the ledger is not what was committed.
            StoreError: The store does not answer.
        """
        missed: set[SegmentId] = set()
        found: Counter[int] = Counter()
        self._advance()
        while awaited := [segment for segment in self._prefix.awaited() if segment not in missed]:
            if enough is not None and len(self._gained) >= enough:
                break
            wanted = dict.fromkeys(one for segment in awaited for one in self._next(segment, found[segment[1]]))
            asked = [one for one in wanted if one not in missed]
            lacking = self._look(asked)
            missed |= lacking
            found.update(one[1] for one in asked if one not in lacking)
            self._advance()
        gained, self._gained = self._gained, []
        return gained

    def catch_up(self) -> list[ShardRecord]:
        """Take in what is there by a listing, before the first poll: for who needs sums, and not every record.

        Reads one record of each epoch and stream, its last one without a gap, and returns those; polls give what comes
        after them.

        Raises:
            ObjectCorrupt: One of these records is not what was committed.
            StoreError: The store does not answer.
        """
        found: dict[SegmentId, ShardRecord] = {}
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="ledger") as pool:
            for record in pool.map(self._ask, self._last_listed()):
                if record is not None:
                    found[record.epoch, record.stream, 0] = record
        taken = []
        while ready := [found.pop(one) for one in self._prefix.awaited() if one in found]:
            for record in ready:
                self._prefix.pass_over(record)
                self._ahead[record.epoch, record.stream, record.n] = record
            self._advance()
            taken += ready
        self._gained.clear()
        return taken

    def _last_listed(self) -> list[SegmentId]:
        """Return of every epoch and stream the last segment before the first hole."""
        found: dict[tuple[int, int], int] = {}
        prefix = self._keys.ledger(self._plan.loader)
        for info in self._store.list(prefix):
            parts = info.key.removeprefix(prefix).removesuffix(".json").split("/")
            if len(parts) == 3 and all(part.isdecimal() for part in parts):
                epoch, stream, n = map(int, parts)
                if n == found.get((epoch, stream), -1) + 1:
                    found[epoch, stream] = n
        return [(epoch, stream, n) for (epoch, stream), n in found.items()]

    def look_ahead(self, count: int, *, stream: int = 0) -> list[tuple[int, int]]:
        """Ask for the next ``count`` records of a stream; return the segments ``(epoch, n)`` that are still missing."""
        wanted = [
            one
            for segment in self._prefix.awaited()
            if segment[1] == stream
            for one in self._prefix.following(segment, count)
        ]
        self._look(wanted)
        return [(epoch, n) for epoch, _, n in wanted if (epoch, stream, n) not in self._ahead]

    def record(self, epoch: int, n: int, *, stream: int = 0) -> ShardRecord | None:
        """Return one record, or None while the segment is not committed.

        Raises:
            ObjectCorrupt: The object is not what was committed.
        """
        key = self._key(epoch, stream, n)
        try:
            data = self._store.get(key)
        except ObjectMissing:
            return None
        return ledger.read_record(data, key)

    def _key(self, epoch: int, stream: int, n: int) -> str:
        return self._keys.ledger_record(self._plan.loader, epoch, stream, n)

    def _next(self, awaited: SegmentId, found: int) -> list[SegmentId]:
        """Return what is asked for next of a stream of which a poll has found so many records."""
        return [awaited, *self._prefix.following(awaited, min(_MAX_AT_ONCE, max(1, found)))]

    def _look(self, segments: list[SegmentId]) -> set[SegmentId]:
        """Ask for records that are not there yet; return those that are missing."""
        asked = [segment for segment in segments if segment not in self._ahead]
        if len(asked) <= 1:
            found = [self._ask(segment) for segment in asked]
        else:
            with ThreadPoolExecutor(min(_THREADS, len(asked)), thread_name_prefix="ledger") as pool:
                found = list(pool.map(self._ask, asked))
        self._ahead |= {segment: record for segment, record in zip(asked, found, strict=True) if record is not None}
        return {segment for segment, record in zip(asked, found, strict=True) if record is None}

    def _ask(self, segment: SegmentId) -> ShardRecord | None:
        epoch, stream, n = segment
        return self.record(epoch, n, stream=stream)

    def _advance(self) -> None:
        """Move what has become contiguous from ``ahead`` to what was gained."""
        while ready := [segment for segment in self._prefix.awaited() if segment in self._ahead]:
            for segment in ready:
                self._take(segment)

    def _take(self, segment: SegmentId) -> None:
        record = self._ahead.pop(segment)
        try:
            self._prefix.take(record)
        except ValueError as error:
            raise ledger.corrupt_record(self._key(*segment), f"a record that does not follow: {error}") from None
        self._gained.append(record)
