"""The rank's side of the delivery: one connection to the feeder per pass, and the elements in the mapped parts."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from taas.errors import DeliveryError, error_from_dict
from taas_tasks.delivery import wire
from taas_tasks.delivery.steps import Place, Remainder, num_steps, place_of
from taas_tasks.plan import padding_of
from taas_tasks.shards.lanes import NUM_LANES
from taas_tasks.shards.reader import Lane, ShardSchema, read_lane, read_schema

_log = logging.getLogger(__name__)
_CONNECT_S = 30.0
_SAY_AFTER_S = 30.0


@dataclass(frozen=True)
class PassShape:
    """Which elements of which epoch a rank takes: ``offset + t * world_size + rank`` at step t.

    ``epoch_length`` is None where only the reading shows it.
    """

    loader: str
    rank: int
    world_size: int
    epoch: int
    offset: int
    epoch_length: int | None
    remainder: Remainder
    allow_pickle: bool = False

    def index(self, step: int) -> int:
        """Return the element that this rank takes at a step."""
        return self.offset + step * self.world_size + self.rank

    def steps(self, epoch_length: int) -> int:
        """Return the steps of this pass when the epoch has this length."""
        return num_steps(epoch_length, offset=self.offset, world_size=self.world_size, remainder=self.remainder)


class Part:
    """A part of a segment in this process: lanes are mapped privately, each on its own, when first read."""

    def __init__(self, told: dict[str, Any], file: int, *, allow_pickle: bool) -> None:
        self.epoch, self.n, self.lane_bits = told["epoch"], told["n"], told["lane_bits"]
        self.start, self.stop, self.padded_stop = told["start"], told["stop"], told["padded_stop"]
        self.is_last = told["last"]
        self.num_bytes = 0
        self._places = {lane: (place, length) for lane, place, length in told["lanes"]}
        self._schema: ShardSchema = read_schema(os.pread(file, told["schema_length"], 0), allow_pickle=allow_pickle)
        self._lanes: dict[int, Lane] = {}
        self._file = file

    def holds(self, index: int) -> bool:
        """Whether the element at ``index`` is in this part."""
        return self.start <= index < self.padded_stop and index % NUM_LANES in self._places

    def element(self, index: int) -> Any:
        """Return the element at ``index`` of the (padded) epoch."""
        lane = self._lanes.get(index % NUM_LANES)
        if lane is None:
            lane = self._open(index % NUM_LANES)
        return lane[(index - self.start) // NUM_LANES]

    def _open(self, number: int) -> Lane:
        place, length = self._places[number]
        page = place // mmap.PAGESIZE * mmap.PAGESIZE
        mapping = mmap.mmap(
            self._file,
            place - page + length,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=page,
        )
        self.num_bytes += length
        lane = read_lane(memoryview(mapping)[place - page :], self._schema)
        self._lanes[number] = lane
        return lane

    def close(self) -> None:
        """Let go of the file; elements that are still alive keep their lanes."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Connection:
    """One connection to the feeder.

    Raises (all methods): DeliveryError when the feeder is gone or cannot give what was asked.
    """

    def __init__(self, path: str, *, connect_s: float = _CONNECT_S) -> None:
        self._socket = wire.new_socket()
        self._path = path
        self._poll = select.poll()  # not select.select: that fails beyond descriptor 1023
        self._poll.register(self._socket, select.POLLIN)
        self.wait_s = 0.0
        deadline = time.monotonic() + connect_s
        while not self._connected():
            if time.monotonic() > deadline:
                self._socket.close()
                raise DeliveryError(f"no feeder answers at {path}: it has ended or never started; see the feeder's log")
            time.sleep(0.05)

    def _connected(self) -> bool:
        try:
            with wire.short_path(self._path) as short:
                self._socket.connect(short)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True

    def send(self, operation: str, **fields: Any) -> None:
        """Send one message."""
        try:
            wire.send(self._socket, {"op": operation, **fields})
        except OSError as error:
            raise self._gone() from error

    def receive(self, what: str, *, urgent: bool) -> tuple[dict[str, Any], list[int]]:
        """Return the next answer; the time until it is there is added to ``wait_s``.

        Args:
            what: is awaited, for the log.
            urgent: tell the feeder that this rank cannot go on without it.
        """
        if not self._poll.poll(0):
            started = time.monotonic()
            if urgent:
                self.send("wait")
            while not self._poll.poll(_SAY_AFTER_S * 1000):
                _log.info("waiting for %s since %.0f s", what, time.monotonic() - started)
            self.wait_s += time.monotonic() - started
        message, files = wire.receive(self._socket)
        if message is None:
            raise self._gone()
        if "error" in message:
            raise _as_delivery_error(message["error"])
        return message, files

    def _gone(self) -> DeliveryError:
        return DeliveryError(
            f"the feeder at {self._path} has ended while this rank still needs data; see the feeder's log of this host"
        )

    def close(self) -> None:
        """End the connection: the feeder forgets what it held for it."""
        self._socket.close()


