"""Logins to hosts: one for each address and process, shared by its threads, kept alive, replaced when it has died.

What is never done: ask anybody, use an agent or the keys of ``~/.ssh``, believe a host key that is not pinned. A
process that forks leaves the connections to its parent. Every wait has an end (``Patience``).
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from taas.errors import HostRefused, HostUnreachable, LaunchError
from taas_tasks.compute.ssh_keys import fingerprint, in_order_of, key_type, read_host_key
from taas_tasks.values import Value

if TYPE_CHECKING:
    import paramiko

_PARAMIKO_LOG = "taas_tasks.compute.ssh_connections.paramiko"
_KEEPALIVE_S = 10
_UNANSWERED_MS = 20_000
_MAX_CHANNELS = 8  # sshd's MaxSessions is 10
_MAX_OUTPUT_BYTES = 16 * 1024 * 1024
_PIECE_BYTES = 64 * 1024


class SshAddress(Value):
    """Where a host is and how one logs in there; the two keys (ours, the host's) are all that is trusted.

    Attributes:
        connection_id: The Airflow connection that says all this, for messages.
        private_key: The text of our key; or
        key_file: its path on this machine.
        passphrase: Of our key, if it has one.
        host_key: The host's key, ``TYPE BASE64``.
    """

    connection_id: str
    host: str
    port: int = 22
    user: str
    private_key: str | None = Field(default=None, repr=False)
    key_file: str | None = None
    passphrase: str | None = Field(default=None, repr=False)
    host_key: str

    @property
    def place(self) -> str:
        """The host as messages name it."""
        return f"{self.user}@{self.host}:{self.port} (connection {self.connection_id!r})"

    @property
    def keyscan(self) -> str:
        """What an operator runs to see the host's key."""
        return f"ssh-keyscan -t ed25519 -p {self.port} {self.host}"


@dataclass(frozen=True)
class Patience:
    """How long we wait: to be connected, to be logged in, for a command to start on a connection, and to end."""

    connect_s: float = 10
    login_s: float = 20
    open_s: float = 10
    call_s: float = 60


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class ConnectionDied(Exception):
    """The connection broke, or does not take commands any more: another one may."""


class _Dropped(Exception):
    """The host hung up before it had looked at our key: it has too many logins at once (MaxStartups), or restarts."""


# ---- a connection ----


class Connection:
    """One login and the commands that run through it, several at once."""

    def __init__(self, transport: paramiko.Transport, patience: Patience) -> None:
        self._transport = transport
        self._patience = patience
        self._places = threading.BoundedSemaphore(_MAX_CHANNELS)

    @property
    def lives(self) -> bool:
        """Whether it has not been seen to break."""
        return bool(self._transport.is_active())

    def close(self) -> None:
        """Hang up; commands that run end with ``ConnectionDied``."""
        self._transport.close()

    def abandon(self) -> None:
        """Leave the connection to the process that made it: we are its child and have a copy of the socket only."""
        self._transport.active = False
        self._transport.sock.close()

    def run(self, command: str, data: bytes) -> Done:
        """Run a command with ``data`` as its input to its end.

        Raises:
            ConnectionDied: See there. The command may have run.
            TimeoutError: The host is there, the command does not end.
        """
        deadline = time.monotonic() + self._patience.call_s
        if not self._places.acquire(timeout=self._patience.call_s):
            raise TimeoutError("all sessions of the connection are taken")
        try:
            channel = self._open(command)
            try:
                return self._talk(channel, data, deadline)
            finally:
                channel.close()
        finally:
            self._places.release()

    def _open(self, command: str) -> paramiko.Channel:
        import paramiko

        give_up = time.monotonic() + self._patience.open_s
        while True:
            try:
                with _limit(self._patience.open_s + 1, self.close):  # waits for the host's word, however long
                    channel = self._transport.open_session(timeout=self._patience.open_s)
                    channel.exec_command(command)
                return channel
            except (paramiko.SSHException, EOFError, OSError) as error:
                if not self.lives or time.monotonic() >= give_up:
                    raise ConnectionDied(f"no command could be started: {_words(error)}") from error
                # It has fewer sessions than we want. That is a ChannelException, which paramiko may tell to another
                # thread than the one that was refused.
                time.sleep(random.uniform(0.05, 0.2))

    def _talk(self, channel: paramiko.Channel, data: bytes, deadline: float) -> Done:
        with _limit(self._patience.call_s + 1, self.close):  # a full socket is waited for without an end
            _wait_until(deadline, channel)
            try:
                channel.sendall(data)
                channel.shutdown_write()
            except TimeoutError:
                raise
            except (OSError, EOFError):
                pass  # it ended without reading all: what it says tells why
        stdout = _read_all(channel.recv, channel, deadline)
        stderr = _read_all(channel.recv_stderr, channel, deadline)
        if not channel.status_event.wait(max(0.0, deadline - time.monotonic())):
            raise TimeoutError("its output has ended, it has not")
        exit_code = int(channel.recv_exit_status())
        if exit_code < 0:
            raise ConnectionDied("the connection broke before the command's end was told")
        return Done(exit_code, stdout, stderr)


def _wait_until(deadline: float, channel: paramiko.Channel) -> None:
    channel.settimeout(max(0.01, deadline - time.monotonic()))


def _read_all(read: Callable[[int], bytes], channel: paramiko.Channel, deadline: float) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while size <= _MAX_OUTPUT_BYTES:
        _wait_until(deadline, channel)
        piece = read(_PIECE_BYTES)
        if not piece:
            break
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


@contextmanager
def _limit(seconds: float, end: Callable[[], None]) -> Iterator[None]:
    """Call ``end`` from another thread when the block lasts longer: for calls that offer no timeout."""
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


# ---- logging in ----


def log_in(address: SshAddress, patience: Patience) -> Connection:
    """Log in.

    Raises:
        HostRefused: The host key is not the pinned one, or our key is not accepted: no retry helps.
        HostUnreachable: Anything else.
    """
    try:
        pinned = read_host_key(address.host_key)
    except ValueError as error:
        raise HostRefused(f"{address.place}: its host_key cannot be used: {error}") from error
    key = private_key(address)
    give_up = time.monotonic() + patience.connect_s + patience.login_s
    while True:
        try:
            return _log_in_once(address, key, pinned=pinned, patience=patience)
        except _Dropped as error:
            wait_s = random.uniform(0.2, 1.0)  # spreads those who were dropped together
            if time.monotonic() + wait_s >= give_up:
                raise HostUnreachable(f"{address.place} hangs up at login: {error}", host=address.host) from error
            time.sleep(wait_s)


def _log_in_once(address: SshAddress, key: Any, *, pinned: bytes, patience: Patience) -> Connection:
    import paramiko

    transport = paramiko.Transport(_connect(address, patience))
    try:
        transport.set_log_channel(_PARAMIKO_LOG)
        logging.getLogger(_PARAMIKO_LOG).setLevel(logging.CRITICAL)  # it logs tracebacks of what we raise in words
        transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = patience.login_s
        security = transport.get_security_options()
        security.key_types = in_order_of(tuple(security.key_types), key_type(pinned))
        _shake_hands(transport, address, pinned=pinned, patience=patience)
        _authenticate(transport, address, key)
        transport.set_keepalive(_KEEPALIVE_S)
    except BaseException:
        transport.close()
        raise
    return Connection(transport, patience)


def _connect(address: SshAddress, patience: Patience) -> socket.socket:
    try:
        sock = socket.create_connection((address.host, address.port), timeout=patience.connect_s)
    except OSError as error:
        raise HostUnreachable(f"{address.place} cannot be reached: {_words(error)}", host=address.host) from error
    # What has not been acknowledged for so long (keepalives are sent) ends the connection, and with it every wait.
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _shake_hands(transport: paramiko.Transport, address: SshAddress, *, pinned: bytes, patience: Patience) -> None:
    """Agree on keys, and go no further unless the host has the one that is pinned."""
    import paramiko

    began = time.monotonic()
    try:
        transport.start_client(timeout=patience.login_s)
        shown = transport.get_remote_server_key().asbytes()
    except paramiko.IncompatiblePeer as error:
        raise HostRefused(f"{address.place}: no common way to talk: {_words(error)}", host=address.host) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        if time.monotonic() - began < patience.login_s - 1:
            raise _Dropped(_words(error)) from error
        raise HostUnreachable(
            f"{address.place} takes connections and says nothing for {patience.login_s:g} s", host=address.host
        ) from error
    if shown != pinned:
        raise HostRefused(
            f"{address.place} is not the host that was pinned, or has another key now: it shows {fingerprint(shown)}, "
            f"pinned is {fingerprint(pinned)}. If it was set up anew, compare with its console, then put what "
            f"`{address.keyscan}` prints (without the name) as host_key into the connection's extra",
            host=address.host,
        )


def _authenticate(transport: paramiko.Transport, address: SshAddress, key: Any) -> None:
    import paramiko

    try:
        missing = transport.auth_publickey(address.user, key)
    except paramiko.AuthenticationException as error:
        if not transport.is_active() or "timeout" in str(error):
            raise HostUnreachable(f"{address.place} does not end the login: {error}", host=address.host) from error
        raise HostRefused(
            f"{address.place} refuses the login: {error} Our key is {_public_fingerprint(key)}; put its public half "
            f"into ~{address.user}/.ssh/authorized_keys there, or mend login and key of the connection",
            host=address.host,
        ) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise HostUnreachable(f"{address.place} broke the login off: {_words(error)}", host=address.host) from error
    if missing:
        raise HostRefused(f"{address.place} wants more than a key: {', '.join(missing)}", host=address.host)


def _public_fingerprint(key: Any) -> str:
    return fingerprint(key.asbytes())


def private_key(address: SshAddress) -> Any:
    """Return our key, of whichever kind it is.

    Raises:
        HostRefused: It cannot be read.
    """
    import paramiko

    try:
        text = address.private_key or Path(address.key_file or "").read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise HostRefused(f"{address.place}: key_file cannot be read on this machine: {error}") from error
    for kind in (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey):
        try:
            return kind.from_private_key(StringIO(text), password=address.passphrase)
        except paramiko.PasswordRequiredException as error:
            raise HostRefused(f"{address.place}: its key has a passphrase; give private_key_passphrase") from error
        except (paramiko.SSHException, ValueError, IndexError, TypeError):
            continue
    raise HostRefused(
        f"{address.place}: its key cannot be read; allowed: an Ed25519, ECDSA or RSA private key, whole, with its "
        "BEGIN and END lines, and the passphrase that belongs to it"
    )


# ---- the connections of this process ----


class _Desk:
    """Who wants a connection to one address waits here for the same login."""

    def __init__(self, address: SshAddress) -> None:
        self.address = address
        self.lock = threading.Lock()
        self.login: Future[Connection] | None = None

    def connection(self, patience: Patience) -> Connection:
        with self.lock:
            mine = self.login is None or (self.login.done() and not _is_good(self.login))
            if mine:
                self.login = Future()
            login = self.login
        assert login is not None
        if mine:
            try:
                login.set_result(log_in(self.address, patience))
            except BaseException as error:
                login.set_exception(error)
                raise
        try:
            return login.result(timeout=patience.connect_s + 2 * patience.login_s)
        except LaunchError as error:
            raise type(error)(error.message, **error.fields) from error
        except TimeoutError as error:
            raise HostUnreachable(f"{self.address.place} does not end the login") from error

    def opened(self) -> Connection | None:
        """Return the connection that there is, without waiting for anything."""
        login = self.login
        return login.result() if login is not None and login.done() and login.exception() is None else None


def _is_good(login: Future[Connection]) -> bool:
    return login.exception() is None and login.result().lives


class _Pool:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.desks: dict[SshAddress, _Desk] = {}

    def desk(self, address: SshAddress) -> _Desk:
        with self.lock:
            return self.desks.setdefault(address, _Desk(address))

    def opened(self) -> list[Connection]:
        return [found for desk in list(self.desks.values()) if (found := desk.opened()) is not None]


_pool = _Pool()
_left_to_parent: list[_Pool] = []
"""Kept, so that nothing of a parent's connections is ever finalised here."""


def connection_to(address: SshAddress, patience: Patience) -> Connection:
    """Return the process's connection to the address; logs in unless there is one that lives.

    Raises:
        HostRefused, HostUnreachable: See ``log_in``. Who waits for a login that fails is told the same.
    """
    return _pool.desk(address).connection(patience)


def close_connections() -> None:
    """Hang up everywhere."""
    global _pool
    closing, _pool = _pool, _Pool()
    for connection in closing.opened():
        connection.close()


def _after_fork() -> None:
    global _pool
    _left_to_parent.append(_pool)
    for connection in _pool.opened():
        connection.abandon()
    _pool = _Pool()


os.register_at_fork(after_in_child=_after_fork)
