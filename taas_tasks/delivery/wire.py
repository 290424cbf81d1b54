"""Messages between the feeder and its ranks: JSON and open files, over a Unix socket that keeps message borders."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from taas.errors import DeliveryError

_MAX_MESSAGE = 1 << 16
_MAX_PATH = 107  # the kernel's limit for the path of a Unix socket


def new_socket() -> socket.socket:
    """Return an unconnected socket of the kind that feeder and ranks use."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def check_path(path: str) -> str:
    """Return ``path``, which must be short enough for a Unix socket.

    Raises:
        DeliveryError: it is too long.
    """
    if len(os.fsencode(path)) > _MAX_PATH:
        raise DeliveryError(
            f"the feeder's socket has a path of {len(os.fsencode(path))} bytes ({path}); allowed are {_MAX_PATH}: "
            "use a folder nearer to the root"
        )
    return path


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
