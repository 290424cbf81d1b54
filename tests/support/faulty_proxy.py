"""A TCP proxy before a server that fails as told: cuts answers, answers itself, or calls back."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cut:
    """Close the connection after so many bytes of the answer."""

    after_bytes: int


@dataclass(frozen=True)
class Answer:
    """Answer instead of the server."""

    status: int
    code: str


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