def _as_delivery_error(value: dict[str, Any]) -> DeliveryError:
    error = error_from_dict(value)
    if isinstance(error, DeliveryError):
        return error
    return DeliveryError(f"{type(error).__name__}: {error.message}", **error.fields)


@dataclass(frozen=True)
class Ending:
    """How an epoch ends: its length, and its length with the padding that the shards hold."""

    length: int
    padded: int


def ask_ending(connection: Connection, shape: PassShape) -> Ending | None:
    """Wait until the end of an epoch is known; None when the units ended before it."""
    message = _reach(connection, shape, 2**62, what="end")
    return Ending(message["epoch_length"], message["padded_length"]) if "epoch_length" in message else None


def ask_num_epochs(connection: Connection, shape: PassShape) -> int | None:
    """Wait until it is known whether an epoch has elements; when it has none, return how many epochs have."""
    num_epochs: int | None = _reach(connection, shape, 0, what="start").get("num_epochs")
    return num_epochs


def _reach(connection: Connection, shape: PassShape, index: int, *, what: str) -> dict[str, Any]:
    connection.send("look", loader=shape.loader, epoch=shape.epoch)
    connection.send("reach", index=index)
    return connection.receive(f"the {what} of epoch {shape.epoch} of loader '{shape.loader}'", urgent=False)[0]


