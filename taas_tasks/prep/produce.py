"""Preparing one machine's share of a loader: its own workers load the elements, which are committed as shards."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.utils.data import DataLoader

from taas.errors import LoaderError, RunCancelled, TaasError
from taas_tasks.layout import RunKeys
from taas_tasks.prep.commit import Committed, Producer, Segment
from taas_tasks.prep.elements import Failure, Task, loader_of_tasks, owned
from taas_tasks.prep.failures import is_worker_death, raised_at, raised_while_waiting
from taas_tasks.prep.order import Order
from taas_tasks.prep.pipeline import LoadedSegment, Pipeline
from taas_tasks.prep.progress import Progress
from taas_tasks.prep.work import Pace, Work
from taas_tasks.store.base import ObjectStore
from taas_tasks.values import LoaderPlan

_END = object()


@dataclass
class Tally:
    """What one try of a machine did. ``notes`` are sentences for people (results that differ)."""

    committed: int = 0
    skipped: int = 0
    redone: int = 0
    notes: list[str] = field(default_factory=list)

    def count(self, committed: Committed) -> None:
        """Take in what became of a segment."""
        if committed.won:
            self.committed += 1
        else:
            self.redone += 1

    def to_dict(self) -> dict[str, Any]:
        """Return the program's result."""
        return {"committed": self.committed, "skipped": self.skipped, "redone": self.redone, "notes": self.notes}


class Abort:
    """Whether the run was aborted; asks the store once in a while."""

    def __init__(self, store: ObjectStore, run: str, *, clock: Callable[[], float], every_s: float = 2.0) -> None:
        self._store = store
        self._key = RunKeys(run).abort
        self._clock = clock
        self._every_s = every_s
        self._asked_at = float("-inf")

    def check(self) -> None:
        """Raise RunCancelled when the run's abort object is there."""
        if self._clock() - self._asked_at < self._every_s:
            return
        self._asked_at = self._clock()
        if self._store.head(self._key) is not None:
            raise RunCancelled("the run was aborted, so preparing ends here; what is committed stays")


class Time(Protocol):
    """The clock and the waiting, so that tests need none."""

    def monotonic(self) -> float:
        """Return seconds that never go back."""

    def sleep(self, seconds: float, /) -> None:
        """Wait."""


def produce(
    loader: DataLoader[Any],
    order: Order,
    plan: LoaderPlan,
    *,
    producer: Producer,
    store: ObjectStore,
    seed: int,
    allow_pickle: bool,
    pace: Pace | None = None,
    clock: Time = time,
) -> Tally:
    """Prepare this machine's segments of a random-access loader, skip what is committed, then help who lags.

    Returns when every segment of the loader is committed, by whomever.

    Raises:
        LoaderError: The user's code raised, or a loader worker died; names the element.
        ElementError: An element fits no column.
        RunCancelled: The run's abort object is there.
    """
    return _Share(loader, order, plan, producer, store, seed, allow_pickle, pace or Pace(), clock).prepare()


