"""The loader workers of a DataLoader, run one by one on whatever machine owns them, bitwise as torch runs them.

A process runs torch's own ``_worker_loop`` with the worker id, number of workers, seeds, ``worker_init_fn`` and
start method that it has in the user's loader. What differs is who hands out the tasks: torch deals elements out in
turns, here each stream is read by itself, as fast as it is taken. The dataset is wrapped (``StreamDataset``), so that
an exception names its element, a stream's end is a value, and a position can be told with an element; the user's code
sees its own dataset.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing.connection
import multiprocessing.queues
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.multiprocessing
import torch.utils.data._utils.worker as torch_worker
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.dataloader import _DatasetKind

from taas_tasks.prep.elements import Failure, as_is, describe, packed, users_traceback
from taas_tasks.prep.stream_positions import Position, position_behind

_JOIN_S = 2.0
_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class Read:
    """An element that a loader worker is asked for.

    ``row`` is what the loader's sampler or batch_sampler yields for it. ``tells_position``: how to read on behind it is
    wanted too.
    """

    epoch: int
    position: int
    row: Any
    tells_position: bool = False


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """What comes in the place of an element when the stream has none any more in this epoch."""


@dataclass(frozen=True, slots=True)
class Positioned:
    """An element, and how to read on behind it (None: its dataset cannot tell)."""

    element: Any
    position: bytes | None


class WorkerDied(Exception):
    """A loader worker ended by itself. ``exit_code`` is negative for a signal."""

    def __init__(self, stream: int, read: Read, exit_code: int | None) -> None:
        super().__init__(f"loader worker {stream} ended with exit code {exit_code}")
        self.stream = stream
        self.read = read
        self.exit_code = exit_code


# --- in the loader worker -------------------------------------------------------------------------------------------


class StreamDataset(Dataset[Any]):
    """A loader's dataset as its worker reads it: ``Read`` -> element, ``Positioned``, ``StreamEnd`` or ``Failure``.

    Makes torch's own fetcher anew when an epoch begins, as torch does in new and in persistent loader workers.
    """

    def __init__(self, loader: DataLoader[Any], *, position: bytes | None = None) -> None:
        self.dataset = loader.dataset
        self._kind = _DatasetKind.Iterable if isinstance(loader.dataset, IterableDataset) else _DatasetKind.Map
        self._is_batched = loader.batch_sampler is not None
        self._collate: Callable[[Any], Any] = loader.collate_fn
        self._drop_last = loader.drop_last
        self._position = position
        self._epoch: int | None = None
        self._has_ended = False
        self._fetcher: Any = None

    def __getitem__(self, read: Read) -> Any:
        try:
            if read.epoch != self._epoch:
                self._begin(read.epoch)
            return self._next(read)
        except Exception as error:  # noqa: BLE001 (user code may raise anything; the caller names the element)
            return failure_at(read, describe(error), users_traceback(error))

    def _begin(self, epoch: int) -> None:
        kept = None if self._position is None else Position(self._position)
        if kept is not None:
            kept.load_dataset(self.dataset)
        arguments = (self.dataset, self._is_batched, self._collate, self._drop_last)
        self._fetcher = _DatasetKind.create_fetcher(self._kind, *arguments)  # type: ignore[no-untyped-call]
        if kept is not None:
            kept.load_fetcher(self._fetcher)
        self._epoch, self._has_ended, self._position = epoch, False, None

    def _next(self, read: Read) -> Any:
        if self._has_ended:
            return StreamEnd()
        try:
            element = self._fetcher.fetch(read.row)
        except StopIteration:
            if self._kind == _DatasetKind.Map:
                raise
            self._has_ended = True
            return StreamEnd()
        return Positioned(element, position_behind(self._fetcher)) if read.tells_position else element


def _packed_result(found: Any) -> Any:
    if isinstance(found, Positioned):
        return Positioned(packed(found.element), found.position)
    return packed(found)


def failure_at(read: Read, error: str, traceback: str) -> Failure:
    """Return what says that the user's code raised at an element of a stream."""
    return Failure(read.epoch, read.position, repr(read.row)[:_SHOWN_CHARS], error, traceback)


