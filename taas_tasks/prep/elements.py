"""One element of a map-style loader, wherever it is loaded: fetched and collated as torch does, seeded by its id."""

from __future__ import annotations

import copy
import dataclasses
import traceback
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader, Dataset

from taas.errors import LoaderError
from taas_tasks.prep.seeding import kept_states, seed_element

_TRACEBACK_CHARS = 4000
_OUR_FOLDER = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Task:
    """An element to load: its id and the indices (a batch), or the one index or key, that its sampler yields."""

    epoch: int
    index: int
    row: Any


@dataclass(frozen=True)
class Failure:
    """What a loader worker sends in the place of an element when the user's code raised."""

    epoch: int
    index: int
    row: str
    error: str
    traceback: str


class ElementDataset(Dataset[Any]):
    """The elements of a map-style loader by ``Task``: ``__getitems__``, collation and ``batch_size=None`` as in torch.

    Loads into whatever process runs it. An exception of the user's becomes a ``Failure``: torch's own forwarding loses
    which element it was, and constructors that take other arguments than a message.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int, keeps_states: bool = False, packs: bool = False) -> None:
        self.dataset = loader.dataset
        self._packs = packs
        self._keeps_states = keeps_states
        self._collate: Callable[[Any], Any] = loader.collate_fn
        self._is_batched = loader.batch_sampler is not None
        self._seed = seed
        self._epoch: int | None = None

    def __getitem__(self, task: Task) -> Any:
        try:
            with kept_states() if self._keeps_states else nullcontext():
                element = self._load(task)
        except Exception as error:  # noqa: BLE001 (user code may raise anything; the caller names the element)
            return Failure(task.epoch, task.index, _short(repr(task.row)), describe(error), users_traceback(error))
        return packed(element) if self._packs else element

    def _load(self, task: Task) -> Any:
        if task.epoch != self._epoch:
            set_epoch_of(self.dataset, task.epoch)
            self._epoch = task.epoch
        seed_element(self._seed, task.epoch, task.index)
        return fetch(self.dataset, task.row, is_batched=self._is_batched, collate=self._collate)


def fetch(dataset: Any, row: Any, *, is_batched: bool, collate: Callable[[Any], Any]) -> Any:
    """Return an element as torch's fetcher of map-style datasets makes it (``torch/utils/data/_utils/fetch.py``)."""
    if not is_batched:
        return collate(dataset[row])
    if getattr(dataset, "__getitems__", None):
        return collate(dataset.__getitems__(row))
    return collate([dataset[index] for index in row])


class LoaderWorkerStart:
    """A ``worker_init_fn`` that shows the user's dataset in ``get_worker_info()``, then calls the user's own."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self._users = users

    def __call__(self, worker_id: int) -> None:
        """Runs in a loader worker, before it fetches."""
        info = torch_worker._worker_info
        if info is not None and isinstance(info.dataset, ElementDataset):
            torch_worker._worker_info = dataclasses.replace(info, dataset=info.dataset.dataset)
        if self._users is not None:
            self._users(worker_id)


def as_is(element: Any) -> Any:
    """Return the argument: the collate_fn of loaders whose dataset collates."""
    return element


def loader_of_tasks(
    loader: DataLoader[Any],
    tasks: Iterable[Task],
    *,
    seed: int,
    num_workers: int | None = None,
    is_as_drawn: bool = False,
    packs: bool = False,
) -> DataLoader[Any]:
    """Return a loader that loads ``tasks`` in order with the workers and settings of the user's loader.

    Yields elements, or ``Failure``s. ``num_workers`` takes the place of the loader's own where given. ``is_as_drawn``:
    the global generators end up as after iterating the user's loader, as long as its dataset draws nothing from them.
    ``packs``: loader workers send small tensors ``packed``; ``owned`` gives them back.
    """
    workers = loader.num_workers if num_workers is None else num_workers
    many: dict[str, Any] = {}
    if workers > 0:
        many = {
            "prefetch_factor": loader.prefetch_factor or 2,
            "multiprocessing_context": loader.multiprocessing_context,
            "timeout": loader.timeout,
            "persistent_workers": loader.persistent_workers and is_as_drawn,
        }
    return DataLoader(
        ElementDataset(loader, seed=seed, keeps_states=is_as_drawn, packs=packs and workers > 0),
        batch_size=None,
        sampler=tasks,
        collate_fn=as_is,
        num_workers=workers,
        worker_init_fn=LoaderWorkerStart(loader.worker_init_fn),
        generator=loader.generator if is_as_drawn else torch.Generator(),
        **many,
    )


_PACKED_BYTES = 1 << 16  # what a pipe holds
_PACKED_TYPES = frozenset(
    {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64}
    | {torch.bool}
)


@dataclass(frozen=True, slots=True)
class Packed:
    """A small tensor on its way from a loader worker: its bytes go through the pipe with the rest of the element.

    torch puts every tensor into a file of its own and hands that over by a connection: a millisecond of CPU each, more
    than all else that a small element costs.
    """

    array: Any


def packed(element: Any) -> Any:
    """Return the element with its small, plain tensors ``Packed``; containers that hold some are new ones."""
    kind = type(element)
    if kind is torch.Tensor:
        return Packed(element.numpy()) if _is_packable(element) else element
    if kind is dict:
        return {key: packed(value) for key, value in element.items()}
    if kind is list or kind is tuple:
        return kind([packed(value) for value in element])
    return element


def _is_packable(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.dtype in _PACKED_TYPES
        and tensor.nbytes <= _PACKED_BYTES
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_neg()
    )


def owned(element: Any, *, always: bool) -> Any:
    """Return the element with its tensors in memory of their own.

    A tensor from a loader worker lies in shared memory and holds a file descriptor: a segment of them would use up the
    descriptors and /dev/shm. With ``always`` everything is copied: in-process datasets may yield one buffer, or one
    dict, again and again. Without it containers, which came through a pipe, are changed in place where they can be.
    What a loader worker has ``packed`` is a tensor again.
    """
    if isinstance(element, torch.Tensor | np.ndarray | Packed):
        return _owned_leaf(element, always=always)
    if isinstance(element, tuple):
        return _owned_tuple(element, always=always)
    if not isinstance(element, (dict, UserDict, list)) and not _is_dataclass(element):
        return element
    element = copy.copy(element) if always else element
    if isinstance(element, (dict, UserDict)):
        for key, value in element.items():
            element[key] = owned(value, always=always)
    elif isinstance(element, list):
        element[:] = [owned(value, always=always) for value in element]
    else:
        for field in dataclasses.fields(element):
            if hasattr(element, field.name):
                object.__setattr__(element, field.name, owned(getattr(element, field.name), always=always))
    return element


def _owned_leaf(leaf: Any, *, always: bool) -> Any:
    if isinstance(leaf, Packed):
        return torch.from_numpy(leaf.array)
    if isinstance(leaf, torch.Tensor):
        return _copied(leaf) if always or _is_shared(leaf) else leaf
    return leaf.copy() if always else leaf


def _is_dataclass(element: Any) -> bool:
    return dataclasses.is_dataclass(element) and not isinstance(element, type)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy made by this thread alone: torch's own wakes all its threads, which spin and take CPU seconds."""
    is_plain = tensor.layout is torch.strided and tensor.is_contiguous() and tensor.device.type == "cpu"
    if (
        not is_plain
        or tensor.numel() == 0  # its strides may forbid to look at it as bytes
        or tensor.requires_grad
        or tensor.is_complex()
        or tensor.is_quantized
        or type(tensor) is not torch.Tensor
    ):
        return tensor.clone()
    copy_ = torch.empty_like(tensor)
    np.copyto(copy_.view(-1).view(torch.uint8).numpy(), tensor.view(-1).view(torch.uint8).numpy())
    return copy_


