"""How verbs reach a host. Whatever carries JSON there and back is a transport."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

_HOST_MODULES = ("hostctl", "supervisor", "processes", "payload", "slots")
HOST_FILES = tuple(Path(__file__).with_name(f"{name}.py") for name in _HOST_MODULES)
"""What a bare host needs, side by side in one folder, and a Python >= 3.9."""


class Transport(Protocol):
    """Runs one verb of ``hostctl`` on one host. Safe to use from several threads; every verb may be repeated."""

    def call(self, verb: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Run ``verb`` and return its answer.

        Raises:
            HostUnreachable: The host did not answer; the verb may or may not have been done: repeat it.
            LaunchError: The host refused the payload; the message says why.
        """
