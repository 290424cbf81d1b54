"""The drop-in: a DataLoader whose elements come prepared. One pass is one prepared epoch."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import starmap
from operator import call
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Sampler

from taas.errors import DeliveryError
from taas_tasks.delivery.accelerated import AcceleratedPass
from taas_tasks.delivery.client import Connection, PassReader, PassShape, ask_ending, ask_num_epochs
from taas_tasks.delivery.counters import PassCounters, next_number
from taas_tasks.delivery.steps import Ending, Remainder, ending_of, epochs_with_steps
from taas_tasks.plan import epochs_of_plan
from taas_tasks.values import LoaderPlan

_log = logging.getLogger("taas")
_STATE_VERSION = 1
_SAY_WHEN_LEFT = 2


def pin_element(element: Any) -> Any:
    """Return an element copied to page-locked memory, as torch's DataLoader does it."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(element)  # type: ignore[no-untyped-call]


def process_group_size() -> int | None:
    """Return the size of the default process group, or None when there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else None


@dataclass(frozen=True)
class Delivery:
    """Where a rank stands and what it needs to be delivered to."""

    rank: int
    world_size: int
    feeder_socket: str
    counters_dir: Path
    remainder: Remainder = "pad"
    allow_pickle: bool = False
    group_size: Callable[[], int | None] = process_group_size
    has_gpu: Callable[[], bool] = torch.cuda.is_available
    pin: Callable[[Any], Any] = pin_element
    connect_s: float = 30.0


class DeliveredDataset(IterableDataset[Any]):
    """Stands in for the user's dataset: says how many elements there are, and where to get them."""

    def __init__(self, name: str, num_elements: Callable[[], int]) -> None:
        self._name = name
        self._num_elements = num_elements

    def __len__(self) -> int:
        """Return the elements of the next pass, over all ranks."""
        return self._num_elements()

    def __iter__(self) -> Iterator[Any]:
        raise DeliveryError(
            f"the dataset of loader '{self._name}' was read where it was prepared and is not here; iterate the loader "
            "itself, not another one made of its dataset (accelerate's skip_first_batches makes one: to go on in the "
            "middle of an epoch, use the loader's own state_dict and load_state_dict)"
        )


class _WholePass(Sampler[Any]):
    """The sampler that users see: order and epochs were settled when the data was prepared."""

    def __init__(self, length: Callable[[], int], *, begins: Callable[[], None]) -> None:
        self._length = length
        self._begins = begins

    def __len__(self) -> int:
        return self._length()

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._length()))

    def set_epoch(self, epoch: int) -> None:
        """A pass counts its epoch itself; but whoever calls this is about to begin one."""
        self._begins()


