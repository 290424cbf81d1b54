"""Hosts of the inventory as transports; those over SSH by Airflow's connections of type ssh.

A connection is read as the provider's ``SSHHook`` reads it (host, login, port; in the extra ``key_file`` or
``private_key``, ``private_key_passphrase``, ``host_key``), but for what would weaken the check of the host's key, which
is refused, and passwords, agents, ``~/.ssh`` and proxies, which are never used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from taas.errors import HostRefused, HostUnreachable
from taas_tasks.compute.inventory import Host
from taas_tasks.compute.local import LocalTransport
from taas_tasks.compute.ssh import SshAddress, SshTransport
from taas_tasks.compute.ssh_connections import private_key
from taas_tasks.compute.ssh_keys import read_host_key
from taas_tasks.compute.transport import Transport

_WEAKENING = ("no_host_key_check", "ignore_hostkey_verification", "allow_host_key_change")


class SshConnectionLike(Protocol):
    """What is used of an Airflow connection."""

    conn_type: str | None
    host: str | None
    login: str | None
    port: int | None

    @property
    def extra_dejson(self) -> dict[str, Any]:
        """The extra as a dict."""


ReadConnection = Callable[[str], SshConnectionLike]


def read_connection(connection_id: str) -> SshConnectionLike:
    """Read a connection of Airflow's. Blocks: from tasks and threads only.

    Raises:
        HostRefused: there is none.
        HostUnreachable: Airflow could not say.
    """
    from airflow.sdk import Connection
    from airflow.sdk.exceptions import AirflowNotFoundException, AirflowRuntimeError

    try:
        found: SshConnectionLike = Connection.get(connection_id)
    except AirflowNotFoundException as error:
        raise HostRefused(
            f"Airflow has no connection {connection_id!r}, which the inventory names; add it, with type ssh"
        ) from error
    except AirflowRuntimeError as error:
        raise HostUnreachable(f"Airflow did not give connection {connection_id!r}: {error}") from error
    return found


def open_host(host: Host, *, read: ReadConnection = read_connection) -> Transport:
    """Return the transport that reaches a host; nothing is read or contacted before the first call."""
    if host.transport == "local":
        return LocalTransport(Path(host.root), python=host.python)
    return ConnectedHost(host, read=read)


class OpenHosts:
    """Opens each host once, for who asks for the same hosts again and again; one that has changed is opened anew."""

    def __init__(self, *, open_one: Callable[[Host], Transport] = open_host) -> None:
        self._open_one = open_one
        self._opened: dict[str, tuple[Host, Transport]] = {}

    def of(self, hosts: Iterable[Host]) -> dict[str, Transport]:
        """Return the transports of hosts by their names."""
        return {host.name: self._one(host) for host in hosts}

    def _one(self, host: Host) -> Transport:
        known = self._opened.get(host.name)
        if known is None or known[0] != host:
            known = self._opened[host.name] = host, self._open_one(host)
        return known[1]


class ConnectedHost:
    """A host over SSH. Its connection is read at the first call, and again after a call that failed."""

    def __init__(self, host: Host, *, read: ReadConnection) -> None:
        self._host = host
        self._read = read
        self._lock = threading.Lock()
        self._opened: SshTransport | None = None

    def call(self, verb: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Run ``verb`` (see ``Transport.call``)."""
        with self._lock:
            opened = self._opened = self._opened or self._open()
        try:
            return opened.call(verb, payload)
        except (HostUnreachable, HostRefused) as error:
            self._opened = None
            fields = {**error.fields, "host": self._host.name}
            raise type(error)(f"host {self._host.name}: {error.message}", **fields) from error

    def _open(self) -> SshTransport:
        address = ssh_address(str(self._host.connection_id), self._read(str(self._host.connection_id)))
        return SshTransport(address, Path(self._host.root), python=self._host.python)


def ssh_address(connection_id: str, connection: SshConnectionLike) -> SshAddress:
    """Return where a connection leads and how one logs in.

    Raises:
        HostRefused: every fault of the connection at once.
    """
    extra = connection.extra_dejson
    faults = [
        *([f"its type is {connection.conn_type!r}, not 'ssh'"] if connection.conn_type != "ssh" else []),
        *(f"it has no {name}" for name in ("host", "login") if not getattr(connection, name)),
        *_faults_of_our_key(extra),
        *_faults_of_host_key(extra),
    ]
    if faults:
        scan = f"ssh-keyscan -t ed25519 -p {connection.port or 22} {connection.host or 'HOST'} | cut -d' ' -f2-"
        raise HostRefused(
            f"connection {connection_id!r} cannot be used: {'; '.join(faults)}. It needs host, login, and in its extra "
            f"key_file or private_key, and host_key: what `{scan}` prints, once compared with the machine's own word "
            "(ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub)",
            connection_id=connection_id,
            faults=faults,
        )
    return SshAddress(
        connection_id=connection_id,
        host=str(connection.host),
        port=connection.port or 22,
        user=str(connection.login),
        private_key=extra.get("private_key") or None,
        key_file=extra.get("key_file") or None,
        passphrase=extra.get("private_key_passphrase") or None,
        host_key=str(extra["host_key"]),
    )


def _faults_of_our_key(extra: dict[str, Any]) -> list[str]:
    given = [name for name in ("key_file", "private_key") if extra.get(name)]
    if len(given) == 1:
        return []
    return ["its extra has both key_file and private_key" if given else "its extra has no key (passwords are not used)"]


def _faults_of_host_key(extra: dict[str, Any]) -> list[str]:
    faults = [
        f"its extra says {name}: the host's key is always checked; remove it"
        for name in _WEAKENING
        if str(extra.get(name, False)).lower() == "true"
    ]
    if not extra.get("host_key"):
        return [*faults, "its extra pins no host_key"]
    try:
        read_host_key(str(extra["host_key"]))
    except ValueError as error:
        return [*faults, f"host_key: {error}"]
    return faults


def check_connections(hosts: Iterable[Host], *, read: ReadConnection = read_connection) -> None:
    """Refuse connections that cannot be used; no host is contacted.

    Raises:
        HostRefused: every fault of every host's connection at once.
    """
    faults = []
    for host in hosts:
        if host.transport != "ssh":
            continue
        try:
            private_key(ssh_address(str(host.connection_id), read(str(host.connection_id))))
        except HostRefused as error:
            faults.append(f"host {host.name}: {error.message}")
    if faults:
        raise HostRefused("\n".join(faults), faults=faults)
