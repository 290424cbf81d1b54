"""Preparing a loader that can only be read in sequence: one machine iterates the user's own loader, epoch after epoch.

That is one without loader workers that is iterable, or asked for with randomness "exact", and one with an ``__iter__``
of its own. The process is seeded as a script seeds it, and nothing here draws a random number, so that the elements are
those that the loader yields in one process. A retry reads again from the start and passes over what is committed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader

from taas.errors import LoaderError, TaasError
from taas_tasks.layout import RunKeys
from taas_tasks.plan import LANES, padding_of, segment_bounds, segment_of
from taas_tasks.prep.commit import Committed, Producer, Segment
from taas_tasks.prep.elements import owned, set_epoch
from taas_tasks.prep.failures import is_worker_death, raised_while_waiting
from taas_tasks.prep.pipeline import LoadedSegment, Pipeline
from taas_tasks.prep.produce import Abort, Tally
from taas_tasks.prep.progress import committed_segments
from taas_tasks.prep.seeding import seed_start
from taas_tasks.store.base import ObjectStore
from taas_tasks.values import LoaderPlan

_log = logging.getLogger(__name__)


def produce_in_sequence(
    loader: DataLoader[Any],
    plan: LoaderPlan,
    *,
    producer: Producer,
    store: ObjectStore,
    seed: int,
    allow_pickle: bool,
    is_exact: bool,
) -> Tally:
    """Prepare all units of a loader by iterating it; an epoch is as long as an iteration yields.

    An infinite loader is cut at the units. ``is_exact``: a result that differs from a committed one is an error.

    Raises:
        LoaderError: The user's code raised, a loader worker died, or an epoch yields nothing.
        ElementError: An element fits no column.
        RunCancelled: The run's abort object is there.
    """
    return _Reading(loader, plan, producer, store, seed, allow_pickle, is_exact).prepare()


class _Reading:
    """One pass over all epochs of a loader."""

    def __init__(
        self,
        loader: DataLoader[Any],
        plan: LoaderPlan,
        producer: Producer,
        store: ObjectStore,
        seed: int,
        allow_pickle: bool,
        is_exact: bool,
    ) -> None:
        self._loader = loader
        self._plan = plan
        self._producer = producer
        self._store = store
        self._seed = seed
        self._allow_pickle = allow_pickle
        self._is_exact = is_exact
        self._abort = Abort(store, producer.run, clock=time.monotonic)
        self._there = committed_segments(store, RunKeys(producer.run), plan.loader)
        self._awaited = (0, 0)
        # an epoch's start forks loader workers, or may: an __iter__ of the user's can do anything
        self._forks = loader.num_workers > 0 or type(loader).__iter__ is not DataLoader.__iter__
        self._pipeline: Pipeline | None = None
        self._tally = Tally()

    def prepare(self) -> Tally:
        try:
            with closing(self._segments()) as segments:  # an error leaves no loader workers
                # the first epoch's loader workers are forked here, before the pipeline starts its threads
                first = next(segments)
                with self._new_pipeline() as self._pipeline:
                    self._submit(first, self._pipeline)
                    for loaded in segments:
                        self._submit(loaded, self._pipeline)
        except RuntimeError as error:
            if is_worker_death(error):
                raise self._raised(error) from None
            raise
        return self._tally

    def _new_pipeline(self) -> Pipeline:
        return Pipeline(self._store, self._producer, allow_pickle=self._allow_pickle, on_commit=self._on_commit)

    def _raised(self, error: Exception) -> LoaderError:
        epoch, index = self._awaited
        return raised_while_waiting(error, self._producer, epoch=epoch, index=index)

    def _submit(self, loaded: LoadedSegment, pipeline: Pipeline) -> None:
        if loaded.segment.id in self._there:
            self._tally.skipped += 1
        else:
            pipeline.submit(loaded)

    def _on_commit(self, segment: Segment, committed: Committed) -> None:
        self._tally.count(committed)
        if committed.differs:
            note = f"segment {segment.n} of epoch {segment.epoch} was read twice with different values"
            if self._is_exact:
                raise LoaderError(
                    f'loader {self._plan.loader!r}: {note}, so it cannot be prepared with randomness "exact"; find what'
                    " it draws besides python's, numpy's and torch's generators"
                )
            self._tally.notes.append(f"loader {self._plan.loader!r} is not deterministic: {note}")

    def _segments(self) -> Generator[LoadedSegment, None, None]:
        seed_start(self._seed)
        units = epoch = 0
        while units < self._plan.units:
            length = 0
            for loaded in self._segments_of_epoch(epoch, limit=self._plan.units - units):
                length = loaded.segment.stop
                yield loaded
            if length == 0:
                raise LoaderError(
                    f"loader {self._plan.loader!r} yields nothing in epoch {epoch}: {self._plan.units - units} of"
                    f" {self._plan.units} units are missing; a loader must be iterable again and again"
                )
            _log.info("loader %r: epoch %d has %d elements", self._plan.loader, epoch, length)
            units += length
            epoch += 1

    def _segments_of_epoch(self, epoch: int, *, limit: int) -> Iterator[LoadedSegment]:
        """Yield an epoch's segments. One is held back until the next element, or the end, shows whether it is last."""
        first: list[Any] = []
        elements: list[Any] = []
        started_at, began = time.time(), time.perf_counter()
        stop = 0
        for index, element in enumerate(self._elements(epoch, limit)):
            if elements and index == segment_bounds(self._plan.sizes, segment_of(self._plan.sizes, index))[0]:
                yield LoadedSegment(self._segment(epoch, index), elements, started_at, time.perf_counter() - began)
                elements, started_at, began = [], time.time(), time.perf_counter()
            elements.append(element)
            if index < LANES:
                first.append(element)
            stop = index + 1
        if stop:
            segment = self._segment(epoch, stop, is_last=True, of_units=stop == limit)
            elements += [first[place] for place in segment.padding]
            yield LoadedSegment(segment, elements, started_at, time.perf_counter() - began)

    def _segment(self, epoch: int, stop: int, *, is_last: bool = False, of_units: bool = False) -> Segment:
        n = segment_of(self._plan.sizes, stop - 1)
        return Segment(
            epoch=epoch,
            n=n,
            start=segment_bounds(self._plan.sizes, n)[0],
            stop=stop,
            padding=tuple(place % stop for place in range(padding_of(stop))) if is_last else (),
            last_of_epoch=is_last,
            last_of_units=of_units,
        )

    def _elements(self, epoch: int, limit: int) -> Iterator[Any]:
        """Yield at most ``limit`` elements of one iteration; says of an exception which element was awaited."""
        always = self._loader.num_workers == 0
        self._awaited = (epoch, 0)
        try:
            set_epoch(self._loader, epoch)
            for element in self._begun():
                self._abort.check()
                yield owned(element, always=always)
                self._awaited = (epoch, self._awaited[1] + 1)
                if self._awaited[1] == limit:
                    return
        except TaasError:
            raise
        except Exception as error:  # noqa: BLE001 (user code may raise anything)
            raise self._raised(error) from None

    def _begun(self) -> Iterator[Any]:
        """Return an iteration whose first element is loaded: behind it no loader worker is forked any more.

        The pipeline's threads rest meanwhile, so that none holds a lock which a forked process would inherit.
        """
        with self._pipeline.idle() if self._forks and self._pipeline is not None else nullcontext():
            elements = iter(self._loader)
            first = list(islice(elements, 1))
        return chain(first, elements)
