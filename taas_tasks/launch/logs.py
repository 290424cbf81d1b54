"""Shows the logs of a node's ranks as one stream, each line with its host and global rank, while they are written."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_CHUNK_BYTES = 1 << 20
_LONG_LINE_BYTES = 1 << 16
_UNFINISHED_S = 1.0


@dataclass
class _Tail:
    """What has been read of one log."""

    path: Path
    prefix: bytes
    offset: int = 0
    pending: bytes = b""
    pending_since: float = 0.0

    def read(self, now: float, *, final: bool) -> list[bytes]:
        """Return the lines that have become whole; a line that stays unfinished is shown as it is after a second."""
        data = self._new_bytes()
        if data and not self.pending:
            self.pending_since = now
        *whole, self.pending = (self.pending + data).split(b"\n")
        stale = now - self.pending_since > _UNFINISHED_S or len(self.pending) > _LONG_LINE_BYTES
        if self.pending and (final or stale):
            whole.append(self.pending)
            self.pending = b""
        return [self.prefix + _as_shown(line) + b"\n" for line in whole]

    def _new_bytes(self) -> bytes:
        try:
            with self.path.open("rb") as log:
                log.seek(self.offset)
                data = log.read(_CHUNK_BYTES)
        except FileNotFoundError:
            return b""
        self.offset += len(data)
        return data


def _as_shown(line: bytes) -> bytes:
    """Return what a terminal would show of a line that a progress bar has rewritten by carriage returns."""
    parts = [part for part in line.split(b"\r") if part]
    return parts[-1] if parts else b""


class LogMerger:
    """Follows the log files of all ranks of a node and writes their lines, prefixed, to one stream; rank 0 first.

    ``others``: logs of processes that are no ranks, by what they are.
    """

    def __init__(
        self,
        logs: Mapping[int, Path],
        *,
        host: str,
        out: BinaryIO,
        others: Mapping[str, Path] | None = None,
        period_s: float = 0.1,
    ) -> None:
        named = {**{f"r{rank}": logs[rank] for rank in sorted(logs)}, **(others or {})}
        self._tails = [_Tail(path, f"[{host} {name}] ".encode()) for name, path in named.items()]
        self._out = out
        self._period_s = period_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="taas-logs", daemon=True)

    def start(self) -> None:
        """Begin to follow; files that are not there yet are waited for."""
        self._thread.start()

    def stop(self) -> None:
        """Show what is left and end."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        while self._show(final=True):
            pass

    def _run(self) -> None:
        while not self._stopping.wait(self._period_s):
            self._show(final=False)

    def _show(self, *, final: bool) -> bool:
        now = time.monotonic()
        lines = [line for tail in self._tails for line in tail.read(now, final=final)]
        if lines:
            self._out.write(b"".join(lines))
            self._out.flush()
        return bool(lines)


def mark_restart(path: Path, *, rank: int, attempt: int) -> None:
    """Say in a rank's log, on a line of its own, that what follows is another attempt of the gang."""
    end = b"" if tail_of(path, num_bytes=1) in ("", "\n") else b"\n"
    with path.open("ab") as log:
        log.write(end + f"[taas] restart {attempt}: rank {rank} starts again\n".encode())


def tail_of(path: Path, *, num_bytes: int = 3000) -> str:
    """Return the end of a log as text; empty where there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - num_bytes))
            return log.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
