"""Preparing the streams of a machine: it runs the loader workers that they are, and commits what each yields.

A stream's element is bitwise what the local loader's worker yields: the same process, ids, seeds and start (see
``virtual_workers``), epochs in sequence. Only what ``MergedProgress.needed`` says is certain is read and committed;
where that depends on streams of other machines, the ledger is asked. A retry passes over what is committed, or reads
on from the position that was kept with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from torch.utils.data import DataLoader

from taas.errors import LoaderError, ObjectMissing, RunCancelled, TaasError
from taas_tasks.ledger_reader import LedgerReader
from taas_tasks.plan import stream_owner
from taas_tasks.prep.commit import Committed, Producer, Segment
from taas_tasks.prep.elements import Failure
from taas_tasks.prep.failures import died, raised_in_stream, raised_while_waiting, stream_taken, timed_out
from taas_tasks.prep.lost_records import LostRecord, MakeAgain, cannot_go_on, find_lost, put_again
from taas_tasks.prep.pipeline import Pipeline
from taas_tasks.prep.produce import Abort, Tally
from taas_tasks.prep.stream_reading import Stream
from taas_tasks.prep.stream_starts import Starts
from taas_tasks.prep.virtual_workers import Read, StreamEnd, VirtualWorker, WorkerDied, end_all, receive
from taas_tasks.prep.work import Pace
from taas_tasks.store.base import ObjectStore
from taas_tasks.streams import MergedProgress
from taas_tasks.values import LoaderPlan, ShardRecord

_log = logging.getLogger(__name__)
_RECEIVE_S = 1.0
_FIRST_WAIT_S = 0.02


def produce_streams(
    loader: DataLoader[Any],
    starts: Starts,
    plan: LoaderPlan,
    *,
    producer: Producer,
    store: ObjectStore,
    allow_pickle: bool,
    pace: Pace | None = None,
    only_stream: int | None = None,
    make_again: MakeAgain | None = None,
) -> Tally:
    """Prepare this machine's streams of a loader whose workers are its streams; skip what is committed.

    Returns when all units of the loader are committed, by whomever. Loader workers are ended in any case.
    ``only_stream``: of this machine's streams only this one. ``make_again``: is given records that are lost while this
    machine waits for them, of whatever stream.

    Raises:
        PrepareError: A record that is waited for is lost, and cannot be made again.
        LoaderError: The user's code raised, a loader worker died, or an epoch has no element; names the element.
        ElementError: An element fits no column.
        StreamTaken: Another try commits the same streams, with other values or other segments.
        RunCancelled: The run's abort object is there.
    """
    return _Streams(
        loader, starts, plan, producer, store, allow_pickle, pace or Pace(), only_stream, make_again
    ).prepare()


class _Streams:
    """One machine's streams of one loader; one thread drives them all."""

    def __init__(
        self,
        loader: DataLoader[Any],
        starts: Starts,
        plan: LoaderPlan,
        producer: Producer,
        store: ObjectStore,
        allow_pickle: bool,
        pace: Pace,
        only_stream: int | None,
        make_again: MakeAgain | None,
    ) -> None:
        self._loader = loader
        self._starts = starts
        self._plan = plan
        self._producer = producer
        self._store = store
        self._allow_pickle = allow_pickle
        self._pace = pace
        self._abort = Abort(store, producer.run, clock=time.monotonic)
        self._reader = LedgerReader(store, producer.run, plan)
        self._latest: dict[int, ShardRecord] = {}
        self._make_again = make_again
        self._made_again: set[LostRecord] = set()
        self._came_at = self._looked_at = time.monotonic()
        self._polled_at = self._silent_since = time.monotonic()
        self._wait_s = _FIRST_WAIT_S
        self._num_seen = 0
        self._streams = [
            Stream(number, plan=plan)
            for number in range(plan.num_streams)
            if stream_owner(number, machines=plan.machines) == producer.machine and only_stream in (None, number)
        ]
        self._pipeline: Pipeline | None = None
        self._committed = threading.Event()
        self._tally = Tally()

    @property
    def _merged(self) -> MergedProgress:
        merged = self._reader.merged
        if merged is None:
            raise ValueError(f"loader {self._plan.loader!r} is not read by its workers")
        return merged

    def prepare(self) -> Tally:
        self._abort.check()
        self._skip(self._reader.catch_up())
        try:
            self._advance_all(self._streams)  # loader workers are forked before the pipeline starts its threads
            with Pipeline(
                self._store, self._producer, allow_pickle=self._allow_pickle, on_commit=self._on_commit
            ) as self._pipeline:
                while not self._reader.is_complete:
                    self._abort.check()
                    self._go_on()
        except WorkerDied as error:
            raise died(error, self._producer) from None
        finally:
            end_all([stream.worker for stream in self._streams if stream.worker is not None])
        return self._tally

    def _skip(self, last_ones: list[ShardRecord]) -> None:
        """Pass over what is committed, of which these are the last records of each stream's epochs."""
        self._latest = {record.stream: record for record in last_ones}
        for stream in self._streams:
            stream.enter(0, *self._merged.next_segment(0, stream.number))
        own = {stream.number for stream in self._streams}
        self._tally.skipped = sum(record.n + 1 for record in last_ones if record.stream in own)

    # --- the loop

    def _go_on(self) -> None:
        """Take in what the loader workers have ready; without any at work wait for what the ledger says."""
        working = {stream.worker: stream for stream in self._streams if stream.worker and stream.worker.num_asked}
        if not working:
            self._wait()
            return
        self._came_at = self._looked_at = time.monotonic()
        epochs = [stream.epoch for stream in self._streams]
        touched = self._receive(working)
        if time.monotonic() - self._polled_at >= self._pace.refresh_s:
            self._poll()  # in small portions: the ledger of a long run is long
            touched = self._streams
        self._advance_all(touched)
        if epochs != [stream.epoch for stream in self._streams]:
            self._advance_all(self._streams)  # those that were too far ahead of the others

    def _wait(self) -> None:
        self._the_pipeline.check()
        self._committed.wait(self._wait_s)
        self._committed.clear()
        gained = self._poll()
        self._wait_s = _FIRST_WAIT_S if gained else min(self._pace.poll_s, 2 * self._wait_s)
        self._advance_all(self._streams)
        self._silent_since = now = time.monotonic()
        if gained:
            self._came_at = self._looked_at = now
        elif now - self._looked_at >= self._pace.lost_s and not self._reader.is_complete:
            self._look_for_lost(now - self._came_at)
            self._looked_at = time.monotonic()

    def _look_for_lost(self, waited_s: float) -> None:
        """See to records that are gone: machines that wait for one another because of them would do so for ever."""
        for stream in self._streams:  # what comes before its last one shows by that to be lost
            if stream.number in self._latest:
                put_again(self._latest[stream.number], store=self._store, run=self._producer.run)
        for lost in find_lost(self._reader.awaited, store=self._store, run=self._producer.run, plan=self._plan):
            self._have_made_again(lost, waited_s)

    def _have_made_again(self, lost: LostRecord, waited_s: float) -> None:
        problem = "it was prepared again, and lost again" if lost in self._made_again else "nobody prepares it again"
        if self._make_again is not None and lost not in self._made_again:
            try:
                self._made_again.add(lost)
                return self._make_again(lost)
            except RunCancelled:
                raise
            except TaasError as error:
                problem = error.message
        raise cannot_go_on(lost, machine=self._producer.machine, waited_s=waited_s, problem=problem)

    def _poll(self) -> list[ShardRecord]:
        gained = self._reader.poll()
        self._polled_at = time.monotonic()
        if self._plan.inspection.order == "sequential":
            self._refuse_empty_epochs()
        return gained

    def _refuse_empty_epochs(self) -> None:
        while (total := self._merged.merge(self._num_seen).total) is not None:
            if total == 0:
                missing = self._plan.units - (self._merged.units_before(self._num_seen) or 0)
                raise LoaderError(
                    f"loader {self._plan.loader!r} yields nothing in epoch {self._num_seen}: {missing} of"
                    f" {self._plan.units} units are missing; a loader must be iterable again and again"
                )
            self._num_seen += 1

    def _receive(self, working: dict[VirtualWorker, Stream]) -> list[Stream]:
        timeout_s = self._loader.timeout
        received = receive(working, timeout_s=min(_RECEIVE_S, timeout_s) if timeout_s else _RECEIVE_S)
        if received:
            self._silent_since = time.monotonic()
        elif timeout_s and time.monotonic() - self._silent_since >= timeout_s:
            raise timed_out(timeout_s, [worker.next_read for worker in working], self._producer)
        for worker, read, found in received:
            self._take(working[worker], read, found)
        return [working[worker] for worker, _, _ in received]

    def _take(self, stream: Stream, read: Read, found: Any) -> None:
        if isinstance(found, Failure):
            raise raised_in_stream(found, self._producer, stream=stream.number)
        self._refuse_other_length(stream, read, has_ended=isinstance(found, StreamEnd))
        for loaded in stream.take(read, found):
            self._the_pipeline.submit(loaded)
        self._silent_since = time.monotonic()  # the pipeline may have made this process wait
        if stream.is_closed and stream.worker is not None and not self._loader.persistent_workers:
            stream.worker.end()
            stream.worker = None

    def _refuse_other_length(self, stream: Stream, read: Read, *, has_ended: bool) -> None:
        """Refuse a stream that is read again and has another length than what is committed of it."""
        if read.epoch != stream.reading or stream.has_ended:
            return
        least, most = self._committed_of(stream)
        if (least > read.position) if has_ended else (most is not None and read.position >= most):
            raise LoaderError(
                f"loader {self._plan.loader!r} is not deterministic: stream {stream.number} of epoch {read.epoch} has"
                f" {'only ' if has_ended else 'more than '}{read.position} elements when it is read again, {least} are"
                " committed. Seed what its length depends on"
            )

    def _committed_of(self, stream: Stream) -> tuple[int, int | None]:
        """Return how many elements of the epoch that is read are committed, and how many it has in all if known."""
        if not stream.is_passing_over:
            return stream.start, None
        length = self._merged.merge(stream.reading).lengths[stream.number]
        return length, length

    # --- one stream

    def _advance_all(self, streams: Iterable[Stream]) -> None:
        for stream in streams:
            self._advance(stream)

    def _advance(self, stream: Stream) -> None:
        """Let a stream's loader worker read what is certain to be needed; commit what may be the last of it."""
        while self._has_ended(stream):
            if stream.epoch > min(other.epoch for other in self._streams):
                return  # the recipe of an order keeps two epochs
            stream.enter(stream.epoch + 1, *self._merged.next_segment(stream.epoch + 1, stream.number))
        needed = self._merged.needed(stream.epoch, stream.number)
        if stream.worker is None:
            if needed <= stream.start:
                return
            stream.worker = self._started(stream)
        while stream.is_passing_over and stream.has_ended:
            stream.read(stream.reading + 1)
        room = (self._loader.prefetch_factor or 2) - stream.worker.num_asked
        for read in stream.reads(self._limit(stream, needed), room=room, row=self._starts.row):
            stream.worker.ask(read)
        for loaded in stream.settle(needed):
            self._the_pipeline.submit(loaded)

    def _has_ended(self, stream: Stream) -> bool:
        if stream.worker is None or stream.length(stream.epoch) == 0:
            return stream.is_closed or self._merged.has_ended(stream.epoch, stream.number)
        return stream.is_closed

    def _limit(self, stream: Stream, needed: int) -> int:
        if not stream.is_passing_over:
            return needed
        # a persistent loader worker has met the end of each earlier epoch
        return self._merged.merge(stream.reading).lengths[stream.number] + (stream.length(stream.reading) is None)

    def _started(self, stream: Stream) -> VirtualWorker:
        first = 0 if self._loader.persistent_workers else stream.epoch
        position = self._kept_position(stream)
        stream.read(first, 0 if position is None else stream.start)
        try:
            base_seed = self._starts.begin(first)
            with nullcontext() if self._pipeline is None else self._pipeline.idle():
                return VirtualWorker(
                    self._loader, stream=stream.number, base_seed=base_seed, position=position, packs=True
                )
        except TaasError:
            raise
        except Exception as error:  # noqa: BLE001 (set_epoch is the user's, and so is what a start method pickles)
            raise raised_while_waiting(error, self._producer, epoch=first, index=0) from None

    def _kept_position(self, stream: Stream) -> bytes | None:
        record = self._latest.get(stream.number)
        if self._loader.persistent_workers or record is None or record.position_key is None:
            return None
        if (record.epoch, record.stop) != (stream.epoch, stream.start):
            return None
        try:
            return self._store.get(record.position_key)
        except ObjectMissing:
            _log.warning("%s is gone; stream %d is read from its start", record.position_key, record.stream)
            return None

    @property
    def _the_pipeline(self) -> Pipeline:
        if self._pipeline is None:
            raise RuntimeError("segments are ready before the pipeline is")
        return self._pipeline

    def _on_commit(self, segment: Segment, committed: Committed) -> None:
        there = committed.record
        self._latest[segment.stream] = there
        self._tally.count(committed)
        self._committed.set()
        mine = (segment.start, segment.stop, segment.last_of_epoch)
        if committed.differs or (there.start, there.stop, there.last_of_epoch) != mine:
            raise stream_taken(segment, there, self._producer)
