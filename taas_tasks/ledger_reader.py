"""Reading a loader's ledger as it grows: asks for the next records by name, so a poll costs what is new."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from taas.errors import ObjectMissing
from taas_tasks import ledger
from taas_tasks.layout import RunKeys
from taas_tasks.ledger import Frontier
from taas_tasks.plan import epochs_of_plan
from taas_tasks.store.base import ObjectStore
from taas_tasks.values import LoaderPlan, ShardRecord, Watermark

_MAX_AT_ONCE = 32


class LedgerReader:
    """Follows the contiguous prefix of one loader's ledger. Not for several threads at once.

    A poll asks for the record at the frontier; while records are found it asks for twice as many at once, up to 32,
    so that catching up with a long ledger is quick and waiting costs one request per poll.
    """

    def __init__(self, store: ObjectStore, run: str, loader_plan: LoaderPlan) -> None:
        self._store = store
        self._keys = RunKeys(run)
        self._plan = loader_plan
        self._epochs = epochs_of_plan(loader_plan)
        self._frontier = Frontier()
        self._ahead: dict[tuple[int, int], ShardRecord] = {}

    @property
    def frontier(self) -> Frontier:
        """How far the contiguous prefix reached at the last poll."""
        return self._frontier

    @property
    def watermark(self) -> Watermark:
        """The same as a value."""
        return ledger.watermark(self._plan, self._frontier)

    @property
    def ahead(self) -> dict[tuple[int, int], ShardRecord]:
        """Records that were seen behind a hole, by ``(epoch, n)``."""
        return dict(self._ahead)

    def poll(self) -> list[ShardRecord]:
        """Return the records that the contiguous prefix gained since the last poll, in the order of the stream."""
        gained = self._advance()
        at_once = 1
        while not self._frontier.complete:
            before = len(gained)
            self._look(self._following(at_once))
            gained += self._advance()
            if len(gained) == before:
                break
            at_once = min(_MAX_AT_ONCE, at_once * 2)
        return gained

    def look_ahead(self, count: int) -> list[tuple[int, int]]:
        """Ask for the next ``count`` records from the frontier on; return the segments that are still missing."""
        self._look(self._following(count))
        segments = self._following(count)
        return [segment for segment in segments if segment not in self._ahead]

    def record(self, epoch: int, n: int) -> ShardRecord | None:
        """Return one record, or None while the segment is not committed."""
        try:
            data = self._store.get(self._keys.ledger_record(self._plan.loader, epoch, 0, n))
        except ObjectMissing:
            return None
        return ShardRecord.model_validate_json(data)

    def _following(self, count: int) -> list[tuple[int, int]]:
        return ledger.following(self._plan, self._frontier, count, epochs=self._epochs)

    def _look(self, segments: list[tuple[int, int]]) -> None:
        asked = [segment for segment in segments if segment not in self._ahead]
        if len(asked) <= 1:
            found = [self.record(*segment) for segment in asked]
        else:
            with ThreadPoolExecutor(min(8, len(asked)), thread_name_prefix="ledger") as pool:
                found = list(pool.map(lambda segment: self.record(*segment), asked))
        self._ahead.update({(record.epoch, record.n): record for record in found if record is not None})

    def _advance(self) -> list[ShardRecord]:
        gained = []
        while not self._frontier.complete and (record := self._ahead.pop(self._frontier.segment, None)) is not None:
            self._frontier = ledger.after(self._frontier, record)
            gained.append(record)
        return gained
