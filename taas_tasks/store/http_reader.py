"""Reading objects by presigned URLs, straight into a given buffer.

boto3's ``Body.read`` copies every byte three times; ``http.client`` fills the given buffer from the socket: three times
the speed at half the CPU. A connection that is cut in mid-body is taken up where it stopped, and only of the same
version of the object (``If-Match``).
"""

from __future__ import annotations

import http.client
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from taas.errors import ObjectCorrupt, StoreError, StoreRefused, StoreUnavailable
from taas_tasks.store.answers import RETRIED_STATUS, Retries, code_of, error_for
from taas_tasks.store.base import UsePiece
from taas_tasks.store.connections import TROUBLE, Connections, Exchange, Target

_PIECE_BYTES = 4 << 20
_HOT_BYTES = 256 << 10

Take = Callable[[http.client.HTTPResponse, int], int]  # reads a body on from an offset, returns the bytes gained


class _SignedUrls:
    """The presigned URLs in use: signing costs more than a small request, and a shard is read in many ranges."""

    def __init__(self, sign: Callable[[str], str], *, keep_s: float = 600, keep: int = 1024) -> None:
        self._sign, self._keep_s, self._keep = sign, keep_s, keep
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Target, float]] = OrderedDict()

    def get(self, key: str) -> Target:
        with self._lock:
            found = self._known.get(key)
        if found is not None and time.monotonic() < found[1]:
            return found[0]
        target = Target.of(self._sign(key))
        with self._lock:
            self._known[key] = (target, time.monotonic() + self._keep_s)
            while len(self._known) > self._keep:
                self._known.popitem(last=False)
        return target

    def forget(self, key: str) -> None:
        with self._lock:
            self._known.pop(key, None)


@dataclass
class _Body:
    """A successful answer whose body is still unread."""

    exchange: Exchange
    num_bytes: int
    etag: str | None


