"""What the feeder decides: which parts to fetch, to keep, to hand out and to drop. No I/O, no clock.

The desk knows the committed segments, the open iterators of this host's ranks and the parts in the cache. ``decide``
returns what is to be done now. Its rules:

- A pass takes the parts of its epoch in order; of a merged loader those of each stream that the rank reads, in that
  stream's order. What an open iterator will need next is fetched ahead of it, nearest first whatever its stream, as far
  as the loader's budget reaches; after the epoch's end comes the next epoch.
- A part is kept while a rank holds it, or while an open iterator has still to take it and it fits the budget. Up to
  half of the budget keeps parts of epochs that some ranks have begun and others not yet. An iterator that comes later,
  or again, has what it needs fetched again.
- Who cannot go on without a part gets it even when the budget is used up by parts that other ranks hold, or that it
  holds itself of other streams. So no rank waits for another rank's progress, and two loaders, or one rank that
  iterates alone, cannot lock each other.
- Which lanes of a merged loader's part a host needs follows from what is known of the streams' ends. A part that was
  handed out before another stream ended may lack a lane; its rank asks again, and the part that it gets has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from taas.errors import DeliveryError, TaasError
from taas_tasks.delivery.catalogue import Catalogue
from taas_tasks.delivery.parts import PartKey, PartLayout, Ranks, Segment, lay_out
from taas_tasks.plan import epochs_of_plan
from taas_tasks.values import LoaderPlan

_MAX_LAYOUTS = 4096
_MAX_APART = 4  # epochs that ranks are apart, of those whose parts are kept for the last of them
_MAX_AHEAD = 32  # parts ahead of one iterator, so that a huge cache of tiny segments costs no more than it helps


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
    """Give a part to the rank behind a connection; ``message`` says in answer to what."""

    connection: int
    key: PartKey
    segment: Segment
    layout: PartLayout
    message: dict[str, Any]


@dataclass(frozen=True)
class Tell:
    """Answer a connection without a part."""

    connection: int
    message: dict[str, Any]


Action: TypeAlias = Fetch | Drop | HandOut | Tell
_Start: TypeAlias = tuple[int, tuple[tuple[int, int], ...], int]  # epoch, streams with places of segments, offset


@dataclass
class _Loader:
    """A loader as this host sees it."""

    catalogue: Catalogue
    tells_reach: bool  # the ranks do not know the epochs' lengths
    num_streams: int
    failure: TaasError | None = None
    next_pass: int = 0  # the epoch that the next pass is expected to read
    begun: dict[int, int] = field(default_factory=dict)  # how often an epoch was begun, of those begun last
    may_answer: bool = True  # something has happened since by which a question may be answered
    may_move: bool = True  # or by which a part may be fetched or dropped

    def begin(self, epoch: int) -> None:
        self.next_pass = epoch
        self.begun[epoch] = self.begun.pop(epoch, 0) + 1
        if len(self.begun) > _MAX_APART:
            del self.begun[next(iter(self.begun))]

    def is_begun_by_some(self, epoch: int, num_ranks: int) -> bool:
        """Whether some ranks have begun a pass of an epoch, perhaps not the first one, and others have not."""
        return self.begun.get(epoch, 0) % num_ranks != 0


@dataclass
class _Slot:
    """What an open iterator takes of one stream."""

    number: int  # of the question
    stream: int
    position: int  # the first that it has still to take
    offset: int
    asked: bool = True
    waiting: bool = False


@dataclass
class _Cursor:
    """An open iterator of a rank, and what it has asked for."""

    loader: str
    epoch: int
    offset: int
    index: int  # the first element of the epoch that it takes
    reads: bool = True
    reach: int | None = None  # a question: is this element there, or has the epoch ended before?
    slots: dict[int, _Slot] = field(default_factory=dict)  # by stream; behind the streams: padding read from the start
    held: set[PartKey] = field(default_factory=set)

    @property
    def waits(self) -> bool:
        return any(slot.waiting for slot in self.slots.values())


@dataclass
class _Part:
    layout: PartLayout
    ready: bool = False
    holders: set[int] = field(default_factory=set)


class Desk:
    """Keeps the state and decides. Not for several threads at once.

    Args:
        ranks: this host's.
        loaders: plans of the loaders to deliver, by name.
        cache_bytes: of this host, shared evenly among the loaders.
        host: for messages.
        max_fetches: at once.
    """

    def __init__(
        self, ranks: Ranks, loaders: Mapping[str, LoaderPlan], *, cache_bytes: int, host: str, max_fetches: int
    ) -> None:
        self._ranks = ranks
        self._loaders = {name: _new_loader(plan, ranks) for name, plan in loaders.items()}
        self._cache_bytes = cache_bytes
        self._budget = cache_bytes // max(1, len(self._loaders))
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
        """A segment was committed. Those of a stream come in its order."""
        loader = self._loaders[segment.loader]
        loader.may_answer = loader.may_move = True
        try:
            loader.catalogue.add(segment)
        except DeliveryError as error:
            loader.failure = loader.failure or error
        needed = lay_out(segment, loader.catalogue.part(segment, 0).lanes).num_bytes
        if needed > self._budget and loader.failure is None:
            loader.failure = DeliveryError(
                f"host {self._host} needs {needed} bytes of cache for its part of segment {segment.n} of epoch "
                f"{segment.epoch} of loader '{segment.loader}', and may use {self._budget} ({self._cache_bytes} bytes "
                f"for {len(self._loaders)} loader(s)); raise cache_gb in the request, or yield smaller elements",
                loader=segment.loader,
                needed_bytes=needed,
                budget_bytes=self._budget,
            )

    def fail_loader(self, loader: str, error: TaasError) -> None:
        """Nothing more can come of a loader: every question about it gets this error."""
        self._loaders[loader].failure = error
        self._loaders[loader].may_answer = True

    def open(
        self, connection: int, *, loader: str, epoch: int, offset: int, index: int, asks: Sequence[Sequence[int]] = ()
    ) -> None:
        """A rank began a pass; ``index`` is the first element that it takes, ``asks`` are its first questions."""
        self._cursors[connection] = _Cursor(loader, epoch, offset, index)
        known = self._loaders[loader]
        known.begin(epoch)
        known.may_move = True
        self.ask(connection, asks=asks)

    def knows(self, connection: int) -> bool:
        """Whether a connection has an open pass or question."""
        return connection in self._cursors

    def look(self, connection: int, *, loader: str, epoch: int) -> None:
        """A rank wants to ask about an epoch without reading it."""
        self._cursors[connection] = _Cursor(loader, epoch, 0, 0, reads=False)

    def ask(self, connection: int, *, asks: Sequence[Sequence[int]], leaves: Sequence[int] = ()) -> None:
        """A rank wants parts: (slot, number, stream, position, offset) of each, and no more of the slots it leaves.

        That is the part with an element of a stream, read as in a pass from ``offset`` on. It takes the place of what
        was asked for before in the same slot; ``number`` comes back with the answer.
        """
        cursor = self._cursors[connection]
        loader = self._loaders[cursor.loader]
        loader.may_answer, loader.may_move = True, loader.may_move or bool(leaves)
        for of_slot in leaves:
            cursor.slots.pop(of_slot, None)
        for of_slot, number, stream, position, offset in asks:
            slot = cursor.slots[of_slot] = _Slot(number, stream, position, offset)
            segment = loader.catalogue.find(cursor.epoch, slot.stream, slot.position)
            is_here = segment is not None and loader.catalogue.part(segment, slot.offset) in self._parts
            loader.may_move = loader.may_move or not is_here
        if self._failed:
            self._failed = {key: error for key, error in self._failed.items() if key.loader != cursor.loader}  # again

    def wait(self, connection: int, *, slot: int) -> None:
        """A rank cannot go on without what it asked for in a slot."""
        found = self._cursors[connection].slots.get(slot)
        if found is not None and found.asked:  # else the answer is on its way
            found.waiting = True
            self._loaders[self._cursors[connection].loader].may_move = True

    def ask_reach(self, connection: int, *, index: int) -> None:
        """A rank asks whether element ``index`` is committed, or where the epoch ended before it."""
        self._cursors[connection].reach = index
        self._loaders[self._cursors[connection].loader].may_answer = True

    def release(self, connection: int, *, epoch: int, stream: int, n: int, lanes: int) -> None:
        """A rank has gone past a part."""
        cursor = self._cursors[connection]
        key = PartKey(cursor.loader, epoch, stream, n, lanes)
        self._let_go(connection, key)
        cursor.held.discard(key)

    def close(self, connection: int, *, finished: bool = False) -> None:
        """A rank's iterator is gone; ``finished`` when its pass was complete."""
        cursor = self._cursors.pop(connection, None)
        if cursor is None:
            return
        for key in cursor.held:
            self._let_go(connection, key)
        self._loaders[cursor.loader].may_move = True
        if finished:
            self._loaders[cursor.loader].next_pass = cursor.epoch + 1

    def _let_go(self, connection: int, key: PartKey) -> None:
        part = self._parts.get(key)
        if part is not None:
            part.holders.discard(connection)
            if not part.holders:
                self._loaders[key.loader].may_move = True

    def fetched(self, key: PartKey) -> None:
        """A part is in the cache."""
        self._parts[key].ready = True
        self._has_come(key)

    def fetch_failed(self, key: PartKey, error: TaasError) -> None:
        """A part could not be brought."""
        self._parts.pop(key, None)
        self._failed[key] = error
        self._has_come(key)

    def _has_come(self, key: PartKey) -> None:
        self._loaders[key.loader].may_answer = True
        for loader in self._loaders.values():
            loader.may_move = True  # any of them may use the place among those that are fetched at once

    # --- what is to be done -----------------------------------------------------------------------------------------

    def decide(self) -> list[Action]:
        """Return what is to be done now, in this order."""
        actions: list[Action] = []
        for name, loader in self._loaders.items():
            if loader.may_answer:
                loader.may_answer = False
                for connection, cursor in self._cursors.items():
                    actions += self._answer(connection, cursor, loader) if cursor.loader == name else []
        for name, loader in self._loaders.items():
            if loader.may_move:
                loader.may_move = False
                actions += self._move(name)
        return actions

    def _move(self, loader: str) -> list[Action]:
        wanted = self._wanted(loader)
        drops = self._evict(loader, wanted)
        in_flight = sum(not part.ready for part in self._parts.values())
        return drops + self._to_fetch(loader, wanted, room=self._max_fetches - in_flight)

    def _answer(self, connection: int, cursor: _Cursor, loader: _Loader) -> list[Action]:
        asking = [slot for slot in cursor.slots.items() if slot[1].asked]
        if not asking and cursor.reach is None:
            return []
        if loader.failure is not None:
            cursor.reach = None
            cursor.slots.clear()
            return [Tell(connection, {"error": loader.failure.to_dict()})]
        actions = self._answer_reach(connection, cursor, loader)
        for number, slot in asking:
            actions += self._answer_ask(connection, cursor, number, slot)
        return actions

    def _answer_reach(self, connection: int, cursor: _Cursor, loader: _Loader) -> list[Action]:
        if cursor.reach is None:
            return []
        catalogue, epoch = loader.catalogue, cursor.epoch
        if catalogue.reach(epoch) > cursor.reach or catalogue.epoch_length(epoch):
            cursor.reach = None
            return [Tell(connection, catalogue.describe_reach(epoch))]
        if catalogue.num_epochs is not None and epoch >= catalogue.num_epochs:
            cursor.reach = None
            return [Tell(connection, {"num_epochs": catalogue.num_epochs})]
        return []

    def _answer_ask(self, connection: int, cursor: _Cursor, number: int, slot: _Slot) -> list[Action]:
        loader = self._loaders[cursor.loader]
        segment = loader.catalogue.find(cursor.epoch, slot.stream, slot.position)
        if segment is None:
            return []
        key = loader.catalogue.part(segment, slot.offset)
        if key in self._failed:
            slot.asked = False
            return [Tell(connection, {"error": self._failed.pop(key).to_dict()})]
        part = self._parts.get(key)
        if part is None or not part.ready:
            return []
        part.holders.add(connection)
        cursor.held.add(key)
        slot.asked, slot.waiting, slot.position = False, False, segment.padded_stop
        told = loader.catalogue.describe_reach(cursor.epoch) if loader.tells_reach else {}
        return [HandOut(connection, key, segment, part.layout, {"slot": number, "number": slot.number, **told})]

    def _layout(self, key: PartKey, segment: Segment) -> PartLayout:
        if key not in self._layouts:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = lay_out(segment, key.lanes)
        return self._layouts[key]

    def _wanted(self, loader: str) -> dict[PartKey, Segment]:
        """Return the parts that this loader's iterators will take: what is waited for first, then the nearest."""
        known = self._loaders[loader]
        cursors = [one for one in self._cursors.values() if one.loader == loader and one.reads]
        cursors.sort(key=lambda one: not one.waits)
        walks = [known.catalogue.walk(*start) for start in dict.fromkeys(self._start(one) for one in cursors)]
        wanted = self._asked(loader, urgent=True) | self._asked(loader, urgent=False)
        for _ in range(_MAX_AHEAD):
            for walk in walks:
                found = next(walk, None)
                if found is not None:
                    wanted.setdefault(*found)
        others_come = known.next_pass not in known.begun or known.is_begun_by_some(known.next_pass, self._ranks.count)
        if not walks or (known.num_streams > 1 and others_come):  # of other streams than those who are there
            streams = known.catalogue.positions_at(known.next_pass, 0)
            begin = known.catalogue.walk(known.next_pass, known.catalogue.places_of(known.next_pass, streams), 0)
            for key, segment in islice(begin, _MAX_AHEAD):
                wanted.setdefault(key, segment)
        return wanted

    def _start(self, cursor: _Cursor) -> _Start:
        """Return where a cursor stands in the streams that it reads.

        One that has not asked yet, as it does not know where its elements lie, is taken to read all streams.
        """
        known, epoch = self._loaders[cursor.loader], cursor.epoch
        positions = [(one.stream, one.position) for slot, one in cursor.slots.items() if slot < known.num_streams]
        if not cursor.slots:
            positions = known.catalogue.positions_at(epoch, cursor.index)
        return epoch, known.catalogue.places_of(epoch, positions), cursor.offset

    def _asked(self, loader: str, *, urgent: bool) -> dict[PartKey, Segment]:
        """Return the parts without which a rank cannot go on; or else those with padding that one has asked for."""
        known, found = self._loaders[loader], {}
        for cursor in self._cursors.values():
            for number, slot in cursor.slots.items() if cursor.loader == loader else ():
                if slot.asked and (slot.waiting if urgent else number >= known.num_streams):
                    segment = known.catalogue.find(cursor.epoch, slot.stream, slot.position)
                    if segment is not None:
                        found[known.catalogue.part(segment, slot.offset)] = segment
        return found

    def _evict(self, loader: str, wanted: dict[PartKey, Segment]) -> list[Action]:
        """Drop what nobody holds, is not among the nearest wanted parts that fit, and waits for no rank to begin."""
        known = self._loaders[loader]
        own = {key: part for key, part in self._parts.items() if key.loader == loader}
        idle = [key for key, part in own.items() if part.ready and not part.holders]
        if not idle:
            return []
        used = sum(part.layout.num_bytes for part in own.values() if part.holders)
        kept = self._kept_for_the_last(known, idle)
        used += sum(own[key].layout.num_bytes for key in kept)
        keep = set(self._asked(loader, urgent=True)) | kept
        for key, segment in wanted.items():
            if key in kept or (key in own and own[key].holders):
                continue
            used += self._layout(key, segment).num_bytes
            if used > self._budget:
                break
            keep.add(key)
        dropped = [key for key in idle if key not in keep]
        for key in dropped:
            del self._parts[key]
        return [Drop(key) for key in dropped]

    def _kept_for_the_last(self, loader: _Loader, idle: list[PartKey]) -> set[PartKey]:
        """Return the parts of epochs that some ranks have begun and others not yet, up to half of the budget.

        Such a rank has no iterator open, for a moment at an epoch's end. Half: perhaps it never begins one.
        """
        found, used = set(), 0
        for key in sorted(key for key in idle if loader.is_begun_by_some(key.epoch, self._ranks.count)):
            used += self._parts[key].layout.num_bytes
            if used <= self._budget // 2:
                found.add(key)
        return found

    def _to_fetch(self, loader: str, wanted: dict[PartKey, Segment], *, room: int) -> list[Action]:
        if self._loaders[loader].failure is not None:
            return []
        used = sum(part.layout.num_bytes for key, part in self._parts.items() if key.loader == loader)
        urgent = self._asked(loader, urgent=True)
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


def _new_loader(plan: LoaderPlan, ranks: Ranks) -> _Loader:
    tells_reach = epochs_of_plan(plan).num is None
    return _Loader(Catalogue(plan, ranks), tells_reach=tells_reach, num_streams=plan.num_streams)
