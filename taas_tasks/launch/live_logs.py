"""Puts what the ranks of a node write into the store while they run, as numbered pieces (``taas_tasks.rank_logs``).

One object holds what all ranks of the node have written since the one before; nothing new costs nothing. Pieces come
every 2 s at first, more seldom the longer the training runs (every 15 s after 15 minutes), and may hold less the more
there is already: a flood is left out in its middle, the whole log of each rank is put at the end. A store that is down
delays a piece, which is put again as it was; the ranks never wait for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from taas.errors import StoreError
from taas_tasks.layout import RunKeys
from taas_tasks.rank_logs import Part, Slice, pack, whole_characters
from taas_tasks.store.base import ObjectStore

_log = logging.getLogger(__name__)

_FIRST_INTERVAL_S = 2.0
_LAST_INTERVAL_S = 15.0
_AGE_PER_INTERVAL = 60.0
_PIECE_BYTES = 1 << 20
_SMALL_PIECE_BYTES = 64 << 10
_MUCH_BYTES = 256 << 20
_MAX_SHARES_BEHIND = 8
_UNFINISHED_S = 3.0
_END_S = 10.0


def interval_s(age_s: float) -> float:
    """Return how long to wait for the next piece when the logs are ``age_s`` old."""
    return min(max(_FIRST_INTERVAL_S, age_s / _AGE_PER_INTERVAL), _LAST_INTERVAL_S)


def piece_bytes(total_bytes: int) -> int:
    """Return how much the next piece may hold, when so much has been put: towards 256 MiB less and less."""
    return min(max(_SMALL_PIECE_BYTES, (_MUCH_BYTES - total_bytes) // 64), _PIECE_BYTES)


@dataclass
class _Tail:
    """What has been taken of one rank's log."""

    rank: int
    path: Path
    offset: int = 0
    pending_since: float | None = None

    def take(self, limit: int, *, now: float, final: bool) -> Part | None:
        """Return what is new: whole lines, and what has waited for its end for 3 s; at most ``limit`` bytes."""
        start, data, size = self._read(limit)
        if not data:
            return None
        unfinished = self.pending_since is not None and now - self.pending_since >= _UNFINISHED_S
        end = data.rfind(b"\n") + 1
        if final or (not end and (unfinished or len(data) == limit)):
            end = len(data) if start + len(data) == size and final else whole_characters(data)
        if not end:
            self.pending_since = now if self.pending_since is None else self.pending_since
            return None
        left_out, self.offset = start - self.offset, start + end
        self.pending_since = now if self.offset < size else None
        return Slice(rank=self.rank, num_bytes=end, left_out_bytes=left_out), data[:end]

    def _read(self, limit: int) -> tuple[int, bytes, int]:
        """Return where the new bytes start, the bytes, and the size of the log; of a flood, only its end."""
        try:
            with self.path.open("rb") as log:
                size = log.seek(0, 2)
                start = self.offset if size - self.offset <= _MAX_SHARES_BEHIND * limit else size - limit
                log.seek(start)
                data = log.read(min(limit, size - start))
        except FileNotFoundError:
            return self.offset, b"", self.offset
        cut = _begin(data) if start > self.offset else 0
        return start + cut, data[cut:], size


def _begin(data: bytes) -> int:
    """Return where, in bytes from the middle of a log, the first line begins, or at least the first character."""
    continued = len(data) - len(data.lstrip(bytes(range(0x80, 0xC0))))
    return data.find(b"\n") + 1 or min(3, continued)


class LiveLogs:
    """A thread that puts pieces. ``stop`` puts what is left, for at most 20 s."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        run: str,
        generation: int,
        node_rank: int,
        host: str,
        logs: Mapping[int, Path],
        clock: Callable[[], float] = time.monotonic,
        period_s: float = 1.0,
    ) -> None:
        self._store = store
        self._keys = RunKeys(run)
        self._generation = generation
        self._node_rank = node_rank
        self._host = host
        self._tails = [_Tail(rank, path) for rank, path in sorted(logs.items())]
        self._clock = clock
        self._period_s = period_s
        self._began = clock()
        self._due = self._began
        self._number = 0
        self._total_bytes = 0
        self._waiting: bytes | None = None
        self._is_failing = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="taas-live-logs", daemon=True)

    def start(self) -> None:
        """Begin; files that are not there yet are waited for."""
        self._thread.start()

    def stop(self) -> None:
        """Put what is left and end. A store that does not answer is left alone: the whole logs follow."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_END_S)
        give_up = self._clock() + _END_S
        while not self._thread.is_alive() and self._clock() < give_up and self._try_to_put(final=True):
            pass

    def put_new(self, *, final: bool = False) -> bool:
        """Put a piece if it is time and there is something new; True when one was put."""
        now = self._clock()
        if self._waiting is None:
            if now < self._due and not final:
                return False
            self._waiting = self._next_piece(now, final=final)
        if self._waiting is None:
            return False
        # The same bytes until it worked: a reader may have seen a piece whose answer was lost.
        self._store.put(self._keys.log_piece(self._generation, self._node_rank, self._number + 1), self._waiting)
        self._number += 1
        self._total_bytes += len(self._waiting)
        self._waiting = None
        self._due = now + interval_s(now - self._began)
        return True

    def _next_piece(self, now: float, *, final: bool) -> bytes | None:
        share = piece_bytes(self._total_bytes) // len(self._tails)
        taken = [tail.take(share, now=now, final=final) for tail in self._tails]
        parts = [part for part in taken if part is not None]
        return pack(self._host, parts) if parts else None

    def _run(self) -> None:
        while not self._stopping.wait(self._period_s):
            self._try_to_put(final=False)

    def _try_to_put(self, *, final: bool) -> bool:
        try:
            was_put = self.put_new(final=final)
        except (StoreError, OSError) as error:
            if not self._is_failing:
                _log.warning("logs cannot be read while the ranks run, for now: %s", error)
            self._is_failing = True
            return False
        self._is_failing = False
        return was_put