def _is_shared(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return True  # its parts may be, and torch cannot tell
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def _owned_tuple(element: tuple[Any, ...], *, always: bool) -> tuple[Any, ...]:
    values = [owned(value, always=always) for value in element]
    if all(value is before for value, before in zip(values, element, strict=True)):
        return element
    make = getattr(type(element), "_make", None)
    return make(values) if make is not None else type(element)(values)


# --- set_epoch ------------------------------------------------------------------------------------------------------


def set_epoch_of(part: Any, epoch: int) -> None:
    """Call ``part.set_epoch(epoch)`` where there is such a method."""
    method = getattr(part, "set_epoch", None)
    if callable(method):
        method(epoch)


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Tell the loader, its samplers and its dataset which epoch begins, where they have a ``set_epoch``."""
    batch_sampler = loader.batch_sampler
    parts = (loader, batch_sampler, getattr(batch_sampler, "sampler", None), loader.sampler, loader.dataset)
    for part in {id(part): part for part in parts}.values():
        set_epoch_of(part, epoch)


# --- the same seeding in one process --------------------------------------------------------------------------------


class ElementSeeded:
    """A map-style loader wrapped with the seeding that preparation uses; each pass is the next epoch.

    Order and workers are torch's own. Seed the global generators first (``seeding.seed_start``), as a script does.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int) -> None:
        self._users = loader
        self._numbered = _Numbered(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        self._loader = loader_of_tasks(loader, self._numbered, seed=seed, is_as_drawn=True)
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        set_epoch(self._users, self._epoch)
        self._numbered.epoch = self._epoch
        self._epoch += 1
        for element in self._loader:
            if isinstance(element, Failure):
                raise LoaderError(f"{element.error}\n{element.traceback}", epoch=element.epoch, index=element.index)
            yield element


class _Numbered:
    """A sampler's rows as tasks. Starts the sampler when it is started itself: some draw random numbers then."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.epoch = 0
        self._sampler = sampler

    def __iter__(self) -> Iterator[Task]:
        rows = iter(self._sampler)
        return (Task(self.epoch, index, row) for index, row in enumerate(rows))


def element_seeded(loader: DataLoader[Any], *, seed: int) -> ElementSeeded:
    """Return the map-style loader wrapped with the seeding per element: what prepared values must be equal to."""
    return ElementSeeded(loader, seed=seed)


# --- the user's exceptions ------------------------------------------------------------------------------------------


def describe(error: BaseException) -> str:
    """Return the exception in one line: its class and message."""
    return "".join(traceback.format_exception_only(error)).strip()


def users_traceback(error: BaseException) -> str:
    """Return the tail of the traceback from the first frame on that is neither ours nor the import system's."""
    where = error.__traceback__
    while where is not None and _is_ours(where.tb_frame.f_code.co_filename):
        where = where.tb_next
    text = "".join(traceback.format_exception(type(error), error, where))
    return text if len(text) <= _TRACEBACK_CHARS else "…" + text[-_TRACEBACK_CHARS:]


def _is_ours(file: str) -> bool:
    return file.startswith(("<frozen", _OUR_FOLDER)) or "/importlib/" in file


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "…"
