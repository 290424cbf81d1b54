"""Does this host reach node 0, and by the address that the inventory gives it?"""

from __future__ import annotations

import socket


def source_address(to: str) -> str | None:
    """Return the address from which the kernel would send to ``to``, or None without a route. Sends nothing."""
    with socket.socket(_family(to), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((to, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def can_bind(address: str) -> bool:
    """Return whether this host has the address."""
    with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def route_findings(*, address: str, master: str, source: str | None) -> list[str]:
    """Return why ranks at ``address`` could not talk to ``master``, given the address the kernel sends from."""
    if source is None:
        return [f"there is no route from {address} to node 0 at {master}: mend the host's routes or the inventory"]
    same_machine = source == master or (_is_loopback(address) and _is_loopback(master))
    if source != address and not same_machine:
        text = f"the route to node 0 at {master} leaves from {source}, the inventory gives this host as {address}"
        return [f"{text}: name in the inventory the address that is on the route between the hosts"]
    return []


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def connect_findings(
    *, address: str, master: str, port: int, name: str = "node 0", timeout_s: float = 10.0
) -> list[str]:
    """Return why ``name``, at address ``master``, cannot be reached from here; one connection, bounded in time."""
    try:
        socket.create_connection((master, port), timeout=timeout_s, source_address=(address, 0)).close()
    except OSError as error:
        text = f"{address} cannot connect to {name} at {master} port {port} within {timeout_s:g} s ({error})"
        return [f"{text}: likely a firewall; allow all TCP ports between the hosts of a training"]
    return []