class _Share:
    """One machine's preparation of one loader."""

    def __init__(
        self,
        loader: DataLoader[Any],
        order: Order,
        plan: LoaderPlan,
        producer: Producer,
        store: ObjectStore,
        seed: int,
        allow_pickle: bool,
        pace: Pace,
        clock: Time,
    ) -> None:
        self._loader = loader
        self._order = order
        self._plan = plan
        self._producer = producer
        self._store = store
        self._seed = seed
        self._allow_pickle = allow_pickle
        self._pace = pace
        self._clock = clock
        self._abort = Abort(store, producer.run, clock=clock.monotonic)
        self._progress = Progress(store, RunKeys(producer.run), plan)
        self._work = Work(plan, self._progress, machine=producer.machine, clock=clock.monotonic, pace=pace)
        self._awaited: deque[Task] = deque()
        self._tally = Tally()

    def prepare(self) -> Tally:
        self._progress.refresh()
        self._abort.check()
        self._run(self._work.own())
        while not self._progress.is_complete:
            self._abort.check()
            self._run(iter(self._work.to_redo, None))
            if not self._progress.is_complete:
                self._clock.sleep(self._pace.poll_s)
        self._tally.skipped = self._work.num_skipped
        return self._tally

    def _run(self, segments: Iterator[Segment]) -> None:
        """Load and commit segments with one set of loader workers, which never wait between two segments."""
        begun: deque[Segment] = deque()
        first = next(segments, None)
        if first is None:
            return
        try:
            # closed, so that an error leaves no loader workers: when the garbage collector finds torch's iterator,
            # their queues have ended already, and it waits 5 s for each in vain
            with closing(self._elements(self._tasks(first, segments, begun))) as elements:
                # its first element forks the loader workers, which is before the pipeline starts its threads
                ahead = next(elements)
                with self._pipeline() as pipeline:
                    for loaded in _gathered(ahead, elements, begun):
                        self._work.note_seconds(loaded.load_s)
                        pipeline.submit(loaded)
        except RuntimeError as error:
            if is_worker_death(error):
                raise self._raised(error) from None
            raise

    def _pipeline(self) -> Pipeline:
        return Pipeline(self._store, self._producer, allow_pickle=self._allow_pickle, on_commit=self._on_commit)

    def _on_commit(self, segment: Segment, committed: Committed) -> None:
        self._progress.note(segment.id)
        self._tally.count(committed)
        if committed.differs:
            self._tally.notes.append(
                f"loader {self._plan.loader!r} is not deterministic: segment {segment.n} of epoch {segment.epoch}"
                f" differs between machines {committed.record.machine} and {self._producer.machine}"
            )

    def _tasks(self, first: Segment, rest: Iterator[Segment], begun: deque[Segment]) -> Iterator[Task]:
        """Yield the tasks of segment after segment; runs ahead of the loading by what the workers prefetch."""
        segment: Segment | None = first
        while segment is not None:
            begun.append(segment)
            for task in self._tasks_of(segment):
                self._abort.check()
                yield task
            segment = next(rest, None)

    def _tasks_of(self, segment: Segment) -> Iterator[Task]:
        epoch = segment.epoch
        rows = self._order.rows(epoch, segment.start, segment.stop)
        if len(rows) != segment.stop - segment.start:
            raise LoaderError(
                f"loader {self._plan.loader!r}: its sampler gives {segment.start + len(rows)} elements in epoch"
                f" {epoch}, {segment.stop} were found when it was inspected; its dataset must have the same length"
                " everywhere"
            )
        yield from (Task(epoch, segment.start + place, row) for place, row in enumerate(rows))
        for index in segment.padding:
            yield Task(epoch, index, self._order.rows(epoch, index, index + 1)[0])

    def _elements(self, tasks: Iterator[Task]) -> Generator[Any, None, None]:
        """Yield the elements of tasks; says of an exception which element it was."""
        self._awaited.clear()

        def noted() -> Iterator[Task]:
            for task in tasks:
                self._awaited.append(task)
                yield task

        always = self._loader.num_workers == 0
        try:
            for element in loader_of_tasks(self._loader, _Once(noted()), seed=self._seed, packs=True):
                if isinstance(element, Failure):
                    raise raised_at(element, self._producer)
                self._awaited.popleft()
                yield owned(element, always=always)
        except TaasError:
            raise
        except Exception as error:  # noqa: BLE001 (user code may raise anything)
            raise self._raised(error) from None

    def _raised(self, error: Exception) -> LoaderError:
        awaited = self._awaited[0] if self._awaited else Task(0, 0, None)
        return raised_while_waiting(error, self._producer, epoch=awaited.epoch, index=awaited.index)


class _Once:
    """An iterator as a sampler that torch may start several times: its first pass goes on, whoever asks."""

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._tasks = tasks

    def __iter__(self) -> Iterator[Task]:
        return self._tasks


def _gathered(first: Any, rest: Iterator[Any], begun: deque[Segment]) -> Iterator[LoadedSegment]:
    """Yield each segment as soon as its last element is there; ``begun`` names them, ahead of their elements."""
    elements: list[Any] = [first]
    started_at, began = time.time(), time.perf_counter()
    while True:
        segment = begun.popleft()
        while len(elements) < segment.num_elements:
            elements.append(next(rest))
        yield LoadedSegment(segment, elements, started_at, time.perf_counter() - began)
        started_at, began = time.time(), time.perf_counter()
        following = next(rest, _END)
        if following is _END:
            return
        elements = [following]
