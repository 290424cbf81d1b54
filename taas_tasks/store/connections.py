"""Requests over kept-alive HTTP connections, pooled per endpoint."""

from __future__ import annotations

import http.client
import os
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

TROUBLE = (OSError, http.client.HTTPException)

_Idle = deque[tuple[tuple[str, str], http.client.HTTPConnection]]
Body = Sequence[bytes | memoryview]


@dataclass(frozen=True)
class Target:
    """A URL, cut as HTTP needs it."""

    scheme: str
    netloc: str
    path: str  # with the query

    @classmethod
    def of(cls, url: str) -> Target:
        """Return the parts of ``url``."""
        parts = urlsplit(url)
        return cls(parts.scheme, parts.netloc, f"{parts.path}?{parts.query}")

    @property
    def endpoint(self) -> tuple[str, str]:
        """What a connection is made to."""
        return self.scheme, self.netloc


@dataclass
class Exchange:
    """An answer whose body is still unread, and the connection that brings it."""

    target: Target
    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse


class Connections:
    """Sends requests that may be sent twice. Safe to use from several threads; a forked child opens its own."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._idle: _Idle = deque()
        weakref.finalize(self, _close_all, self._idle)

    def send(
        self, target: Target, headers: dict[str, str], *, method: str = "GET", body: Body | None = None
    ) -> Exchange:
        """Return the answer, its body unread; ``finish`` must follow. The parts of ``body`` are sent without a copy.

        Raises:
            OSError, http.client.HTTPException: no answer came (``TROUBLE``).
        """
        kept = self._take_idle(target)
        if kept is not None:
            try:
                return _exchange(kept, target, headers, method, body)
            except TROUBLE:
                kept.close()
        # Also when the server had closed an idle connection: that is no failure, and worth no waiting.
        return _exchange(self._connect(target), target, headers, method, body)

    def finish(self, exchange: Exchange) -> None:
        """Keep the connection when the body was read to its end; else close it, as what follows is unknown."""
        if exchange.response.isclosed() and exchange.connection.sock is not None and self._pid == os.getpid():
            self._idle.append((exchange.target.endpoint, exchange.connection))
        else:
            exchange.response.close()
            exchange.connection.close()

    def close(self) -> None:
        """Close the idle connections; the next request opens a new one."""
        _close_all(self._idle)

    def _take_idle(self, target: Target) -> http.client.HTTPConnection | None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._idle.clear()
        while self._idle:
            try:
                endpoint, connection = self._idle.pop()
            except IndexError:  # another thread took the last one
                return None
            if endpoint == target.endpoint:
                return connection
            connection.close()
        return None

    def _connect(self, target: Target) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if target.scheme == "https" else http.client.HTTPConnection
        return kind(target.netloc, timeout=self._timeout_s)


def _exchange(
    connection: http.client.HTTPConnection, target: Target, headers: dict[str, str], method: str, body: Body | None
) -> Exchange:
    if body is not None:
        headers = {**headers, "Content-Length": str(sum(memoryview(part).nbytes for part in body))}
    try:
        try:
            connection.request(method, target.path, body=body, headers=headers)
        except BrokenPipeError:
            if body is None:
                raise
            # The server has answered before it took the whole body, as when it refuses the signature.
        return Exchange(target, connection, connection.getresponse())
    except BaseException:
        connection.close()
        raise


def _close_all(idle: _Idle) -> None:
    while idle:
        idle.pop()[1].close()
