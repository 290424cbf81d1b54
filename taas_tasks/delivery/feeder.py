"""The feeder: one process per host that brings shards to it and hands them to its ranks.

    python -m taas_tasks.delivery.feeder INPUT.json

It follows the ledger, fetches this host's part of each segment into cache files and gives ranks, which connect over a
Unix socket, the open files. What to fetch, keep and drop is decided by ``desk``. It ends on SIGTERM, or when the
process that started it is gone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from taas.errors import DeliveryError, StoreUnavailable, TaasError
from taas_tasks.delivery import wire
from taas_tasks.delivery.cache import fetch_part
from taas_tasks.delivery.cache_files import CacheFile, CacheFiles, make_cache_folder
from taas_tasks.delivery.desk import Desk, Drop, Fetch, HandOut, Tell
from taas_tasks.delivery.outbox import Outbox
from taas_tasks.delivery.parts import PartKey, Ranks, Segment, describe_part
from taas_tasks.delivery.repair import LostSegment, RecordWatch, Repairs, RepairSetup
from taas_tasks.ledger_reader import LedgerReader
from taas_tasks.store import open_store
from taas_tasks.store.base import ObjectStore
from taas_tasks.values import LaunchPlan, StoreConfig, Value

_log = logging.getLogger(__name__)
_MAX_FETCHES = 4
_TICK_S = 0.5
_FIRST_POLL_S, _LAST_POLL_S = 0.05, 1.0
_ENOUGH_RECORDS = 256  # of a long ledger at once: ranks begin with the first while the rest is read


class FeederInput(Value):
    """The input file of the program. ``is_read_once``: it is removed when it was read, as it holds secrets."""

    store: StoreConfig
    launch_plan: LaunchPlan
    node_rank: int
    socket: str
    cache_dir: str
    stats_path: str
    host: str = ""
    repair: RepairSetup | None = None
    is_read_once: bool = False


class _Follower(threading.Thread):
    """Polls the ledgers of all loaders and reports new segments, why there can be no more, and lost records."""

    def __init__(
        self,
        store: ObjectStore,
        plan: LaunchPlan,
        report: Callable[[Segment | tuple[str, TaasError] | LostSegment], None],
        *,
        record_patience_s: float,
    ) -> None:
        super().__init__(name="ledger-follower", daemon=True)
        self._readers = {name: LedgerReader(store, plan.run, loader) for name, loader in plan.loaders.items()}
        self._num_streams = {name: loader.num_streams for name, loader in plan.loaders.items()}
        self._watches = {
            name: RecordWatch(store, plan.run, loader, patience_s=record_patience_s)
            for name, loader in plan.loaders.items()
        }
        self._report = report
        self._stopped = threading.Event()

    def run(self) -> None:
        """Poll at once, quickly while there is something new, at most once a second otherwise."""
        pause = 0.0
        while self._readers and not self._stopped.wait(pause):
            found = sum(self._poll(name, reader) for name, reader in list(self._readers.items()))
            pause = _FIRST_POLL_S if found else min(_LAST_POLL_S, max(_FIRST_POLL_S, pause * 1.5))

    def stop(self) -> None:
        """Make the thread end soon."""
        self._stopped.set()

    def _poll(self, name: str, reader: LedgerReader) -> int:
        try:
            records = reader.poll(enough=_ENOUGH_RECORDS)
            awaited = [LostSegment(name, *segment) for segment in reader.awaited]
            lost = self._watches[name].lost(found=len(records), awaited=awaited)
        except StoreUnavailable as error:
            _log.warning("the ledger of loader '%s' cannot be read now: %s", name, error)
            return 0
        except Exception as error:  # noqa: BLE001 (whatever it is, the ranks must hear of it and not wait for ever)
            del self._readers[name]
            message = f"the ledger of loader '{name}' cannot be followed: {error}"
            self._report((name, error if isinstance(error, TaasError) else DeliveryError(message, loader=name)))
            return 0
        for record in records:
            self._report(Segment.of(record, num_streams=self._num_streams[name]))
        for one in lost:
            self._report(one)
        if reader.is_complete:
            del self._readers[name]
        return len(records)


class _Stats:
    """What this host's feeder has brought, in a file that is replaced as a whole."""

    def __init__(self, path: Path, loaders: list[str]) -> None:
        self._path = path
        self._elements = dict.fromkeys(loaders, 0)
        self._bytes = dict.fromkeys(loaders, 0)
        self._seen: dict[tuple[str, int, int, int], int] = {}
        self._repairs: list[str] = []
        self._dirty = True
        self._trouble = ""
        self._next_at = 0.0

    def count(self, segment: Segment, lanes: int, num_bytes: int) -> None:
        """Count a part that was brought; elements that were there before are not counted again."""
        place = (segment.loader, segment.epoch, segment.stream, segment.n)
        new = lanes & ~self._seen.get(place, 0)
        self._seen[place] = self._seen.get(place, 0) | lanes
        self._elements[segment.loader] += segment.num_elements(new)
        self._bytes[segment.loader] += num_bytes
        self._dirty = True

    def note_repairs(self, notes: list[str]) -> None:
        """Tell what had to be prepared again."""
        self._repairs = notes
        self._dirty = True

    def write(self, *, at_once: bool = False) -> None:
        """Write the file, if something has changed, but not all the time.

        Later, if the disk is full: ranks are served all the same.
        """
        if not self._dirty or (time.monotonic() < self._next_at and not at_once):
            return
        self._next_at = time.monotonic() + _TICK_S
        try:
            self._write()
        except OSError as error:
            if str(error) != self._trouble:
                _log.warning("what was delivered cannot be noted: %s", error)
            self._trouble = str(error)

    def _write(self) -> None:
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        told = {"delivered": self._elements, "delivered_bytes": self._bytes, "repairs": self._repairs}
        temporary.write_text(json.dumps(told))
        temporary.replace(self._path)
        self._dirty = False


