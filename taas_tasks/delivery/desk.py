"""What the feeder decides: which parts to fetch, to keep, to hand out and to drop. No I/O, no clock.

The desk knows the committed segments, the open iterators of this host's ranks and the parts in the cache. ``decide``
returns what is to be done now. Its rules:

- A pass takes the parts of its epoch in order. What an open iterator will need next is fetched ahead of it, nearest
  first, as far as the loader's budget reaches; after the epoch's end comes the next epoch.
- A part is kept while a rank holds it, or while an open iterator has still to take it and it fits the budget. Only
  open iterators count: one that comes late, or again, has what it needs fetched again.
- Who cannot go on without a part gets it even when the budget is used up by parts that other ranks hold. So no rank
  waits for another rank's progress, and two loaders, or one rank that iterates alone, cannot lock each other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from taas.errors import DeliveryError, TaasError
from taas_tasks.delivery.parts import PartKey, PartLayout, Ranks, Segment, lay_out

_MAX_LAYOUTS = 4096
_MAX_AHEAD = 64  # parts ahead of one iterator, so that a huge cache of tiny segments costs no more than it helps


@dataclass(frozen=True)
class Fetch:
    """Bring a part into the cache."""

    key: PartKey
    segment: Segment
    layout: PartLayout


@dataclass(frozen=True)
class Drop:
    """Close the file of a part."""

    key: PartKey


@dataclass(frozen=True)
class HandOut:
    """Give a part to the rank behind a connection."""

    connection: int
    key: PartKey
    segment: Segment
    layout: PartLayout


@dataclass(frozen=True)
class Tell:
    """Answer a connection without a part."""

    connection: int
    message: dict[str, Any]


Action: TypeAlias = Fetch | Drop | HandOut | Tell


@dataclass
class _Epoch:
    segments: list[Segment] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    @property
    def last(self) -> Segment | None:
        return self.segments[-1] if self.segments else None

    @property
    def end(self) -> Segment | None:
        return self.last if self.last is not None and self.last.last_of_epoch else None

    def place_of(self, index: int) -> int | None:
        """Return which segment holds ``index``, if it is committed."""
        place = bisect_right(self.starts, index) - 1
        return place if place >= 0 and index < self.segments[place].padded_stop else None


@dataclass
class _Stream:
    """A loader as this host sees it."""

    epochs: list[_Epoch] = field(default_factory=list)
    complete: bool = False
    failure: TaasError | None = None
    next_pass: int = 0  # the epoch that the next pass is expected to read

    def add(self, segment: Segment) -> None:
        while len(self.epochs) <= segment.epoch:
            self.epochs.append(_Epoch())
        epoch = self.epochs[segment.epoch]
        epoch.segments.append(segment)
        epoch.starts.append(segment.start)
        self.complete = self.complete or segment.last_of_units

    def epoch(self, number: int) -> _Epoch | None:
        return self.epochs[number] if number < len(self.epochs) else None


@dataclass
class _Cursor:
    """An open iterator of a rank, and what it has asked for."""

    loader: str
    epoch: int
    offset: int
    index: int  # the first element that it has still to take
    origin: int  # the pass began there; ``offset`` differs from it where the epoch's start is read as padding
    asked: bool = False
    waiting: bool = False
    reads: bool = True
    reach: int | None = None  # a question: is this element there, or has the epoch ended before?
    held: set[PartKey] = field(default_factory=set)


@dataclass
class _Part:
    layout: PartLayout
    ready: bool = False
    holders: set[int] = field(default_factory=set)


class Desk:
    """Keeps the state and decides. Not for several threads at once.

    Args:
        ranks: this host's.
        loaders: names of the loaders to deliver.
        cache_bytes: of this host, shared evenly among the loaders.
        host: for messages.
        max_fetches: at once.
    """

    def __init__(self, ranks: Ranks, loaders: Iterable[str], *, cache_bytes: int, host: str, max_fetches: int) -> None:
        self._ranks = ranks
        self._streams = {name: _Stream() for name in loaders}
        self._cache_bytes = cache_bytes
        self._budget = cache_bytes // max(1, len(self._streams))
        self._host = host
        self._max_fetches = max_fetches
        self._cursors: dict[int, _Cursor] = {}
        self._parts: dict[PartKey, _Part] = {}
        self._failed: dict[PartKey, TaasError] = {}
        self._layouts: dict[PartKey, PartLayout] = {}

    @property
    def cached_bytes(self) -> int:
        """Bytes of the cache files that are there or on their way."""
        return sum(part.layout.num_bytes for part in self._parts.values())

    # --- what happens ---------------------------------------------------------------------------------------------

    def add_segment(self, segment: Segment) -> None:
        """A segment was committed. They come in the order of the stream."""
        stream = self._streams[segment.loader]
        stream.add(segment)
        needed = lay_out(segment, self._ranks.lanes(0)).num_bytes
        if needed > self._budget and stream.failure is None:
            stream.failure = DeliveryError(
                f"host {self._host} needs {needed} bytes of cache for its part of segment {segment.n} of epoch "
                f"{segment.epoch} of loader '{segment.loader}', and may use {self._budget} ({self._cache_bytes} bytes "
                f"for {len(self._streams)} loader(s)); raise cache_gb in the request, or yield smaller elements",
                loader=segment.loader,
                needed_bytes=needed,
                budget_bytes=self._budget,
            )

    def fail_loader(self, loader: str, error: TaasError) -> None:
        """Nothing more can come of a loader: every question about it gets this error."""
        self._streams[loader].failure = error

    def open(self, connection: int, *, loader: str, epoch: int, offset: int, index: int) -> None:
        """A rank began a pass; ``index`` is the first element that it takes."""
        self._cursors[connection] = _Cursor(loader, epoch, offset, index, origin=offset)
        self._streams[loader].next_pass = epoch

    def knows(self, connection: int) -> bool:
        """Whether a connection has an open pass or question."""
        return connection in self._cursors

    def look(self, connection: int, *, loader: str, epoch: int) -> None:
        """A rank wants to ask about an epoch without reading it."""
        self._cursors[connection] = _Cursor(loader, epoch, 0, 0, origin=0, reads=False)

    def ask(self, connection: int, *, index: int, offset: int) -> None:
        """A rank wants the part with element ``index``, read as in a pass from ``offset`` on."""
        cursor = self._cursors[connection]
        cursor.index, cursor.offset, cursor.asked, cursor.waiting = index, offset, True, False
        self._failed = {key: error for key, error in self._failed.items() if key.loader != cursor.loader}  # try again

    def wait(self, connection: int) -> None:
        """A rank cannot go on without what it asked for."""
        self._cursors[connection].waiting = True

    def ask_reach(self, connection: int, *, index: int) -> None:
        """A rank asks whether element ``index`` is committed, or where the epoch ended before it."""
        self._cursors[connection].reach = index

    def release(self, connection: int, *, epoch: int, n: int, lanes: int) -> None:
        """A rank has gone past a part."""
        cursor = self._cursors[connection]
        self._let_go(connection, PartKey(cursor.loader, epoch, n, lanes))
        cursor.held.discard(PartKey(cursor.loader, epoch, n, lanes))

    def close(self, connection: int, *, finished: bool = False) -> None:
        """A rank's iterator is gone; ``finished`` when its pass was complete."""
        cursor = self._cursors.pop(connection, None)
        if cursor is None:
            return
        for key in cursor.held:
            self._let_go(connection, key)
        if finished:
            self._streams[cursor.loader].next_pass = cursor.epoch + 1

    def _let_go(self, connection: int, key: PartKey) -> None:
        if key in self._parts:
            self._parts[key].holders.discard(connection)

    def fetched(self, key: PartKey) -> None:
        """A part is in the cache."""
        self._parts[key].ready = True

    def fetch_failed(self, key: PartKey, error: TaasError) -> None:
        """A part could not be brought."""
        self._parts.pop(key, None)
        self._failed[key] = error

    # --- what is to be done -----------------------------------------------------------------------------------------

    def decide(self) -> list[Action]:
        """Return what is to be done now, in this order."""
        actions: list[Action] = []
        for connection, cursor in self._cursors.items():
            actions += self._answer(connection, cursor)
        in_flight = sum(not part.ready for part in self._parts.values())
        for loader in self._streams:
            wanted = self._wanted(loader)
            actions += self._evict(loader, wanted)
            fetches = self._to_fetch(loader, wanted, room=self._max_fetches - in_flight)
            in_flight += len(fetches)
            actions += fetches
        return actions

    def _answer(self, connection: int, cursor: _Cursor) -> list[Action]:
        stream = self._streams[cursor.loader]
        if not cursor.asked and cursor.reach is None:
            return []
        if stream.failure is not None:
            cursor.asked, cursor.reach = False, None
            return [Tell(connection, {"error": stream.failure.to_dict()})]
        if cursor.reach is not None:
            return self._answer_reach(connection, cursor, stream, cursor.reach)
        return self._answer_ask(connection, cursor, stream)

    def _answer_reach(self, connection: int, cursor: _Cursor, stream: _Stream, index: int) -> list[Action]:
        epoch = stream.epoch(cursor.epoch)
        last = epoch.last if epoch else None
        if last is not None and (last.last_of_epoch or index < last.stop):
            cursor.reach = None
            return [Tell(connection, {"reach": last.stop, **(_ending(last) if last.last_of_epoch else {})})]
        if last is None and stream.complete:
            cursor.reach = None
            return [Tell(connection, {"num_epochs": len(stream.epochs)})]
        return []

    def _answer_ask(self, connection: int, cursor: _Cursor, stream: _Stream) -> list[Action]:
        epoch = stream.epoch(cursor.epoch)
        place = epoch.place_of(cursor.index) if epoch else None
        if epoch is None or place is None:
            if epoch is None or epoch.end is None:
                return []
            cursor.asked = False
            return [Tell(connection, _ending(epoch.end))]
        segment = epoch.segments[place]
        key = self._key(segment, cursor.offset)
        if key in self._failed:
            cursor.asked = False
            return [Tell(connection, {"error": self._failed.pop(key).to_dict()})]
        part = self._parts.get(key)
        if part is None or not part.ready:
            return []
        part.holders.add(connection)
        cursor.held.add(key)
        cursor.asked, cursor.waiting, cursor.index = False, False, segment.padded_stop
        if cursor.offset != cursor.origin and epoch.end is not None:
            cursor.index = epoch.end.padded_stop  # padding read from the epoch's start: the next epoch comes after it
        return [HandOut(connection, key, segment, part.layout)]

    def _key(self, segment: Segment, offset: int) -> PartKey:
        return PartKey(segment.loader, segment.epoch, segment.n, self._ranks.lanes(offset))

    def _layout(self, key: PartKey, segment: Segment) -> PartLayout:
        if key not in self._layouts:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = lay_out(segment, key.lanes)
        return self._layouts[key]

    def _wanted(self, loader: str) -> dict[PartKey, Segment]:
        """Return the parts that this loader's iterators will take: what is waited for first, then the nearest."""
        stream = self._streams[loader]
        cursors = [one for one in self._cursors.values() if one.loader == loader and one.reads]
        cursors.sort(key=lambda one: not one.waiting)
        starts = dict.fromkeys(self._start(one) for one in cursors) or [(stream.next_pass, 0, 0)]
        walks = [self._walk(stream, *start) for start in starts]
        wanted: dict[PartKey, Segment] = {}
        for _ in range(_MAX_AHEAD):
            for walk in walks:
                found = next(walk, None)
                if found is not None:
                    wanted.setdefault(*found)
        return wanted

    def _start(self, cursor: _Cursor) -> tuple[int, int, int]:
        """Return where a cursor stands: epoch, the segment's place in it, offset."""
        epoch = self._streams[cursor.loader].epoch(cursor.epoch)
        place = epoch.place_of(cursor.index) if epoch else 0
        return cursor.epoch, len(epoch.segments) if epoch and place is None else place or 0, cursor.offset

    def _walk(self, stream: _Stream, number: int, place: int, offset: int) -> Iterator[tuple[PartKey, Segment]]:
        while (epoch := stream.epoch(number)) is not None:
            for at in range(place, len(epoch.segments)):
                yield self._key(epoch.segments[at], offset), epoch.segments[at]
            if epoch.end is None:
                return
            number, place, offset = number + 1, 0, 0

    def _urgent(self, loader: str) -> set[PartKey]:
        """Return the parts without which a rank cannot go on."""
        waiting = [one for one in self._cursors.values() if one.loader == loader and one.asked and one.waiting]
        heads = [next(self._walk(self._streams[loader], *self._start(one)), None) for one in waiting]
        return {head[0] for head in heads if head is not None}

    def _evict(self, loader: str, wanted: dict[PartKey, Segment]) -> list[Action]:
        """Drop what nobody holds and what is not among the nearest wanted parts that fit beside what is held."""
        own = {key: part for key, part in self._parts.items() if key.loader == loader}
        idle = [key for key, part in own.items() if part.ready and not part.holders]
        if not idle:
            return []
        used = sum(part.layout.num_bytes for part in own.values() if part.holders)
        keep = self._urgent(loader)
        for key, segment in wanted.items():
            if key in own and own[key].holders:
                continue
            used += self._layout(key, segment).num_bytes
            if used > self._budget:
                break
            keep.add(key)
        dropped = [key for key in idle if key not in keep]
        for key in dropped:
            del self._parts[key]
        return [Drop(key) for key in dropped]

    def _to_fetch(self, loader: str, wanted: dict[PartKey, Segment], *, room: int) -> list[Action]:
        if self._streams[loader].failure is not None:
            return []
        used = sum(part.layout.num_bytes for key, part in self._parts.items() if key.loader == loader)
        urgent = self._urgent(loader)
        fetches: list[Action] = []
        for key, segment in wanted.items():
            if key in self._parts or key in self._failed:
                continue
            layout = self._layout(key, segment)
            if len(fetches) >= room or (used + layout.num_bytes > self._budget and key not in urgent):
                break
            used += layout.num_bytes
            self._parts[key] = _Part(layout)
            fetches.append(Fetch(key, segment, layout))
        return fetches


def _ending(last: Segment) -> dict[str, int]:
    return {"epoch_length": last.stop, "padded_length": last.padded_stop}
