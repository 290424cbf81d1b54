"""A host reached over SSH: each verb is one command on it, JSON in and out. The engine is put there when it is missing.

Nothing but the verb, the python and the engine's path is ever part of a command.
"""

from __future__ import annotations

import json
import shlex
import threading
from pathlib import Path
from typing import Any

from taas.errors import HostRefused, HostUnreachable, LaunchError
from taas_tasks.compute import unpack
from taas_tasks.compute.engine import engine
from taas_tasks.compute.piped import parse_reply
from taas_tasks.compute.ssh_connections import (
    ConnectionDied,
    Done,
    Patience,
    SshAddress,
    close_connections,
    connection_to,
)
from taas_tasks.layout import HostPaths

__all__ = ["Patience", "SshAddress", "SshTransport", "close_connections"]

HOSTCTL = "taas_tasks/compute/hostctl.py"
_NO_ENGINE = 97
_NO_PYTHON = (126, 127)
_CALL = f'test -f "$2" || exit {_NO_ENGINE}; exec "$1" -I -S "$2" "$3"'
_SHIP = 'exec "$1" -I -S -c "$2"'


class SshTransport:
    """Carries verbs over the process's one connection to the host (see ``Transport``)."""

    def __init__(self, address: SshAddress, root: Path, *, python: str, patience: Patience | None = None) -> None:
        self._address = address
        self._root = root
        self._python = python
        self._patience = patience or Patience()
        self._shipping = threading.Lock()
        self._num_shipped = 0

    def call(self, verb: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Run ``verb`` (see ``Transport.call``).

        Raises:
            HostRefused: The host must not or cannot be used as it is described; retrying does not help.
        """
        request = json.dumps({"root": str(self._root), "python": self._python, "payload": payload}).encode()
        hostctl = str(self._engine / HOSTCTL)
        num_shipped = self._num_shipped
        done = self._run(verb, _CALL, self._python, hostctl, verb, data=request)
        if done.exit_code == _NO_ENGINE:
            self._ship(num_shipped)
            done = self._run(verb, _CALL, self._python, hostctl, verb, data=request)
        return self._answer(verb, done)

    @property
    def _engine(self) -> Path:
        return HostPaths(self._root).engine(engine().digest)

    def _ship(self, num_shipped: int) -> None:
        """Put the engine there, unless another thread has since it was missed."""
        with self._shipping:
            if self._num_shipped != num_shipped:
                return
            data = unpack.shipment(self._engine, engine().archive)
            done = self._run("engine", _SHIP, self._python, unpack.EXEC, data=data)
            self._answer("engine", done, refusal=HostRefused)
            self._num_shipped += 1

    def _run(self, verb: str, script: str, *args: str, data: bytes) -> Done:
        """Run a script of /bin/sh, whatever the login's shell is; a connection that turns out dead is replaced once."""
        command = shlex.join(["exec", "/bin/sh", "-c", script, "sh", *args])
        for is_last in (False, True):
            connection = connection_to(self._address, self._patience)
            try:
                return connection.run(command, data)
            except ConnectionDied as error:
                connection.close()
                if is_last:
                    raise HostUnreachable(f"{self._address.place}: {error}", host=self._address.host) from error
            except TimeoutError as error:
                raise HostUnreachable(
                    f"{self._address.place} does not answer {verb} within {self._patience.call_s:g} s: {error}",
                    host=self._address.host,
                ) from error
        raise AssertionError("unreachable")

    def _answer(self, verb: str, done: Done, *, refusal: type[LaunchError] = LaunchError) -> dict[str, Any]:
        if done.exit_code in _NO_PYTHON:
            raise HostRefused(
                f"{self._address.place} has no python at {self._python!r}: {_tail(done)}; install it, or mend `python` "
                "of the host in the inventory",
                host=self._address.host,
            )
        try:
            return parse_reply(verb, done.stdout, done.stderr)
        except LaunchError as error:
            kind = type(error) if error.retryable else refusal
            raise kind(f"{self._address.place}: {error.message}", **error.fields) from error


def _tail(done: Done) -> str:
    return (done.stderr or done.stdout).decode(errors="replace").strip()[-300:] or f"exit code {done.exit_code}"
