"""The rank's side of the delivery: one connection to the feeder per pass, and the elements in the mapped parts."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from taas.errors import DeliveryError, error_from_dict
from taas_tasks.delivery import progress, wire
from taas_tasks.delivery.mapped import MappedPart, Row
from taas_tasks.delivery.steps import Ending, Place, Remainder, alive_at, next_position, num_steps, place_of
from taas_tasks.streams import Merge

_log = logging.getLogger(__name__)
_CONNECT_S = 30.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.05
_SAY_AFTER_S = 30.0
_MAX_RUN = 1024  # steps: what is prepared at once of tiny elements


@dataclass(frozen=True)
class PassShape:
    """Which elements of which epoch a rank takes: ``offset + t * world_size + rank`` at step t.

    ``ending`` is None where only the reading shows it; ``num_streams`` is that of a merged loader, else 1.
    """

    loader: str
    rank: int
    world_size: int
    epoch: int
    offset: int
    ending: Ending | None
    remainder: Remainder
    num_streams: int = 1
    allow_pickle: bool = False

    def index(self, step: int) -> int:
        """Return the element that this rank takes at a step."""
        return self.offset + step * self.world_size + self.rank

    def steps(self, epoch_length: int) -> int:
        """Return the steps of this pass when the epoch has this length."""
        return num_steps(epoch_length, offset=self.offset, world_size=self.world_size, remainder=self.remainder)

    def last_index(self, step: int) -> int:
        """Return the last element that any rank takes at a step."""
        return self.offset + (step + 1) * self.world_size - 1

    def steps_within(self, reach: int) -> int:
        """Return the steps that this pass has for certain when so many elements of the epoch are there."""
        first = self.offset + (self.rank if self.remainder == "pad" else self.world_size - 1)
        return max(0, -(-(reach - first) // self.world_size))


class Connection:
    """One connection to the feeder.

    Raises (all methods): DeliveryError when the feeder is gone or cannot give what was asked.
    """

    def __init__(self, path: str, *, connect_s: float = _CONNECT_S) -> None:
        self._socket = wire.new_socket()
        self._pid = os.getpid()
        self._path = path
        self._poll = select.poll()  # not select.select: that fails beyond descriptor 1023
        self._poll.register(self._socket, select.POLLIN)
        self.wait_s = 0.0
        deadline, pause_s = time.monotonic() + connect_s, _FIRST_PAUSE_S
        while not self._connected():
            if time.monotonic() > deadline:
                self._socket.close()
                raise DeliveryError(f"no feeder answers at {path}: it has ended or never started; see the feeder's log")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

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

    def receive(self, what: str, *, urgent: int | None = None) -> tuple[dict[str, Any], list[int]]:
        """Return the next answer; the time until it is there is added to ``wait_s``.

        Args:
            what: is awaited, for the log.
            urgent: tell the feeder that this rank cannot go on without what it asked for in this slot.
        """
        if not self._poll.poll(0):
            started = time.monotonic()
            if urgent is not None:
                self.send("wait", slot=urgent)
            with progress.waiting_for_data():
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
        """End the connection, also where a child process has it open: the feeder forgets what it held for it."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _as_delivery_error(value: dict[str, Any]) -> DeliveryError:
    error = error_from_dict(value)
    if isinstance(error, DeliveryError):
        return error
    return DeliveryError(f"{type(error).__name__}: {error.message}", **error.fields)


def ask_ending(connection: Connection, shape: PassShape) -> Ending | None:
    """Wait until the end of an epoch is known; None when the units ended before it."""
    message = _reach(connection, shape, 2**62, what="end")
    return _ending(message) if "epoch_length" in message else None


def ask_num_epochs(connection: Connection, shape: PassShape) -> int | None:
    """Wait until it is known whether an epoch has elements; when it has none, return how many epochs have."""
    num_epochs: int | None = _reach(connection, shape, 0, what="start").get("num_epochs")
    return num_epochs


def _reach(connection: Connection, shape: PassShape, index: int, *, what: str) -> dict[str, Any]:
    connection.send("look", loader=shape.loader, epoch=shape.epoch)
    connection.send("reach", index=index)
    return connection.receive(f"the {what} of epoch {shape.epoch} of loader '{shape.loader}'")[0]


def _ending(told: dict[str, Any]) -> Ending:
    return Ending(told["epoch_length"], told["padded_length"], dict(told.get("lengths", ())))


@dataclass
class _Slot:
    """The parts of one stream: the one that is read, the next one, and what was asked for last."""

    part: MappedPart | None = None
    ahead: MappedPart | None = None
    asked: Place | None = None
    answered: Place | None = None  # what ``part`` was asked for
    ahead_answers: Place | None = None
    number: int = 0

    @property
    def is_idle(self) -> bool:
        return self.part is None and self.ahead is None and self.asked is None


