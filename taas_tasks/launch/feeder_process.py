"""The feeder as the node agent sees it: one process that brings shards to this host; its death stops the ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from taas_tasks.launch.files import RankFiles, write_json
from taas_tasks.launch.logs import tail_of
from taas_tasks.values import LaunchPlan, StoreConfig


class FeederProcess:
    """Starts and ends ``python -m taas_tasks.delivery.feeder``; all that it makes lies in the try's scratch folder."""

    def __init__(self, files: RankFiles) -> None:
        self._files = files
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> str:
        """The path of the Unix socket to which ranks connect."""
        return str(self._files.feeder_socket)

    def start(
        self,
        plan: LaunchPlan,
        *,
        store: StoreConfig,
        node_rank: int,
        host: str,
        cache_dir: Path,
        env: Mapping[str, str],
        loader_env: Mapping[str, str],
    ) -> None:
        """Start the feeder for this node's ranks. ``loader_env``: in which segments are prepared again."""
        cache_dir.mkdir(parents=True, exist_ok=True)
        given = {
            "store": store.model_dump(mode="json"),
            "launch_plan": plan.model_dump(mode="json"),
            "node_rank": node_rank,
            "socket": self.socket,
            "cache_dir": str(cache_dir),
            "host": host,
            "stats_path": str(self._files.feeder_stats),
            "is_read_once": True,
            "repair": {"folder": str(self._files.repair), "env": dict(loader_env)},
        }
        write_json(self._files.feeder_input, json.dumps(given))
        command = [sys.executable, "-m", "taas_tasks.delivery.feeder", str(self._files.feeder_input)]
        with self._files.feeder_log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=dict(env)
            )

    def failure(self) -> str | None:
        """Return why the feeder has ended, or None while it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        return f"the feeder ended with code {self._process.returncode}: {tail_of(self._files.feeder_log)[-1500:]}"

    def stop(self, *, grace_s: float = 5.0) -> None:
        """End it: TERM, then KILL."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