class DeliveredLoader(DataLoader[Any]):
    """Yields this rank's prepared elements: at step t of a pass, element ``offset + t * world_size + rank``.

    Every rank makes the same number of steps in every pass. A pass is one prepared epoch and ends with its last yield;
    when all have been read, they are replayed in order, which is logged and counted. A pass that was left before its
    end is begun anew by the next ``iter``. Elements are views of this process's own mapping: writing in place is safe.

    Does not: shuffle, collate or start workers; it needs no sampler and is not split again by Lightning or accelerate.
    """

    def __init__(self, plan: LoaderPlan, delivery: Delivery) -> None:
        self._taas_plan = plan
        self._taas_delivery = delivery
        self._taas_epochs = epochs_of_plan(plan)
        self._taas_num_epochs = epochs_with_steps(
            self._taas_epochs, world_size=delivery.world_size, remainder=delivery.remainder
        )
        self._taas_known: dict[int, Ending] = {}
        self._taas_pass = 0  # passes that were taken to their end
        self._taas_offset = 0  # where the next pass begins
        self._taas_before = 0  # steps that the next pass made before it was resumed
        self._taas_left_at: tuple[int, int] | None = None  # element and step where the loop left a pass
        self._taas_times_left = 0
        self._taas_is_accelerated = False
        self._taas_open: weakref.ref[_Pass] | None = None
        super().__init__(
            DeliveredDataset(plan.loader, self._taas_num_elements),
            batch_size=plan.inspection.batch_size,
            num_workers=0,
            pin_memory=plan.inspection.pin_memory and delivery.has_gpu(),
        )
        sampler = _WholePass(self.__len__, begins=lambda: self.set_epoch(0))
        object.__setattr__(self, "sampler", sampler)  # DataLoader forbids changing it from outside

    @property
    def name(self) -> str:
        """The loader's name."""
        return self._taas_plan.loader

    @property
    def _is_accelerate_prepared(self) -> bool:
        """True: accelerate leaves such a loader as it is. It sets this when a script has it prepare the loader."""
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        self._taas_is_accelerated = value

    def __len__(self) -> int:
        """Return the steps of the pass under way, or else of the next one; waits while that cannot be known yet.

        A resumed pass counts the steps that it made before: trainers compare ``len`` with the steps of the epoch.
        """
        open_pass = self._taas_open() if self._taas_open else None
        if open_pass is not None and not open_pass.exhausted:
            return open_pass.length()
        shape = self._taas_shape()
        return self._taas_before + self._taas_length(shape)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin a pass; one that is under way is left.

        Its first element raises DeliveryError where there are several ranks and no process group of that size. (Here
        the error would be hidden by one that Lightning raises while it cleans up after an ``iter`` that failed.)
        """
        before = self._taas_open() if self._taas_open else None
        if before is not None:
            before.leave()
        started = _Pass(self)
        self._taas_open = weakref.ref(started)
        return AcceleratedPass(started, has_ended=started.has_ended) if self._taas_is_accelerated else started

    def set_epoch(self, epoch: int) -> None:
        """A pass counts its epoch itself. But whoever calls this is about to begin one, which ``len`` is now about.

        (Lightning asks for the length before it calls ``iter``, and never takes a pass to its StopIteration.)
        """
        before = self._taas_open() if self._taas_open else None
        if before is not None and before.has_ended():
            self._taas_open = None

    def state_dict(self) -> dict[str, Any]:
        """Return where the training loop stands, in elements over all ranks: it fits any world size."""
        open_pass = self._taas_open() if self._taas_open else None
        stood = (open_pass.stands_at() if open_pass is not None else None) or self._taas_left_at
        position, step = stood or (self._taas_offset, self._taas_before)
        where = {"pass": self._taas_pass, "position": position, "step": step}
        return {"version": _STATE_VERSION, "loader": self.name, **where}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass begin where ``state`` was taken.

        Raises:
            DeliveryError: it is of another loader or version.
        """
        if state.get("version") != _STATE_VERSION or state.get("loader") != self.name:
            raise DeliveryError(
                f"loader '{self.name}' was given the state of '{state.get('loader')}', version {state.get('version')}; "
                f"allowed: what its own state_dict() gave, version {_STATE_VERSION}"
            )
        before = self._taas_open() if self._taas_open else None
        if before is not None:
            before.leave()
        self._taas_open = self._taas_left_at = None
        self._taas_pass, self._taas_offset, self._taas_before = (
            int(state[name]) for name in ("pass", "position", "step")
        )

    # --- passes and epochs ------------------------------------------------------------------------------------------

    def _taas_check_group(self) -> None:
        delivery = self._taas_delivery
        size = delivery.group_size()
        if delivery.world_size > 1 and size != delivery.world_size:
            found = "there is no process group" if size is None else f"the process group has {size} rank(s)"
            raise DeliveryError(
                f"loader '{self.name}' is delivered to {delivery.world_size} ranks, but {found}; call "
                "torch.distributed.init_process_group(backend='nccl', init_method='env://') before iterating, or give "
                "Lightning's Trainer strategy='ddp', accelerator='auto', devices='auto' and num_nodes",
                world_size=delivery.world_size,
                group_size=size,
            )

    def _taas_shape(self) -> PassShape:
        """Return the next pass. Waits where only the ledger tells whether there is another epoch."""
        shape = self._taas_shape_at(self._taas_pass, self._taas_offset)
        if shape.offset and shape.ending is not None and shape.steps(shape.ending.length) == 0:
            self._taas_begin(self._taas_pass + 1)  # the state was taken at the epoch's end
            return self._taas_shape_at(self._taas_pass, 0)
        return shape

    def _taas_shape_at(self, number: int, offset: int) -> PassShape:
        delivery = self._taas_delivery
        count = self._taas_num_epochs
        shape = PassShape(
            loader=self.name,
            rank=delivery.rank,
            world_size=delivery.world_size,
            epoch=number % count if count else number,
            offset=offset,
            ending=None,
            num_streams=self._taas_plan.num_streams,
            remainder=delivery.remainder,
            allow_pickle=delivery.allow_pickle,
        )
        if count is None and number > 0:
            count = self._taas_find_epochs(shape)
            shape = shape if count is None else replace(shape, epoch=number % count)
        return replace(shape, ending=self._taas_ending(shape.epoch))

    def _taas_find_epochs(self, shape: PassShape) -> int | None:
        """Learn how many epochs there are, if the one of ``shape`` is behind the last."""
        connection = Connection(self._taas_delivery.feeder_socket, connect_s=self._taas_delivery.connect_s)
        try:
            count = ask_num_epochs(connection, shape)
        finally:
            connection.close()
        if count == 0:
            raise DeliveryError(f"loader '{self.name}' was prepared, but it yielded no element at all")
        self._taas_num_epochs = count
        return count

    def _taas_ending(self, epoch: int) -> Ending | None:
        """Return how an epoch ends, as far as the plan or an earlier pass tells."""
        length, plan = self._taas_epochs.length_of(epoch), self._taas_plan
        if length is None:
            return self._taas_known.get(epoch)
        return ending_of(length, num_streams=plan.num_streams, is_merged=plan.is_merged)

    def _taas_length(self, shape: PassShape) -> int:
        ending = self._taas_ending(shape.epoch) or self._taas_await_ending(shape)
        return shape.steps(ending.length)

    def _taas_await_ending(self, shape: PassShape) -> Ending:
        _log.info(
            "the length of loader '%s' is not known beforehand: waiting until epoch %d is prepared, as len() was asked",
            *(self.name, shape.epoch),
        )
        connection = Connection(self._taas_delivery.feeder_socket, connect_s=self._taas_delivery.connect_s)
        try:
            ending = ask_ending(connection, shape)
        finally:
            connection.close()
        if ending is None:
            raise DeliveryError(f"loader '{self.name}' was prepared, but it yielded no element at all")
        self._taas_known[shape.epoch] = ending
        return ending

    def _taas_num_elements(self) -> int:
        shape = self._taas_shape()
        ending = self._taas_ending(shape.epoch) or self._taas_await_ending(shape)
        return max(0, ending.length - shape.offset)

    def _taas_ended(self, one: _Pass) -> None:
        """A pass gave its last element."""
        self._taas_begin(one.number_of_pass + 1)

    def _taas_begin(self, number: int) -> None:
        self._taas_pass, self._taas_offset, self._taas_before, self._taas_left_at = number, 0, 0, None
        self._taas_times_left = 0

    def _taas_is_replay(self, number: int, epoch: int) -> bool:
        """Return whether a pass replays an epoch that an earlier one read to its end; say so."""
        count = self._taas_num_epochs
        if count is None or number < count:
            return False
        _log.warning(
            "loader '%s': pass %d replays epoch %d: only %s epoch(s) were prepared. Ask for more units to see new "
            "elements",
            *(self.name, number + 1, epoch, count),
        )
        return True

    def _taas_begin_anew(self) -> None:
        """A pass begins; say so when elements come again as the one before was left, louder at the third time."""
        if self._taas_left_at is not None:
            self._taas_times_left += 1
            _log.info(
                "loader '%s': pass %d was left after step %d and begins anew: its elements come again",
                *(self.name, self._taas_pass + 1, self._taas_left_at[1]),
            )
            if self._taas_times_left == _SAY_WHEN_LEFT:
                _log.warning(
                    "loader '%s': pass %d was left before its end %d times and begins at the same element each time; "
                    "elements behind are never seen. One pass is one epoch: take passes to their end, or prepare a "
                    "loader with shorter epochs",
                    *(self.name, self._taas_pass + 1, self._taas_times_left),
                )
        self._taas_left_at = None

    def _taas_left(self, stood: tuple[int, int]) -> None:
        """A pass ended before its last element."""
        self._taas_left_at = stood


