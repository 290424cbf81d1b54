"""Finding out about the streams of an iterable: do the loader workers share it, does its ``state_dict`` continue it.

Loader workers are run for a few elements, with the ids that they have in the loader.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader
from torch.utils.data._utils.worker import WorkerInfo

from taas.errors import TaasError
from taas_tasks.prep.commit import Producer
from taas_tasks.prep.elements import Failure, owned
from taas_tasks.prep.failures import died, raised_in_stream
from taas_tasks.prep.seeding import seed_start
from taas_tasks.prep.stream_starts import IterableStarts
from taas_tasks.prep.virtual_workers import (
    Positioned,
    Read,
    StreamDataset,
    StreamEnd,
    VirtualWorker,
    WorkerDied,
    end_all,
    receive,
)
from taas_tasks.shards.writer import encode_segment

_ELEMENTS = 6
_PROBE_S = 10.0
_TELLING = frozenset({"id", "num_workers", "seed", "dataset"})


@dataclass(frozen=True)
class Probed:
    """What was found: see ``Inspection``. ``warnings`` are sentences for people."""

    is_shared: bool
    has_position: bool
    warnings: list[str]


def probe_streams(open_it: Callable[[], DataLoader[Any]], *, producer: Producer, seed: int) -> Probed:
    """Return what is known of the streams of an iterable with loader workers; ``open_it`` gives a fresh loader.

    Seeds this process's generators.

    Raises:
        LoaderError: The user's code raised, or a loader worker died.
    """
    loader = open_it()
    is_shared = loader.num_workers == 1 or _is_shared(loader, producer, seed=seed)
    warnings = [] if is_shared else [_unshared(loader.num_workers)]
    fault: str | None = "persistent loader workers are read from their start"
    if not loader.persistent_workers:
        fault = _fault_of_position(open_it(), producer, seed=seed)
    if fault not in (None, _NO_STATE) and not loader.persistent_workers:
        warnings.append(f"its state_dict does not continue its stream ({fault}); a retry reads an epoch from its start")
    return Probed(is_shared, has_position=fault is None, warnings=warnings)


def _unshared(num_workers: int) -> str:
    return (
        f"its dataset gives each of its {num_workers} loader workers all elements, so each element comes {num_workers}"
        " times, as it does without TaaS; let its __iter__ yield every worker's own part, by"
        " torch.utils.data.get_worker_info() (its id and num_workers), or use num_workers=0"
    )


# --- is it shared ---------------------------------------------------------------------------------------------------


_noted: set[str] = set()  # in a loader worker: what the user's code asked of its WorkerInfo


class _NotedInfo(WorkerInfo):
    """A ``WorkerInfo`` that notes what is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        if name in _TELLING:
            _noted.add(name)
        return super().__getattribute__(name)


@dataclass(frozen=True)
class _Told:
    """An element, and what the user's code has asked of its WorkerInfo so far."""

    found: Any
    noted: list[str]


class _TellsNoted(StreamDataset):
    def __getitem__(self, read: Read) -> Any:
        found = super().__getitem__(read)
        return found if isinstance(found, Failure) else _Told(found, sorted(_noted))


class _SameSeeds:
    """A ``worker_init_fn`` behind which every loader worker draws the same random numbers, and WorkerInfo notes."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self._users = users

    def __call__(self, worker_id: int) -> None:
        """Runs in a loader worker, before it reads."""
        _noted.clear()
        info = torch_worker._worker_info
        if info is not None:
            values = {field.name: getattr(info, field.name) for field in dataclasses.fields(WorkerInfo)}
            values["dataset"] = values["dataset"].dataset  # the user's own
            torch_worker._worker_info = _NotedInfo(**values)
        if self._users is not None:
            self._users(worker_id)
        seed_start(0)


def _is_shared(loader: DataLoader[Any], producer: Producer, *, seed: int) -> bool:
    """Return False if loader workers 0 and K-1, drawing the same random numbers, ask nothing and yield the same.

    Without a ``worker_init_fn`` one that asks nothing cannot know which part is its own, whatever it yields.
    """
    starts = IterableStarts(loader, seed=seed)
    base_seed, row = starts.begin(0), starts.row(0, 0)
    workers = [
        VirtualWorker(
            loader,
            stream=stream,
            base_seed=base_seed,
            dataset=_TellsNoted(loader),
            start=_SameSeeds(loader.worker_init_fn),
        )
        for stream in (0, loader.num_workers - 1)
    ]
    try:
        told = _read(workers, producer, row=row)
    finally:
        end_all(workers)
    if any(one.noted for found in told for one in found) or not all(told):
        return True
    if loader.worker_init_fn is None:
        return False
    count = min(map(len, told))
    first, last = ([one.found for one in found[:count]] for found in told)
    return _digest(first) != _digest(last)


def _read(
    workers: list[VirtualWorker], producer: Producer, *, row: Any, start: int = 0, tells_position: bool = False
) -> list[list[Any]]:
    """Return the first few elements that each of some loader workers gives in a while; a stream's end is the last."""
    until = time.monotonic() + _PROBE_S
    found: dict[VirtualWorker, list[Any]] = {worker: [] for worker in workers}
    for worker in workers:
        for position in range(start, start + _ELEMENTS):
            worker.ask(Read(0, position, row, tells_position))
    while any(worker.num_asked for worker in workers) and (left := until - time.monotonic()) > 0:
        try:
            received = receive(workers, timeout_s=left)
        except WorkerDied as error:
            raise died(error, producer) from None
        for worker, _, element in received:
            if isinstance(element, Failure):
                raise raised_in_stream(element, producer, stream=worker.stream)
            found[worker].append(element)
    return list(found.values())


def _digest(found: list[Any]) -> str:
    plain = [one.element if isinstance(one, Positioned) else one for one in found]
    elements = ["its end" if isinstance(one, StreamEnd) else owned(one, always=False) for one in plain]
    return encode_segment(enumerate(elements), allow_pickle=True).content_digest


# --- does it continue -----------------------------------------------------------------------------------------------


_NO_STATE = "it has none"


def _fault_of_position(loader: DataLoader[Any], producer: Producer, *, seed: int) -> str | None:
    """Return why a stream cannot be continued in another loader worker; None if it can.

    A few elements are read, then some more in the same loader worker, and again in a fresh one from the position.
    """
    starts = IterableStarts(loader, seed=seed)
    base_seed, row = starts.begin(0), starts.row(0, 0)
    workers = [VirtualWorker(loader, stream=0, base_seed=base_seed)]
    try:
        (begun,) = _read(workers, producer, row=row, tells_position=True)
        positions = [one.position for one in begun if isinstance(one, Positioned)]
        if not positions or positions[-1] is None:
            return _NO_STATE
        count = len(positions)
        (behind,) = _read(workers, producer, row=row, start=count)
        workers.append(VirtualWorker(loader, stream=0, base_seed=base_seed, position=positions[-1]))
        (again,) = _read(workers[1:], producer, row=row, start=count)
    except TaasError as error:
        return error.message
    finally:
        end_all(workers)
    count = min(len(behind), len(again))
    if not count or _digest(behind[:count]) != _digest(again[:count]):
        return f"what it yields behind element {len(positions) - 1} differs from what it yields from that state"
    return None