class PassReader:
    """The elements of one pass of one rank, in order; the next part of each stream is asked for while one is read.

    Where the epoch's length is not known beforehand, only elements below the *reach* are read: those before the
    epoch's first missing one, whose places are certain. ``num_steps`` and ``ending`` are set as soon as they are known.
    Call ``next_run`` until it gives None, or iterate once; then ``close``.
    """

    def __init__(self, path: str, shape: PassShape, *, connect_s: float = _CONNECT_S) -> None:
        self._shape = shape
        self._connection = Connection(path, connect_s=connect_s)
        self._merge = Merge(shape.num_streams)
        self._asked_in: Merge | None = None  # the order in which this rank's places in all streams were found
        self._slots = [_Slot() for _ in range(shape.num_streams + 1)]  # the last one is for padding
        self._step = 0
        self._num_certain = 0  # steps that this rank has for certain
        self._reach_asked = False
        self._finished_bytes = 0
        self.ending: Ending | None = None
        self.num_steps: int | None = None
        if shape.ending is not None:
            self._learn(shape.ending)
        whole = {"loader": shape.loader, "epoch": shape.epoch, "offset": shape.offset, "index": shape.index(0)}
        is_sure = self.ending is not None or shape.num_streams == 1
        self._connection.send("open", **whole, asks=self._first_asks() if is_sure else [])

    @property
    def wait_s(self) -> float:
        """Seconds in which this rank could not go on."""
        return self._connection.wait_s

    @property
    def num_bytes(self) -> int:
        """Bytes of the lanes that this rank has opened."""
        return self._finished_bytes + sum(slot.part.num_bytes for slot in self._slots if slot.part is not None)

    def __iter__(self) -> Iterator[Any]:
        while (run := self.next_run()) is not None:
            for get, row in run:
                yield get(row)

    def next_run(self) -> list[Row] | None:
        """Return the elements of the next steps, as many as the open parts hold; waits for one. None: the pass is over.

        An element is made by calling its function with its row.
        """
        if not self._has(self._step):
            return None
        shape, step = self._shape, self._step
        first, stop = shape.index(step), shape.index(min(self._num_certain, step + _MAX_RUN))
        place = place_of(first, offset=shape.offset, ending=self.ending, merge=self._merge)
        part = self._await_part(place)
        if place.offset != shape.offset:  # padding: the pass's last element
            run = part.rows(range(place.position, place.position + 1))
        else:
            run = self._rows(first, stop if self.ending is None else min(stop, self.ending.padded))
        self._step += len(run)
        return run

    def _rows(self, first: int, stop: int) -> list[Row]:
        """Return the elements ``first``, ``first + world_size``, ... below ``stop``, up to one that no open part holds.

        While the same streams are alive, a rank goes round some of them, and in each of them by the same steps.
        """
        apart, merge = self._shape.world_size, self._merge
        alive, end = alive_at(merge, first)
        stop = stop if end is None else min(stop, end)
        shared = math.gcd(apart, alive)
        around = alive // shared
        found: list[tuple[int, list[Row]]] = []
        total = len(range(first, stop, apart))
        for turn in range(min(around, total)):
            stream, position = merge.locate(first + turn * apart)
            count, by = len(range(turn, total, around)), apart // shared
            part = self._slots[stream].part
            rows = [] if part is None else part.rows(range(position, position + count * by, by))
            total = min(total, turn + len(rows) * around)
            found.append((turn, rows))
        run: list[Row] = [found[0][1][0]] * total
        for turn, rows in found:
            run[turn::around] = rows[: len(range(turn, total, around))]
        return run

    def close(self, *, finished: bool = False) -> None:
        """Let go of everything; elements that are still alive keep what they need. Twice is fine."""
        self._finished_bytes = self.num_bytes
        for slot in self._slots:
            for part in (slot.part, slot.ahead):
                if part is not None:
                    part.close()
            slot.part = slot.ahead = None
        if finished:
            with contextlib.suppress(DeliveryError):
                self._connection.send("close", finished=True)
        self._connection.close()

    # --- what is known of the epoch's end -----------------------------------------------------------------------------

    def _has(self, step: int) -> bool:
        """Whether the pass has this step; waits until it is known."""
        while step >= self._num_certain and self.num_steps is None:
            if not self._reach_asked:
                last = self._shape.index(step) if self._shape.remainder == "pad" else self._shape.last_index(step)
                self._connection.send("reach", index=last)
                self._reach_asked = True
            self._receive(f"element {self._shape.index(step)}")
        return step < self._num_certain

    def _adopt(self, told: dict[str, Any]) -> None:
        """Take in how far the epoch is there, and which streams have ended."""
        if self.ending is not None:
            return  # all is known
        if "num_epochs" in told:
            raise DeliveryError(f"epoch {self._shape.epoch} of loader '{self._shape.loader}' has no elements")
        lengths = dict(told.get("lengths", ()))
        if lengths != self._merge.lengths:
            self._merge = Merge(self._shape.num_streams, lengths)
        self._num_certain = self._shape.steps_within(told["reach"])
        if "epoch_length" in told:
            self._learn(_ending(told))
        if self._asked_in is not self._merge:
            leaves, asks = self._leave_streams(), self._first_asks()
            if leaves or asks:
                self._connection.send("ask", asks=asks, leaves=leaves)

    def _learn(self, ending: Ending) -> None:
        self.ending = ending
        self.num_steps = self._num_certain = self._shape.steps(ending.length)
        if ending.lengths:
            self._merge = Merge(self._shape.num_streams, ending.lengths)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _await_part(self, place: Place) -> MappedPart:
        """Return the part that holds an element, when it is there."""
        number = place.stream if place.offset == self._shape.offset else self._shape.num_streams
        slot = self._slots[number]
        while slot.part is None or not slot.part.holds(place.position):
            if slot.part is not None:
                if slot.answered == place:
                    raise DeliveryError(f"the feeder gave a part that lacks {place}, for which it was asked")
                self._release(slot.part)
            slot.part, slot.answered, slot.ahead = slot.ahead, slot.ahead_answers, None
            if slot.part is None:
                if slot.asked != place:  # nothing, or what is not needed now that another stream has ended
                    self._connection.send("ask", asks=[self._question(number, place)])
                self._receive(f"element {place.position} of stream {place.stream}", urgent=number)
            elif slot.part.holds(place.position):
                self._ask_ahead(number, slot.part)
        return slot.part

    def _receive(self, what: str, *, urgent: int | None = None) -> None:
        """Take in the next message, whatever it answers."""
        of_what = f"{what} of epoch {self._shape.epoch} of loader '{self._shape.loader}'"
        message, files = self._connection.receive(of_what, urgent=urgent)
        if "part" not in message:
            self._reach_asked = False
            self._adopt(message)
            return
        if "reach" in message:
            self._adopt(message)
        self._take(message, files[0])

    def _take(self, message: dict[str, Any], file: int) -> None:
        part = MappedPart(
            message["part"], file, num_streams=self._shape.num_streams, allow_pickle=self._shape.allow_pickle
        )
        slot = self._slots[message["slot"]]
        if message["number"] != slot.number:  # something else was asked for in the meantime
            self._release(part)
            return
        slot.ahead, slot.ahead_answers, slot.asked = part, slot.asked, None

    def _release(self, part: MappedPart) -> None:
        self._connection.send("release", epoch=part.epoch, stream=part.stream, n=part.n, lanes=part.lane_bits)
        self._finished_bytes += part.num_bytes
        part.close()

    def _question(self, number: int, place: Place) -> tuple[int, int, int, int, int]:
        slot = self._slots[number]
        slot.asked, slot.number = place, slot.number + 1
        return number, slot.number, place.stream, place.position, place.offset

    def _first_asks(self) -> list[tuple[int, int, int, int, int]]:
        """Return what to ask of the streams of which nothing is there and nothing was asked."""
        self._asked_in = self._merge
        idle = [stream for stream in range(self._shape.num_streams) if self._slots[stream].is_idle]
        places = [self._next_place(stream, 0) for stream in idle]
        return [self._question(place.stream, place) for place in places if place is not None]

    def _leave_streams(self) -> list[int]:
        """Let go of the streams of which this rank takes nothing more, as another one has ended; return them."""
        streams = range(self._shape.num_streams)
        left = [one for one in streams if not self._slots[one].is_idle and self._next_place(one, 0) is None]
        for stream in left:
            slot = self._slots[stream]
            for part in (slot.part, slot.ahead):
                if part is not None:
                    self._release(part)
            self._slots[stream] = _Slot(number=slot.number + 1)  # what is still on its way is not what is asked for
        return left

    def _next_place(self, stream: int, position: int) -> Place | None:
        """Return the first element of a stream, from a position on, that this rank takes, as far as is known."""
        shape, below = self._shape, None
        if self.ending is not None and self.num_steps is not None:
            below = min(self.ending.padded, shape.index(self.num_steps))
        first = shape.index(self._step)
        rule = {"first": first, "world_size": shape.world_size, "position": position}
        found = next_position(self._merge, stream, **rule, below=below)
        return None if found is None else Place(stream, found, shape.offset)

    def _ask_ahead(self, number: int, part: MappedPart) -> None:
        """Ask for what comes after a part: the stream's next one, else the padding that this rank needs."""
        if number == self._shape.num_streams:
            return
        place = self._next_place(number, part.stop)
        asks = [] if place is None else [self._question(number, place)]
        asks += self._padding_asks() if place is None else []
        if asks:
            self._connection.send("ask", asks=asks)

    def _padding_asks(self) -> list[tuple[int, int, int, int, int]]:
        shape, ending, padding = self._shape, self.ending, self._slots[-1]
        if ending is None or not self.num_steps or not padding.is_idle:
            return []
        last = shape.index(self.num_steps - 1)
        if last < ending.padded:
            return []
        place = place_of(last, offset=shape.offset, ending=ending, merge=self._merge)
        return [self._question(shape.num_streams, place)]
