"""Free ports on the loopback interface, and who listens."""

from __future__ import annotations

import random
import socket

LOOPBACK = "127.0.0.1"
# Below Linux's range of ports for outgoing connections (32768 and up): none of those can take a port between our look
# and the server's start.
_FIRST, _LAST = 15000, 22000
_random = random.SystemRandom()  # processes that seed ``random`` alike must not look for the same ports


def is_free(port: int) -> bool:
    """Return whether a server could listen on the port now."""
    for address in (LOOPBACK, ""):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                return False
    return True


def free_port(*, taken: set[int], companion: int = 0) -> int:
    """Return a free port that is not in ``taken``, and add it; ``port + companion`` is free and added too.

    Raises:
        OSError: 1000 ports at random were all in use.
    """
    for _ in range(1000):
        port = _random.randint(_FIRST, _LAST)
        wanted = {port, port + companion}
        if not wanted & taken and all(is_free(each) for each in wanted):
            taken |= wanted
            return port
    raise OSError(f"no free port between {_FIRST} and {_LAST} on {LOOPBACK}: stop what listens there")


def is_listening(port: int, *, address: str = LOOPBACK) -> bool:
    """Return whether something accepts connections on the port."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((address, port)) == 0