class Feeder:
    """Serves the ranks of one host until ``stop`` is called.

    Args:
        store: where the shards and the ledger are.
        plan: of the training.
        node_rank: this host's place in it.
        socket_path: where ranks connect.
        cache_dir: where the cache files are made.
        stats_path: where the counts are written.
        host: for messages.
        repairs: prepares lost segments again; without it they are lost for good.
        is_orphan: asked twice a second; true ends the feeder.
    """

    def __init__(
        self,
        store: ObjectStore,
        plan: LaunchPlan,
        *,
        node_rank: int,
        socket_path: str,
        cache_dir: Path,
        stats_path: Path,
        host: str,
        repairs: Repairs | None = None,
        is_orphan: Callable[[], bool] = lambda: False,
    ) -> None:
        ranks = Ranks(node_rank * plan.nproc_per_node, plan.nproc_per_node, plan.world_size)
        names = list(plan.loaders)
        self._desk = Desk(ranks, plan.loaders, cache_bytes=plan.cache_bytes, host=host, max_fetches=_MAX_FETCHES)
        self._store, self._host, self._is_orphan = store, host, is_orphan
        self._cache_files = CacheFiles(cache_dir, most_bytes=plan.cache_bytes)
        self._loaders = frozenset(names)
        self._repairs = repairs
        self._repairing: set[LostSegment] = set()
        self._socket_path = socket_path
        self._stats = _Stats(stats_path, names)
        self._files: dict[PartKey, CacheFile] = {}
        self._connections: dict[int, socket.socket] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._next_connection = 0
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._stopping = False
        self._closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._follower = _Follower(
            store,
            plan,
            lambda found: self._post(lambda: self._learn(found)),
            record_patience_s=repairs.record_patience_s if repairs is not None else math.inf,
        )
        self._fetchers = ThreadPoolExecutor(_MAX_FETCHES, thread_name_prefix="fetch")

    @property
    def cached_bytes(self) -> int:
        """Bytes of the cache files that the feeder holds open or fetches."""
        return self._desk.cached_bytes

    def stop(self) -> None:
        """Make ``serve`` end; safe from a signal handler and from other threads."""
        self._stopping = True
        self._wake()

    def serve(self) -> None:
        """Serve until ``stop`` is called or the feeder is an orphan, then leave nothing behind."""
        make_cache_folder(self._cache_files.folder)
        listener = self._listen()
        try:
            self._follower.start()
            while not self._stopping and not self._is_orphan():
                self._step(listener)
                self._stats.write()
        finally:
            self._close(listener)

    def _listen(self) -> socket.socket:
        Path(self._socket_path).unlink(missing_ok=True)  # left by a feeder that was killed
        listener = wire.new_socket()
        with wire.short_path(self._socket_path) as short:
            listener.bind(short)
        listener.listen(1024)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        return listener

    def _close(self, listener: socket.socket) -> None:
        self._closing.set()
        self._follower.stop()
        Path(self._socket_path).unlink(missing_ok=True)
        for outbox in self._outboxes.values():
            outbox.close()
        for connection in [listener, *self._connections.values()]:
            connection.close()
        if self._repairs is not None:
            self._repairs.close()
        self._fetchers.shutdown(wait=True, cancel_futures=True)
        self._follower.join(timeout=30)
        with contextlib.suppress(queue.Empty):
            while True:
                self._news.get_nowait()()
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._cache_files.close()
        self._stats.write(at_once=True)
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    # --- what comes in ----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: it has ended
            self._wake_out.send(b"x")

    def _post(self, news: Callable[[], None]) -> None:
        self._news.put(news)
        self._wake()

    def _step(self, listener: socket.socket) -> None:
        for key, events in self._selector.select(_TICK_S):
            if key.fileobj is listener:
                self._accept(listener)
            elif key.fileobj is self._wake_in:
                with contextlib.suppress(BlockingIOError):
                    self._wake_in.recv(4096)
            elif events & selectors.EVENT_READ:
                self._hear(key.data)
        with contextlib.suppress(queue.Empty):
            while True:
                self._news.get_nowait()()
        self._act()
        for number, outbox in self._outboxes.items():
            if outbox:
                outbox.flush()
                self._await_room(number)

    def _await_room(self, number: int) -> None:
        """Be woken when a connection that was full has room again."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outboxes[number] else 0)
        if self._selector.get_key(self._connections[number]).events != events:
            self._selector.modify(self._connections[number], events, number)

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        self._next_connection += 1
        self._connections[self._next_connection] = connection
        self._outboxes[self._next_connection] = Outbox(connection)
        self._selector.register(connection, selectors.EVENT_READ, self._next_connection)

    def _hear(self, number: int) -> None:
        try:
            message, _ = wire.receive(self._connections[number])
        except BlockingIOError:
            return
        if message is None:
            self._forget(number)
            return
        try:
            self._handle(number, message)
        except TaasError as error:
            self._tell(number, {"error": error.to_dict()})

    def _handle(self, number: int, message: dict[str, Any]) -> None:
        operation = message.pop("op")
        if operation in ("open", "look") and message["loader"] not in self._loaders:
            listed = ", ".join(sorted(self._loaders)) or "none"
            raise DeliveryError(f"this host's feeder delivers no loader '{message['loader']}'; it delivers: {listed}")
        if operation not in ("open", "look") and not self._desk.knows(number):
            return  # it was refused when it opened, and has been told
        handlers: dict[str, Callable[..., None]] = {
            "open": self._desk.open,
            "look": self._desk.look,
            "ask": self._desk.ask,
            "wait": self._desk.wait,
            "reach": self._desk.ask_reach,
            "release": self._desk.release,
            "close": self._desk.close,
        }
        handlers[operation](number, **message)

    def _forget(self, number: int) -> None:
        self._desk.close(number)
        self._outboxes.pop(number).close()
        connection = self._connections.pop(number)
        self._selector.unregister(connection)
        connection.close()

    def _learn(self, found: Segment | tuple[str, TaasError] | LostSegment) -> None:
        if isinstance(found, Segment):
            self._desk.add_segment(found)
        elif isinstance(found, LostSegment):
            if found not in self._repairing:  # it is told again and again while it is missing
                self._repairing.add(found)
                self._fetchers.submit(self._repair_record, found)
        else:
            self._desk.fail_loader(*found)

    # --- what goes out ----------------------------------------------------------------------------------------------

    def _act(self) -> None:
        for action in self._desk.decide():
            if isinstance(action, Fetch):
                self._fetchers.submit(self._fetch, action)
            elif isinstance(action, Drop):
                self._cache_files.give_back(self._files.pop(action.key))
            elif isinstance(action, Tell):
                self._tell(action.connection, action.message)
            else:
                self._hand_out(action)

    def _fetch(self, action: Fetch) -> None:
        """Runs in a thread of its own; what it found is told to the serving thread."""
        try:
            file = fetch_part(
                self._store,
                action.segment,
                action.key.lanes,
                action.layout,
                files=self._cache_files,
                host=self._host,
                repair=self._repair_part if self._repairs is not None else None,
                pause=self._pause,
            )
        except Exception as error:  # noqa: BLE001 (whatever it is, the ranks must hear of it)
            known = error if isinstance(error, TaasError) else DeliveryError(f"fetching {action.key} failed: {error!r}")
            self._post(lambda: self._desk.fetch_failed(action.key, known))
        else:
            self._post(lambda: self._fetched(action, file))

    def _pause(self, seconds: float) -> None:
        """Wait before the next try of a fetch; not for a store that is down when the feeder ends."""
        if self._closing.wait(seconds):
            raise DeliveryError(f"the feeder of host {self._host} ends")

    def _repair_record(self, lost: LostSegment) -> None:
        """Runs in a thread of its own, like ``_fetch``."""
        try:
            self._repair(lost, "its record is gone from the ledger, although the loader is prepared")
        except DeliveryError as error:
            failure = error
            self._post(lambda: self._desk.fail_loader(lost.loader, failure))
        self._post(lambda: self._repairing.discard(lost))

    def _repair_part(self, segment: Segment, why: str) -> None:
        self._repair(LostSegment(segment.loader, segment.epoch, segment.stream, segment.n), why)

    def _repair(self, lost: LostSegment, why: str) -> None:
        assert self._repairs is not None
        self._repairs.repair(lost, why)
        notes = self._repairs.notes
        self._post(lambda: self._stats.note_repairs(notes))

    def _fetched(self, action: Fetch, file: CacheFile) -> None:
        self._files[action.key] = file
        self._desk.fetched(action.key)
        self._stats.count(action.segment, action.key.lanes, action.layout.num_bytes)

    def _hand_out(self, action: HandOut) -> None:
        part = describe_part(action.segment, action.key.lanes, action.layout)
        with self._files[action.key].opened() as descriptor:
            self._tell(action.connection, {"part": part, **action.message}, descriptor)

    def _tell(self, number: int, message: dict[str, Any], *files: int) -> None:
        outbox = self._outboxes.get(number)
        if outbox is not None:
            outbox.send(message, files)
            self._await_room(number)


def _repairs(given: FeederInput, host: str) -> Repairs | None:
    if given.repair is None:
        return None
    return Repairs(given.repair, store=given.store, plan=given.launch_plan, node_rank=given.node_rank, host=host)


def main(argv: list[str]) -> int:
    """Run the program; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s feeder %(levelname)s %(message)s")
    given = FeederInput.model_validate_json(Path(argv[0]).read_bytes())
    if given.is_read_once:
        Path(argv[0]).unlink()
    parent = os.getppid()
    host = given.host or f"{socket.gethostname()} (node {given.node_rank})"
    feeder = Feeder(
        open_store(given.store),
        given.launch_plan,
        node_rank=given.node_rank,
        socket_path=given.socket,
        cache_dir=Path(given.cache_dir),
        stats_path=Path(given.stats_path),
        host=host,
        repairs=_repairs(given, host),
        is_orphan=lambda: os.getppid() != parent,
    )

    def leave(_: int, __: FrameType | None) -> None:
        feeder.stop()

    signal.signal(signal.SIGTERM, leave)
    started = time.monotonic()
    feeder.serve()
    _log.debug("the feeder ends after %.1f s", time.monotonic() - started)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
