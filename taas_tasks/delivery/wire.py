"""Messages between the feeder and its ranks: JSON and open files, over a Unix socket that keeps message borders."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_MAX_MESSAGE = 1 << 16
_MAX_PATH = 107  # the kernel's limit for the path of a Unix socket, in bytes


def new_socket() -> socket.socket:
    """Return an unconnected socket of the kind that feeder and ranks use."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@contextmanager
def short_path(path: str) -> Iterator[str]:
    """Give a name of ``path`` that is short enough for a Unix socket, valid in this process inside the block."""
    if len(os.fsencode(path)) <= _MAX_PATH:
        yield path
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def send(connection: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    """Send one message, with open files (the receiver gets descriptors of its own)."""
    socket.send_fds(connection, [json.dumps(message, separators=(",", ":")).encode()], list(files))


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next message and its files; None when the other side is gone."""
    try:
        data, files, _, _ = socket.recv_fds(connection, _MAX_MESSAGE, 4, socket.MSG_CMSG_CLOEXEC)
    except (ConnectionResetError, BrokenPipeError):
        return None, []
    return (json.loads(data) if data else None), list(files)