class _Pass:
    """One pass under way. Opens nothing before its first element is asked for.

    The reader gives the elements in runs; within a run an element costs little more than making it.
    """

    def __init__(self, loader: DeliveredLoader) -> None:
        self._loader = loader
        self._pin = loader._taas_delivery.pin if loader.pin_memory else None
        self._started = False
        self._taken = 0
        self._before = 0
        self._reader: PassReader | None = None
        self._counters: PassCounters | None = None
        self._steps_taken: memoryview | list[int] = [0]
        self._run: Iterator[Any] = iter(())
        self._run_stop = -1  # steps that are taken when the run has ended
        self._steps: int | None = None
        self._shape: PassShape | None = None
        self._left = False
        self.exhausted = False  # StopIteration was raised, or it was left
        self.number_of_pass = loader._taas_pass

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        try:
            for element in self._run:
                self._taken = self._steps_taken[0] = taken = self._taken + 1
                if taken == self._run_stop:
                    self._run_has_ended()
                return self._pin(element) if self._pin else element
            return self._next_of_next_run()
        except StopIteration:
            self.exhausted = True
            raise
        except BaseException:
            self.leave()  # else a caller that goes on would take the end of the error for the end of the pass
            raise

    def _next_of_next_run(self) -> Any:
        if self._left:
            raise DeliveryError(
                f"this iterator of loader '{self._loader.name}' was left: a later iter() has begun its pass anew, or "
                "an error has ended it; a loader has one pass at a time"
            )
        if not self._started:
            self._loader._taas_check_group()
            self._start()
        run = self._reader.next_run() if self._reader is not None else None
        if run is None:
            self._end()
            raise StopIteration
        self._count()
        self._run_stop = self._taken + len(run)
        self._run = starmap(call, run)
        return self.__next__()

    def _start(self) -> None:
        loader, delivery = self._loader, self._loader._taas_delivery
        self._started = True
        loader._taas_begin_anew()
        self._shape = shape = loader._taas_shape()
        self.number_of_pass, self._before = loader._taas_pass, loader._taas_before
        is_replay = loader._taas_is_replay(self.number_of_pass, shape.epoch)
        self._reader = PassReader(delivery.feeder_socket, shape, connect_s=delivery.connect_s)
        self._counters = PassCounters(
            delivery.counters_dir,
            loader=loader.name,
            rank=delivery.rank,
            number=next_number(delivery.counters_dir, loader=loader.name, rank=delivery.rank),
            epoch=shape.epoch,
            offset=shape.offset,
            replay=is_replay,
        )
        self._steps_taken = self._counters.steps
        self._steps = self._reader.num_steps

    def _run_has_ended(self) -> None:
        """The last element of a run is given: whether it is the pass's last one shows now, not at a next call."""
        if self._reader is not None and self._taken == self._reader.num_steps:
            self._end()

    def _count(self) -> None:
        if self._reader is not None and self._counters is not None:
            self._counters.count(num_bytes=self._reader.num_bytes, wait_s=self._reader.wait_s)

    def _end(self) -> None:
        """The last element has been given (what calls may never come back, so all is settled here)."""
        if self._reader is None or self._counters is None:
            return
        self._steps = self._taken
        self._count()
        self._counters.complete()
        if self._shape is not None and self._reader.ending is not None:
            self._loader._taas_known[self._shape.epoch] = self._reader.ending
        self._loader._taas_ended(self)
        self._close(finished=True)

    def _close(self, *, finished: bool) -> None:
        stood = self.stands_at()
        if stood is not None and not finished:
            self._loader._taas_left(stood)
        self._run = iter(())
        if self._reader is not None:
            self._reader.close(finished=finished)
            self._reader = None
        if self._counters is not None:
            self._steps_taken = [0]
            self._counters.close()
            self._counters = None

    def leave(self) -> None:
        """End a pass that is not needed any more; the counters keep that it was left."""
        self._left = self._left or self._steps is None or self._taken < self._steps
        self._close(finished=False)
        self.exhausted = True

    def has_ended(self) -> bool:
        """Return whether the element that was taken last is the pass's last."""
        return self._taken == self._steps

    def length(self) -> int:
        """Return the steps of this pass, with those before a resume; waits while that cannot be known yet."""
        loader = self._loader
        if self._steps is not None:
            return self._before + self._steps
        if self._shape is not None:
            return self._before + loader._taas_length(self._shape)
        shape = loader._taas_shape()
        return loader._taas_before + loader._taas_length(shape)

    def stands_at(self) -> tuple[int, int] | None:
        """Return the element and step where this pass would go on; None before its first and after its last."""
        if self._shape is None or self._reader is None or self._taken == 0:
            return None
        return self._shape.offset + self._taken * self._shape.world_size, self._before + self._taken

    def __del__(self) -> None:
        self._close(finished=False)
