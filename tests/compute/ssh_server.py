"""An SSH server in this process that really runs the commands by /bin/sh, and that can be made to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import asyncssh

from taas_tasks.compute.ssh import Patience, SshAddress, SshTransport, close_connections

CLIENT_KEY = asyncssh.generate_private_key("ssh-ed25519")
HOST_KEY = asyncssh.generate_private_key("ssh-ed25519")
USER = "trainer"


def private(key: asyncssh.SSHKey, passphrase: str | None = None) -> str:
    return key.export_private_key(
        passphrase=passphrase, **({"rounds": 1, "ignore_few_rounds": True} if passphrase else {})
    ).decode()


def public(key: asyncssh.SSHKey) -> str:
    return " ".join(key.export_public_key().decode().split()[:2])


class SshServer:
    """A context manager. What it saw is in ``logins`` and ``commands``; the flags say how it behaves from now on."""

    def __init__(
        self,
        *,
        host_key: asyncssh.SSHKey = HOST_KEY,
        more_host_keys: Sequence[asyncssh.SSHKey] = (),
        user_key: str = "",
    ) -> None:
        self.host_key = host_key
        self.host_keys = [host_key, *more_host_keys]
        self.user_key = user_key or public(CLIENT_KEY)
        self.port = 0
        self.logins = 0
        self.num_connections = 0
        self.most_sessions = 0
        self.commands: list[str] = []
        self.noise = b""
        self.silent_after = float("inf")  # commands
        self.drop_logins = 0
        self.max_sessions = 100
        self._sessions = 0
        self._connections: set[asyncssh.SSHServerConnection] = set()
        self._processes: set[asyncio.subprocess.Process] = set()

    # ---- its thread ----

    def __enter__(self) -> SshServer:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        close_connections()
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)

    async def _open(self) -> None:
        server = self

        class Door(asyncssh.SSHServer):
            def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
                self.conn = conn
                server._connections.add(conn)
                server.num_connections += 1
                if server.drop_logins > 0:
                    server.drop_logins -= 1
                    conn.abort()

            def connection_lost(self, exc: Exception | None) -> None:
                server._connections.discard(self.conn)

            def begin_auth(self, username: str) -> bool:
                return True

            def public_key_auth_supported(self) -> bool:
                return True

            def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
                return username == USER and public(key) == server.user_key

            def auth_completed(self) -> None:
                server.logins += 1

            def session_requested(self) -> Any:
                if server._sessions >= server.max_sessions:
                    raise asyncssh.ChannelOpenError(asyncssh.OPEN_CONNECT_FAILED, "no more sessions")
                server._sessions += 1
                server.most_sessions = max(server.most_sessions, server._sessions)
                return asyncssh.SSHServerProcess(server._serve, None, 3, False)

        self._closing = asyncio.Event()
        self._listener = await asyncssh.create_server(
            Door, "127.0.0.1", self.port, server_host_keys=self.host_keys, encoding=None, reuse_address=True
        )
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._closing.set()
        self._listener.close()
        for connection in list(self._connections):
            connection.abort()
        for process in list(self._processes):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await self._listener.wait_closed()
        current = asyncio.current_task()
        await asyncio.gather(*(t for t in asyncio.all_tasks() if t is not current), return_exceptions=True)

    async def _serve(self, process: Any) -> None:
        try:
            self.commands.append(process.command)
            if len(self.commands) > self.silent_after:
                await self._closing.wait()
            else:
                await self._execute(process)
        finally:
            self._sessions -= 1

    async def _execute(self, process: Any) -> None:
        environment = {"PATH": os.environ["PATH"], "HOME": "/"}
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", process.command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd="/"
        )
        self._processes.add(child)
        try:
            process.stdout.write(self.noise)
            out, err = await child.communicate(await process.stdin.read())
            process.stdout.write(out)
            process.stderr.write(err)
            process.exit(child.returncode)
        finally:
            if child.returncode is None:  # its connection broke while it waits for input
                child.kill()
                await child.wait()
            self._processes.discard(child)

    # ---- misbehaving ----

    def hang_up(self) -> None:
        """Break every connection that there is."""

        async def abort() -> None:
            for connection in list(self._connections):
                connection.abort()

        self._run(abort())

    # ---- who uses it ----

    def address(self, **fields: Any) -> SshAddress:
        own = {
            "connection_id": "h",
            "host": "127.0.0.1",
            "port": self.port,
            "user": USER,
            "private_key": private(CLIENT_KEY),
            "host_key": public(self.host_key),
        }
        return SshAddress(**{**own, **fields})

    def transport(self, root: Path, *, python: str, patience: Patience | None = None, **fields: Any) -> SshTransport:
        return SshTransport(self.address(**fields), root, python=python, patience=patience)


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]