class HttpReader:
    """Reads objects whose presigned URL ``sign(key)`` gives. Safe to use from several threads."""

    def __init__(self, sign: Callable[[str], str], *, retries: Retries, timeout_s: float = 60.0) -> None:
        self._urls = _SignedUrls(sign)
        self._retries = retries
        self._connections = Connections(timeout_s=timeout_s)

    def read_into(self, key: str, start: int, buffer: memoryview, use: UsePiece) -> None:
        """Fill the buffer with the bytes from ``start`` on, and call ``use(offset, piece)`` as they arrive.

        A piece is still in the processor's cache, so what ``use`` does with it is cheap.

        Raises:
            ObjectCorrupt: the object ends before, or was replaced while it was read.
            ObjectMissing, StoreRefused, StoreUnavailable: as ``ObjectStore`` says.
        """

        def fill(response: http.client.HTTPResponse, done: int) -> int:
            return _fill(response, buffer, done, use)

        self._read_range(key, start, len(buffer), fill, etag=None)

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop)."""
        parts: list[bytes] = []
        self._read_range(key, start, stop - start, lambda response, _: _each(response, parts.append), etag=None)
        return b"".join(parts)

    def read_whole(self, key: str) -> bytes:
        """Return the whole object."""
        parts: list[bytes] = []
        self._read_all(key, parts.append)
        return b"".join(parts)

    def copy_to(self, key: str, file: BinaryIO) -> None:
        """Write the whole object to ``file``, in pieces."""
        self._read_all(key, file.write)

    def _read_all(self, key: str, use: Callable[[bytes], object]) -> None:
        body = self._open(key, {})
        done = self._take(body, lambda response, _: _each(response, use), 0)
        rest = body.num_bytes - done
        self._read_range(key, done, rest, lambda response, _: _each(response, use), etag=body.etag)

    def _read_range(self, key: str, start: int, num_bytes: int, take: Take, *, etag: str | None) -> None:
        """Take [start, start + num_bytes) by as many requests as the connection's cuts need."""
        done, fruitless = 0, 0
        while done < num_bytes:
            body = self._open_range(key, start + done, start + num_bytes, etag)
            etag = body.etag
            gained = self._take(body, take, done)
            done += gained
            fruitless = 0 if gained else fruitless + 1
            if fruitless == self._retries.max_attempts:
                raise StoreUnavailable(f"reading {key!r} was cut {fruitless} times without a byte", key=key)
            if done < num_bytes:
                self._retries.wait(fruitless)

    def _take(self, body: _Body, take: Take, done: int) -> int:
        try:
            return take(body.exchange.response, done)
        finally:
            self._connections.finish(body.exchange)

    def _open_range(self, key: str, start: int, stop: int, etag: str | None) -> _Body:
        headers = {"Range": f"bytes={start}-{stop - 1}"} | ({"If-Match": etag} if etag else {})
        body = self._open(key, headers)
        problem = _range_problem(key, body, start, stop)
        if problem is not None:
            self._connections.finish(body.exchange)
            raise problem
        return body

    def _open(self, key: str, headers: dict[str, str]) -> _Body:
        """Return an answer with a body, after as many tries as allowed; a refused signature is made anew once."""
        signed_anew = False
        for attempt in range(1, self._retries.max_attempts + 1):
            answer = self._try(key, headers)
            if isinstance(answer, StoreRefused) and not signed_anew:
                # The credentials that signed the kept URL may have expired, and been refreshed, since.
                signed_anew = True
                self._urls.forget(key)
                answer = self._try(key, headers)
            if isinstance(answer, _Body):
                return answer
            if not isinstance(answer, StoreUnavailable) or attempt == self._retries.max_attempts:
                raise answer
            self._retries.wait(attempt)
        raise AssertionError("max_attempts is at least 1")

    def _try(self, key: str, headers: dict[str, str]) -> _Body | StoreError:
        target = self._urls.get(key)
        try:
            exchange = self._connections.send(target, {"Accept-Encoding": "identity", **headers})
        except TROUBLE as error:
            reason = f"{type(error).__name__}: {error}"
            return StoreUnavailable(f"{target.scheme}://{target.netloc} does not answer ({reason})", key=key)
        response = exchange.response
        if response.status in (200, 206) and response.length is not None:
            return _Body(exchange, response.length, response.getheader("ETag"))
        text = self._text(exchange)
        if response.status in RETRIED_STATUS:
            return StoreUnavailable(f"the store answered {response.status} {code_of(text)} for {key!r}", key=key)
        date = response.getheader("Date")
        return error_for(key, status=response.status, code=code_of(text), message=text, date=date)

    def _text(self, exchange: Exchange) -> str:
        try:
            return exchange.response.read().decode(errors="replace")
        except TROUBLE:
            return ""
        finally:
            self._connections.finish(exchange)

    def close(self) -> None:
        """Close the idle connections; the next read opens new ones."""
        self._connections.close()


def _range_problem(key: str, body: _Body, start: int, stop: int) -> StoreError | None:
    missing = (stop - start) - body.num_bytes
    if body.exchange.response.status == 206:
        message = f"object {key!r} ends {missing} bytes before byte {stop}"
        return ObjectCorrupt(message, key=key) if missing else None
    if body.num_bytes < stop:
        return ObjectCorrupt(f"object {key!r} ends at byte {body.num_bytes}; asked were {start} to {stop}", key=key)
    if missing:
        return StoreRefused("the store ignores the Range header; TaaS needs a store that obeys it", key=key)
    return None


def _fill(response: http.client.HTTPResponse, buffer: memoryview, start: int, use: UsePiece) -> int:
    """Read the body into the buffer from ``start`` on, until it ends; return the bytes read."""
    place = start
    while True:
        try:
            num_bytes = response.readinto(buffer[place : place + _HOT_BYTES])
        except TROUBLE:
            return place - start
        if not num_bytes:  # the body has ended, or the buffer
            return place - start
        use(place, buffer[place : place + num_bytes])
        place += num_bytes


def _each(response: http.client.HTTPResponse, use: Callable[[bytes], object]) -> int:
    """Give the body to ``use`` piece by piece until it ends; return the bytes read."""
    gained = 0
    while True:
        try:
            piece = response.read(_PIECE_BYTES)
        except TROUBLE:
            return gained
        if not piece:
            return gained
        use(piece)
        gained += len(piece)
