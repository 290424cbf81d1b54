"""A host reached by a command that runs hostctl: JSON on standard input, one line of JSON on standard output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from taas.errors import HostUnreachable, LaunchError
from taas_tasks.compute import hostctl


class ProcessTransport:
    """Runs ``COMMAND VERB`` for each call. Nothing but the verb is ever in argv.

    Args:
        command: What runs hostctl; by default this machine's, as ``python -I -S hostctl.py``.
    """

    def __init__(
        self,
        root: Path,
        *,
        python: str = sys.executable,
        command: Sequence[str] | None = None,
        timeout_s: float = 60,
    ) -> None:
        self._root = root
        self._python = python
        self._command = list(command or [python, "-I", "-S", hostctl.__file__])
        self._timeout_s = timeout_s

    def call(self, verb: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Run ``verb`` (see ``Transport.call``)."""
        request = {"root": str(self._root), "python": self._python, "payload": payload}
        try:
            done = subprocess.run(
                [*self._command, verb],
                input=json.dumps(request).encode(),
                capture_output=True,
                timeout=self._timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HostUnreachable(f"hostctl {verb} did not answer: {error}") from error
        return parse_reply(verb, done.stdout, done.stderr)


def parse_reply(verb: str, stdout: bytes, stderr: bytes) -> dict[str, Any]:
    """Return the answer on the last line of ``stdout`` (a login banner may stand before it).

    Raises:
        HostUnreachable: There is no answer.
        LaunchError: hostctl refused.
    """
    lines = stdout.strip().splitlines()
    try:
        reply = json.loads(lines[-1]) if lines else None
    except ValueError:
        reply = None
    if not isinstance(reply, dict) or not ({"ok", "error"} & set(reply)):
        said = (stderr or stdout).decode(errors="replace").strip()[-500:] or "nothing"
        raise HostUnreachable(f"hostctl {verb} gave no answer; it said: {said}")
    if "error" in reply:
        kind = LaunchError if reply["error"]["kind"] == "refused" else HostUnreachable
        raise kind(str(reply["error"]["message"]))
    answer: dict[str, Any] = reply["ok"]
    return answer