class PassReader:
    """The elements of one pass of one rank, in order; the next part is asked for while one is read.

    ``num_steps`` and ``ending`` are set as soon as the epoch's end is known. Iterate once, then ``close``.
    """

    def __init__(self, path: str, shape: PassShape, *, connect_s: float = _CONNECT_S) -> None:
        self._shape = shape
        self._path = path
        self._connection = Connection(path, connect_s=connect_s)
        self._questions: Connection | None = None
        self._part: Part | None = None
        self._asked: Place | None = None
        self._reached = 0
        self._finished_bytes = 0
        self.ending: Ending | None = None
        self.num_steps: int | None = None
        if shape.epoch_length is not None:
            self._learn(Ending(shape.epoch_length, shape.epoch_length + padding_of(shape.epoch_length)))
        first = shape.index(0)
        self._connection.send("open", loader=shape.loader, epoch=shape.epoch, offset=shape.offset, index=first)
        if self.num_steps != 0:
            self._ask(self._place(0))

    @property
    def wait_s(self) -> float:
        """Seconds in which this rank could not go on."""
        return self._connection.wait_s + (self._questions.wait_s if self._questions else 0.0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the lanes that this rank has opened."""
        return self._finished_bytes + (self._part.num_bytes if self._part else 0)

    def __iter__(self) -> Iterator[Any]:
        step, stride = 0, self._shape.world_size
        while self._has(step):
            place = self._place(step)
            part = self._part_with(place)
            if part is None:
                continue  # the epoch has ended: whether the pass has this step is now known
            index, limit = place.index, part.padded_stop if place.offset == self._shape.offset else place.index + 1
            while index < limit and self._has(step):
                yield part.element(index)
                index += stride
                step += 1

    def close(self, *, finished: bool = False) -> None:
        """Let go of everything; elements that are still alive keep what they need. Twice is fine."""
        if self._part is not None:
            self._finished_bytes += self._part.num_bytes
            self._part.close()
            self._part = None
        if finished:
            with contextlib.suppress(DeliveryError):
                self._connection.send("close", finished=True)
        self._connection.close()
        if self._questions is not None:
            self._questions.close()

    def _place(self, step: int) -> Place:
        ending = self.ending
        return place_of(
            self._shape.index(step),
            offset=self._shape.offset,
            epoch_length=ending.length if ending else None,
            padded_length=ending.padded if ending else None,
        )

    def _has(self, step: int) -> bool:
        """Whether the pass has this step, as far as it is known; with ``drop`` it waits until it is."""
        if self.num_steps is None and self._shape.remainder == "drop":
            self._await_whole(step)
        return self.num_steps is None or step < self.num_steps

    def _await_whole(self, step: int) -> None:
        """Wait until every rank's element of a step is there, or the epoch has ended before."""
        last = self._shape.offset + (step + 1) * self._shape.world_size - 1
        if last < self._reached:
            return
        if self._questions is None:  # an answer about a part may be on its way on the pass's own connection
            self._questions = Connection(self._path)
            self._questions.send("look", loader=self._shape.loader, epoch=self._shape.epoch)
        self._questions.send("reach", index=last)
        answer, _ = self._questions.receive(f"element {last} of loader '{self._shape.loader}'", urgent=False)
        self._reached = answer["reach"]
        if "epoch_length" in answer:
            self._learn(Ending(answer["epoch_length"], answer["padded_length"]))

    def _learn(self, ending: Ending) -> None:
        planned = self._shape.epoch_length
        if planned is not None and ending.length != planned:
            raise DeliveryError(
                f"epoch {self._shape.epoch} of loader '{self._shape.loader}' ended after {ending.length} elements, but "
                f"the plan says {planned}: the loader yielded fewer than its sampler; prepare it again"
            )
        self.ending = ending
        self.num_steps = self._shape.steps(ending.length)

    def _ask(self, place: Place) -> None:
        self._connection.send("ask", index=place.index, offset=place.offset)
        self._asked = place

    def _part_with(self, place: Place) -> Part | None:
        """Return the part that holds an element, when it is there; None when the epoch turned out to end before."""
        while self._part is None or not self._part.holds(place.index):
            if self._asked is None:
                self._ask(place)
            what = f"element {place.index} of epoch {self._shape.epoch} of loader '{self._shape.loader}'"
            self._release()
            message, files = self._connection.receive(what, urgent=True)
            asked, self._asked = self._asked, None
            if "part" not in message:
                self._learn(Ending(message["epoch_length"], message["padded_length"]))
                return None
            self._part = Part(message["part"], files[0], allow_pickle=self._shape.allow_pickle)
            if asked is not None and asked.offset == self._shape.offset:
                self._ask_ahead(self._part)
        return self._part

    def _release(self) -> None:
        if self._part is not None:
            self._finished_bytes += self._part.num_bytes
            self._connection.send("release", epoch=self._part.epoch, n=self._part.n, lanes=self._part.lane_bits)
            self._part.close()
            self._part = None

    def _ask_ahead(self, part: Part) -> None:
        if part.is_last and self.ending is None:
            self._learn(Ending(part.stop, part.padded_stop))
        shape = self._shape
        step = -(-(part.padded_stop - shape.offset - shape.rank) // shape.world_size)
        if self.num_steps is None or step < self.num_steps:
            self._ask(self._place(step))