class ShowsUsersDataset:
    """A ``worker_init_fn`` that shows the user's dataset in ``get_worker_info()``, then calls the user's own."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self._users = users

    def __call__(self, worker_id: int) -> None:
        """Runs in a loader worker, before it reads."""
        info = torch_worker._worker_info
        if info is not None and isinstance(info.dataset, StreamDataset):
            torch_worker._worker_info = dataclasses.replace(info, dataset=info.dataset.dataset)
        if self._users is not None:
            self._users(worker_id)


class _Results(multiprocessing.queues.Queue):  # type: ignore[type-arg]  # no generic class at run time
    """A loader worker's results. One that cannot be sent is told: torch's own queue loses it, and the reader waits."""

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        if isinstance(error, BrokenPipeError) or not isinstance(item, tuple):
            return  # nobody reads any more
        number = item[0]
        told = f"{describe(error)} (an element could not be sent from the loader worker to its main process)"
        self.put((number, Failure(0, 0, "", told, users_traceback(error))))


# --- in the main process --------------------------------------------------------------------------------------------


class VirtualWorker:
    """One loader worker, as a process of this machine. End it in any case.

    Args:
        loader: the user's; the process is forked from it as it is now, or gets it pickled, as its start method says.
        stream: the worker's id in the user's loader.
        base_seed: what the loader's iterator draws for the epoch in which its workers are started.
        position: where to read on, instead of the epoch's start; told by a loader worker of this stream.
        dataset: reads the elements, where it is not to be a plain ``StreamDataset``.
        start: a ``worker_init_fn`` to be called instead of the one that shows the user's dataset.
        packs: it sends small tensors ``elements.packed``; ``elements.owned`` gives them back.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        stream: int,
        base_seed: int,
        position: bytes | None = None,
        dataset: StreamDataset | None = None,
        start: Callable[[int], None] | None = None,
        packs: bool = False,
    ) -> None:
        self.stream = stream
        self._asked: deque[tuple[int, Read]] = deque()
        self._numbers = itertools.count()
        self._has_ended = False
        self._found: dict[int, Any] = {}  # came before what was asked for earlier (which could not be sent)
        context: Any = loader.multiprocessing_context or torch.multiprocessing.get_context()
        self._tasks = context.Queue()
        self._tasks.cancel_join_thread()
        self._results = _Results(ctx=context)
        self._done = context.Event()
        arguments = (
            *(_DatasetKind.Map, dataset or StreamDataset(loader, position=position)),
            *(self._tasks, self._results, self._done),
            *(False, _packed_result if packs else as_is, False),
            *(base_seed, start or ShowsUsersDataset(loader.worker_init_fn), stream, loader.num_workers),
            *(loader.persistent_workers, None),
        )
        self._process = context.Process(target=torch_worker._worker_loop, args=arguments, daemon=True)
        self._process.start()
        self._results._writer.close()  # type: ignore[attr-defined]  # so that a dead worker is an end of the pipe

    @property
    def pid(self) -> int:
        """The process."""
        return int(self._process.pid)

    @property
    def num_asked(self) -> int:
        """Elements asked for that have not come yet."""
        return len(self._asked)

    @property
    def next_read(self) -> tuple[int, Read]:
        """The stream, and what it is awaited to give next."""
        return self.stream, self._asked[0][1]

    @property
    def sources(self) -> list[Any]:
        """What becomes readable when a result is there, or the process has ended."""
        return [self._results._reader, self._process.sentinel]  # type: ignore[attr-defined]

    def ask(self, read: Read) -> None:
        """Ask for an element; they come in the order in which they are asked for."""
        number = next(self._numbers)
        self._asked.append((number, read))
        self._tasks.put((number, read))

    def take(self) -> tuple[Read, Any]:
        """Return the element asked for first (or what stands in its place); waits for it.

        Raises:
            WorkerDied: The process has ended.
        """
        expected, read = self._asked[0]
        try:
            while expected not in self._found:
                number, found = self._receive()
                self._found[number] = found
        except (EOFError, OSError):
            self._process.join(_JOIN_S)
            raise WorkerDied(self.stream, read, self._process.exitcode) from None
        self._asked.popleft()
        return read, _told(self._found.pop(expected), read)

    def _receive(self) -> tuple[int, Any]:
        reader, process = self._results._reader, self._process  # type: ignore[attr-defined]
        if not process.is_alive() and not reader.poll():
            raise EOFError
        received: tuple[int, Any] = self._results.get()
        return received

    def tell_to_end(self) -> None:
        """Let the process end after the element that it reads now; ``end`` waits for it."""
        if self._has_ended:
            return
        self._done.set()
        self._tasks.put(None)

    def end(self) -> None:
        """End the process, by force if it does not within seconds; free what it was connected by."""
        if self._has_ended:
            return
        self.tell_to_end()
        self._has_ended = True
        self._process.join(_JOIN_S)
        for force in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                force()
                self._process.join(_JOIN_S)
        if not self._process.is_alive():
            self._process.close()
        self._tasks.close()
        self._results._reader.close()  # type: ignore[attr-defined]


def _told(found: Any, read: Read) -> Any:
    """Return a result in which failures name the element that was asked for."""
    if isinstance(found, ExceptionWrapper):  # of the user's worker_init_fn
        text = found.exc_msg.strip()
        return failure_at(read, text.rsplit("\n", 1)[-1], text)
    return failure_at(read, found.error, found.traceback) if isinstance(found, Failure) else found


def receive(workers: Iterable[VirtualWorker], *, timeout_s: float) -> list[tuple[VirtualWorker, Read, Any]]:
    """Return an element of every loader worker that has one ready; waits for the first, ``timeout_s`` at most.

    Raises:
        WorkerDied: A loader worker that was asked for elements has ended.
    """
    owners = {source: worker for worker in workers if worker.num_asked for source in worker.sources}
    ready = multiprocessing.connection.wait(list(owners), timeout_s)
    return [(worker, *worker.take()) for worker in dict.fromkeys(owners[source] for source in ready)]


def end_all(workers: Sequence[VirtualWorker]) -> None:
    """End loader workers, all at once."""
    for worker in workers:
        worker.tell_to_end()
    for worker in workers:
        worker.end()
