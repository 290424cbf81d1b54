"""Watches the run from one node: heartbeats, failures of other nodes, the run's abort object, who has ended.

All of it is read by one listing of the object store every two seconds, so it works whichever host is gone, also when a
network goes silent. Times are counted by this host alone: clocks of hosts are never compared.

A heartbeat's object says how still the node's ranks are. Only a node whose own ranks are still reads those of the
others; when all have been still together for two heartbeats it puts the attempt's hang object, and every node that
lists it asks its ranks for their stacks.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from taas.errors import ObjectMissing, StoreError
from taas_tasks.launch.hang import NodeStillness, is_hang
from taas_tasks.layout import RunKeys
from taas_tasks.store.base import ObjectStore

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StopReason:
    """Why this node must stop though its own ranks are fine. ``kind``: "failed", "lost", "aborted"."""

    kind: str
    message: str
    node_rank: int | None = None


@dataclass
class Staleness:
    """How long each node's heartbeat has not changed, counted over successful looks only: an outage of the store
    itself makes nobody stale."""

    lost_after_s: float
    _seen: dict[int, float] = field(default_factory=dict)
    _still_s: dict[int, float] = field(default_factory=dict)

    def look(self, beats: dict[int, float], *, elapsed_s: float) -> list[int]:
        """Take what a look found (node -> modified at) and return the nodes that count as lost."""
        for node_rank, modified_at in beats.items():
            same = self._seen.get(node_rank) == modified_at
            self._still_s[node_rank] = self._still_s.get(node_rank, 0.0) + elapsed_s if same else 0.0
            self._seen[node_rank] = modified_at
        return [node_rank for node_rank, still_s in self._still_s.items() if still_s > self.lost_after_s]


class Watch:
    """A thread that beats and looks. Does not act: the agent asks ``stop_reason``."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        run: str,
        generation: int,
        node_rank: int,
        nnodes: int,
        host: str,
        period_s: float = 2.0,
        beat_s: float = 5.0,
        lost_after_s: float = 40.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._keys = RunKeys(run)
        self._generation = generation
        self._node_rank = node_rank
        self._nnodes = nnodes
        self._host = host
        self._period_s = period_s
        self._beat_s = beat_s
        self._clock = clock
        self._staleness = Staleness(lost_after_s)
        self._last_look: float | None = None
        self._last_beat: float | None = None
        self._reason: StopReason | None = None
        self._on_stop: Callable[[], None] | None = None
        self._done: set[tuple[int, int]] = set()
        self._hurry_until = 0.0
        self._look_at_ranks: Callable[[], NodeStillness | None] = lambda: None
        self._still_since: float | None = None
        self._hung: set[int] = set()
        self._stacks: set[tuple[int, int]] = set()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="taas-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def stop_reason(self) -> StopReason | None:
        """Return why this node must stop, as far as the last look has told."""
        return self._reason

    def call_on_stop(self, act: Callable[[], None]) -> None:
        """Have ``act`` called, in the watch's thread, when a reason to stop appears: it frees an agent that waits."""
        self._on_stop = act

    def watch_ranks(self, look: Callable[[], NodeStillness | None]) -> None:
        """Have ``look`` tell how still this node's ranks are; None while there is nothing to judge."""
        self._look_at_ranks = look

    def has_hung(self, attempt: int) -> bool:
        """Return whether the gang was found to hang in this attempt."""
        return attempt in self._hung

    def mark_stacks(self, attempt: int) -> None:
        """Tell the others that this node has its ranks' stacks, and look often for theirs."""
        try:
            self._store.put(self._keys.watch_stacks(self._generation, self._node_rank, attempt), b"")
        except StoreError as error:
            _log.warning("could not tell the other nodes that the stacks are taken: %s", error)
        self._hurry_until = self._clock() + 10
        self._wake.set()

    def all_have_stacks(self, attempt: int) -> bool:
        """Return whether every node has taken its ranks' stacks."""
        return all((node_rank, attempt) in self._stacks for node_rank in range(self._nnodes))

    def mark_failed(self, reason: str) -> None:
        """Tell the other nodes that this one has failed for good. A store that is down is no reason to raise here."""
        body = json.dumps({"host": self._host, "reason": reason}).encode()
        try:
            self._store.put(self._keys.watch_failed(self._generation, self._node_rank), body)
        except StoreError as error:
            _log.warning("could not tell the other nodes of the failure: %s", error)

    def mark_done(self, attempt: int) -> None:
        """Tell the others that all ranks here have ended well, and look often for a while: they soon do too."""
        self._store.put(self._keys.watch_done(self._generation, self._node_rank, attempt), b"")
        self._hurry_until = self._clock() + 10
        self._wake.set()

    def all_done(self, attempt: int) -> bool:
        """Return whether every node has marked the attempt as done."""
        return all((node_rank, attempt) in self._done for node_rank in range(self._nnodes))

    def look(self) -> None:
        """Beat if it is time, list once, and conclude."""
        now = self._clock()
        own = self._look_at_ranks()
        if self._last_beat is None or now - self._last_beat >= self._beat_s:
            body = own.to_bytes() if own is not None else b""
            self._store.put(self._keys.watch_beat(self._generation, self._node_rank), body)
            self._last_beat = now
        prefix = self._keys.watch(self._generation)
        found = {info.key.removeprefix(prefix): info.modified_at for info in self._store.list(prefix)}
        self._done = {(int(part[1]), int(part[2])) for part in map(_parts, found) if part[0] == "done"}
        self._hung = {int(part[1]) for part in map(_parts, found) if part[0] == "hang"}
        self._judge(own, now)
        self._stacks = {(int(part[1]), int(part[2])) for part in map(_parts, found) if part[0] == "stacks"}
        beats = {int(part[1]): found["-".join(part)] for part in map(_parts, found) if part[0] == "beat"}
        elapsed_s = 0.0 if self._last_look is None else min(now - self._last_look, 2 * self._period_s)
        self._last_look = now
        lost = self._staleness.look(beats, elapsed_s=elapsed_s)
        self._reason = self._reason or self._conclude(sorted(found), lost)
        if self._reason is not None and self._on_stop is not None:
            act, self._on_stop = self._on_stop, None
            act()

    def _judge(self, own: NodeStillness | None, now: float) -> None:
        """Put the attempt's hang object when all nodes have been still together for long enough to know."""
        if own is None or not own.still or own.attempt in self._hung:
            self._still_since = None
            return
        others = [node_rank for node_rank in range(self._nnodes) if node_rank != self._node_rank]
        if not is_hang([own, *map(self._stillness_of, others)]):
            self._still_since = None
            return
        self._still_since = now if self._still_since is None else self._still_since
        # What the others say is as old as their last beat: one of them may have gone on meanwhile.
        if not others or now - self._still_since >= 2 * self._beat_s:
            body = json.dumps({"host": self._host, "idle_s": own.idle_s}).encode()
            self._store.put_if_absent(self._keys.watch_hang(self._generation, own.attempt), body)
            self._hung = self._hung | {own.attempt}

    def _stillness_of(self, node_rank: int) -> NodeStillness | None:
        try:
            said = self._store.get(self._keys.watch_beat(self._generation, node_rank))
        except ObjectMissing:
            return None
        return NodeStillness.model_validate_json(said) if said else None

    def _conclude(self, names: list[str], lost: list[int]) -> StopReason | None:
        failed = [int(part[1]) for part in map(_parts, names) if part[0] == "failed"]
        for node_rank in failed:
            if node_rank != self._node_rank:
                said = json.loads(self._store.get(self._keys.watch_failed(self._generation, node_rank)))
                return StopReason("failed", f"node {node_rank} on {said['host']} failed: {said['reason']}", node_rank)
        if self._store.head(self._keys.abort) is not None:
            why = self._store.get(self._keys.abort).decode(errors="replace")
            return StopReason("aborted", f"the run was aborted: {why}")
        for node_rank in lost:
            if node_rank != self._node_rank and not any(done == node_rank for done, _ in self._done):
                return StopReason("lost", f"node {node_rank} gives no sign of life", node_rank)
        return None

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.look()
            except StoreError as error:
                _log.warning("could not look at the run's state: %s", error)
            hurried = self._clock() < self._hurry_until
            self._wake.wait(0.2 if hurried else self._period_s)
            self._wake.clear()


def _parts(name: str) -> list[str]:
    return name.split("-")
