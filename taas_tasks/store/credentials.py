"""Credentials of the store that are renewed while a program runs: a file that somebody writes anew in time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from taas.errors import StoreRefused

_PATIENCE_S = 300.0
_POLL_S = 0.5


@dataclass(frozen=True)
class Keys:
    """What requests are signed with."""

    access_key: str
    secret_key: str
    session_token: str | None = None


class KeySource(Protocol):
    """Keys that are renewed. Safe to use from several threads."""

    def keys(self) -> Keys:
        """Return the keys as they are now."""

    def await_others(self, expired: Keys) -> bool:
        """Return whether there are other keys than the expired ones, perhaps after waiting for them."""


class CredentialsFile:
    """Keys from a JSON file (``access_key``, ``secret_key``, ``session_token``) that is replaced when they are renewed.

    Safe to use from several threads.

    Args:
        path: the file; whoever renews it writes a new one and moves it there.
        patience_s: how long a renewal that is due may take.
        pause: waits, for tests.
    """

    def __init__(
        self, path: Path, *, patience_s: float = _PATIENCE_S, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._path, self._patience_s, self._pause = path, patience_s, pause
        self._lock = threading.Lock()
        self._state: tuple[int, int, int] | None = None
        self._keys: Keys | None = None

    def keys(self) -> Keys:
        """Return the keys as they are now.

        Raises:
            StoreRefused: the file cannot be read.
        """
        with self._lock:
            try:
                status = self._path.stat()
                state = (status.st_mtime_ns, status.st_ino, status.st_size)
                if self._keys is None or state != self._state:
                    self._keys, self._state = Keys(**json.loads(self._path.read_bytes())), state
            except (OSError, ValueError, TypeError) as error:
                raise StoreRefused(f"the store's credentials cannot be read from {self._path}: {error}") from error
            return self._keys

    def await_others(self, expired: Keys) -> bool:
        """Return whether there are other keys than the expired ones, after waiting for them."""
        given_up_at = time.monotonic() + self._patience_s
        while self.keys() == expired:
            if time.monotonic() >= given_up_at:
                return False
            self._pause(_POLL_S)
        return True
