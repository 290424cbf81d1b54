"""A host that is a folder of this machine: hostctl's functions in this process, jobs as processes of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from taas.errors import HostUnreachable, LaunchError
from taas_tasks.compute import hostctl


class LocalTransport:
    """Calls the verbs in process. The supervisor of each job is always a detached process."""

    def __init__(self, root: Path, *, python: str = sys.executable) -> None:
        self._root = root
        self._python = python

    def call(self, verb: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Run ``verb`` (see ``Transport.call``)."""
        try:
            return hostctl.call(self._root, verb, payload, python=self._python)
        except hostctl.Refused as refused:
            raise LaunchError(str(refused)) from refused
        except OSError as error:
            raise HostUnreachable(f"the folder {self._root} of the host cannot be used: {error}") from error
