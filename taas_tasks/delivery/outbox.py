"""What the feeder has to tell a rank and cannot yet: the rank computes, and its end of the connection is full.

One thread serves all ranks of a host, so it must never wait for one of them: another rank, or another loader of the
same rank, would wait with it.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

from taas_tasks.delivery import wire


class Outbox:
    """Sends messages over one connection in order, without waiting. Keeps descriptors of its own of what waits."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._waiting: deque[tuple[dict[str, Any], list[int]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, message: dict[str, Any], files: Sequence[int]) -> None:
        """Send a message now, or as soon as there is room."""
        self._waiting.append((message, [os.dup(file) for file in files]))
        self.flush()

    def flush(self) -> None:
        """Send what there is room for. A connection that is gone takes everything: its other end hears of nothing."""
        while self._waiting:
            message, files = self._waiting[0]
            try:
                wire.send(self._connection, message, files)
            except OSError as error:
                # ETOOMANYREFS: more descriptors are on their way, unread, than this process may have open
                if isinstance(error, BlockingIOError) or error.errno in (errno.ETOOMANYREFS, errno.ENOBUFS):
                    return
                self.close()
                return
            self._waiting.popleft()
            _close(files)

    def close(self) -> None:
        """Forget what waits."""
        while self._waiting:
            _close(self._waiting.popleft()[1])


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)
