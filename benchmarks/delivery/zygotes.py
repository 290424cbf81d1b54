"""Starting zygotes and running lanes in them; see ``zygote``."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.delivery import peers

_ANSWER_S = 20.0  # beyond the limit of a run
_START_S = 120.0


class Zygote:
    """A process that has imported all that a lane needs and forks the lane's members; started at its first use.

    Args:
        library: "ours", or one of the peers'.
        folder: for what the members tell, and the log.
    """

    def __init__(self, library: str, folder: Path) -> None:
        self._library, self._folder = library, folder
        self._process: subprocess.Popen[str] | None = None
        self.versions: dict[str, str] = {}

    def run(self, members: list[dict[str, Any]], *, limit_s: float = 90.0) -> dict[str, Any]:
        """Return what a run of the members found, or ``{"error": why}``."""
        try:
            process = self._started()
            assert process.stdin is not None
            process.stdin.write(json.dumps({"members": members, "limit_s": limit_s}) + "\n")
            process.stdin.flush()
            return self._answer(process, limit_s + _ANSWER_S)
        except (OSError, TimeoutError, ValueError) as error:
            self.close()
            return {"error": f"the process of lane '{self._library}' ended: {error}; its log: {self._tail()}"}

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None:
            return self._process
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._library == "ours":
            command, module = [sys.executable], "benchmarks.delivery.readers"
            env = {**os.environ, "PYTHONPATH": str(peers.ROOT), "OMP_NUM_THREADS": "1"}
        else:
            command, module = [str(peers.python())], "benchmarks.delivery.peer_readers"
            env = {**peers.environment(self._library), "OMP_NUM_THREADS": "1"}
        command += ["-m", "benchmarks.delivery.zygote", module, str(self._folder)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env, cwd=peers.ROOT
            )
        self.versions = self._answer(self._process, _START_S)["versions"]
        return self._process

    def _answer(self, process: subprocess.Popen[str], limit_s: float) -> dict[str, Any]:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], limit_s)[0]:
            raise TimeoutError(f"no answer in {limit_s:.0f} s")
        found: dict[str, Any] = json.loads(process.stdout.readline())
        return found

    def _tail(self) -> str:
        log = self._folder / "log"
        return log.read_text(errors="replace")[-600:] if log.exists() else "(none)"

    def close(self) -> None:
        """End it and what it started."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
