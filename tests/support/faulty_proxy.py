"""Proxies before a server that fail as told: ``FaultyProxy`` per connection, ``RequestProxy`` per HTTP request."""

from __future__ import annotations

import http.client
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


@dataclass(frozen=True)
class Cut:
    """Close the connection after so many bytes of the answer."""

    after_bytes: int


@dataclass(frozen=True)
class Answer:
    """Answer instead of the server."""

    status: int
    code: str
    date: str | None = None


@dataclass(frozen=True)
class Call:
    """Do something before the request is passed on."""

    act: Callable[[], None]


Fault = Cut | Answer | Call | None


@dataclass
class FaultyProxy:
    """The next connection meets the first of ``faults``; with none left all is well, or ``always`` happens."""

    target_port: int
    faults: list[Fault] = field(default_factory=list)
    always: Fault = None
    num_connections: int = 0

    def __post_init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.getsockname()[1]}"

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.drop_connections()
        for thread in self._threads:
            thread.join(timeout=10)

    def drop_connections(self) -> None:
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                self.num_connections += 1
                fault = self.faults.pop(0) if self.faults else self.always
                thread = threading.Thread(target=self._serve, args=(client, fault))
                self._threads.append(thread)
                thread.start()

    def _serve(self, client: socket.socket, fault: Fault) -> None:
        self._open.append(client)
        with client, suppress(OSError):
            if isinstance(fault, Answer):
                self._answer(client, fault)
                return
            if isinstance(fault, Call):
                fault.act()
            with socket.create_connection(("127.0.0.1", self.target_port)) as server:
                self._open.append(server)
                back = threading.Thread(
                    target=_pump, args=(server, client, fault.after_bytes if isinstance(fault, Cut) else None)
                )
                back.start()
                _pump(client, server, None)
                back.join()

    def _answer(self, client: socket.socket, fault: Answer) -> None:
        request = client.recv(1 << 16)
        head, _, body = request.partition(b"\r\n\r\n")
        length = next(
            (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower()[:15] == b"content-length:"), 0
        )
        while len(body) < length:
            body += client.recv(1 << 16)
        text = f"<Error><Code>{fault.code}</Code></Error>".encode()
        client.sendall(
            b"HTTP/1.1 %d Fault\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (fault.status, len(text), text)
        )


def _pump(source: socket.socket, sink: socket.socket, limit: int | None) -> None:
    passed = 0
    with suppress(OSError):
        while data := source.recv(1 << 16):
            if limit is not None and passed + len(data) >= limit:
                sink.sendall(data[: limit - passed])
                break
            sink.sendall(data)
            passed += len(data)
    for end in (sink, source):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def faulty_proxy(target_port: int) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(target_port)
    try:
        yield proxy
    finally:
        proxy.close()


# --- faults per request ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A request as the proxy sees it: ``path`` with the query."""

    method: str
    path: str
    headers: dict[str, str]

    @property
    def access_key(self) -> str:
        """Whose signature it bears, in the header or in a presigned URL."""
        text = unquote(self.headers.get("authorization", "")) + unquote(self.path)
        found = re.search(r"Credential=([^/]+)/", text)
        return found.group(1) if found else ""


@dataclass(frozen=True)
class CutBody:
    """Close the connection after so many bytes of the answer's body."""

    after_bytes: int


@dataclass(frozen=True)
class FlipByte:
    """Change one byte of the answer's body."""

    at: int


@dataclass(frozen=True)
class Refuse:
    """Answer instead of the server; the request's body is read first."""

    status: int
    code: str
    date: str | None = None


@dataclass(frozen=True)
class LoseAnswer:
    """Let the server do it, then close the connection without an answer."""


@dataclass(frozen=True)
class Delay:
    """Pass the request on only after so many seconds."""

    seconds: float


@dataclass(frozen=True)
class CutUpload:
    """Pass on so many bytes of the request's body, then close both connections."""

    after_bytes: int


RequestFault = CutBody | FlipByte | Refuse | LoseAnswer | Delay | CutUpload


@dataclass
class Rule:
    """Requests that match meet a fault, ``times`` often (None: for ever), or that ``share`` of them."""

    fault: RequestFault
    method: str = ""
    key: str = ""  # a regular expression, searched in the path
    times: int | None = None
    share: float = 1.0
    seed: int = 0
    when: Callable[[Request], bool] = lambda _: True
    met: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def takes(self, request: Request) -> bool:
        if self.method not in ("", request.method) or not re.search(self.key, unquote(request.path)):
            return False
        if (self.times is not None and self.met >= self.times) or not self.when(request):
            return False
        if self.share < 1 and self._random.random() >= self.share:
            return False
        self.met += 1
        return True


class RequestProxy:
    """An HTTP proxy before a server; the first of ``rules`` that takes a request decides what becomes of it."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.rules: list[Rule] = []
        self.requests: list[Request] = []
        self.on_refusal: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, fault: RequestFault, **more: Any) -> Rule:
        rule = Rule(fault, **more)
        self.rules.append(rule)
        return rule

    def fault_for(self, request: Request) -> RequestFault | None:
        with self._lock:
            self.requests.append(request)
            return next((rule.fault for rule in self.rules if rule.takes(request)), None)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a client may keep its connection
    block_on_close = False
    request_queue_size = 128

    def __init__(self, proxy: RequestProxy) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.proxy = proxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is none of our business."""


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
        fault = self.server.proxy.fault_for(request)
        if isinstance(fault, Refuse):
            self.server.proxy.on_refusal()
            headers = [("Date", fault.date)] if fault.date else []
            return self._answer(fault.status, headers, f"<Error><Code>{fault.code}</Code></Error>".encode())
        if isinstance(fault, Delay):
            time.sleep(fault.seconds)
        if isinstance(fault, CutUpload):
            self._forward(body[: fault.after_bytes], is_whole=False)
            self.close_connection = True
            return None
        status, headers, data = self._forward(body)
        if isinstance(fault, LoseAnswer):
            self.close_connection = True
            return None
        if isinstance(fault, FlipByte) and fault.at < len(data):
            data = data[: fault.at] + bytes([data[fault.at] ^ 0x20]) + data[fault.at + 1 :]
        return self._answer(status, headers, data, cut=fault.after_bytes if isinstance(fault, CutBody) else None)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve  # noqa: N815 (the base class looks for these names)

    def _forward(self, body: bytes, *, is_whole: bool = True) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.proxy.target_port, timeout=60)
        with closing(connection):
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            if not is_whole:
                return 0, [], b""
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, *, cut: int | None = None) -> None:
        self.send_response_only(status)
        named = {name.lower() for name, _ in headers}
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        if "content-length" not in named and self.command != "HEAD":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else data[:cut])
        if cut is not None and cut < len(data):
            self.close_connection = True


@contextmanager
def request_proxy(target_port: int) -> Iterator[RequestProxy]:
    proxy = RequestProxy(target_port)
    try:
        yield proxy
    finally:
        proxy.close()
