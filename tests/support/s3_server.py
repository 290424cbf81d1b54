"""A real S3 server (SeaweedFS) for tests."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from taas_tasks.stack import processes, seaweed
from taas_tasks.values import StoreConfig


@dataclass
class S3Server:
    """A running server; ``config`` holds its root keys. Can be killed and started again on the same ports."""

    ports: seaweed.SeaweedPorts
    config: StoreConfig
    folder: Path
    process: processes.ProcessId | None = None

    @property
    def log(self) -> Path:
        return self.folder / "weed.log"

    def start(self) -> None:
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        env = seaweed.environment(self.config, self.folder)
        # The guard kills the server when the test process dies in whatever way.
        argv = [sys.executable, "-I", "-m", "taas_tasks.stack.guard", *seaweed.command(self.ports, data)]
        self.process = processes.start(argv, env=env, log=self.log, cwd=self.folder)
        assert processes.wait_until(self._is_ready, timeout_s=30), f"no S3 server:\n{processes.tail(self.log)}"

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.is_alive(), f"the S3 server ended:\n{processes.tail(self.log)}"
        return seaweed.is_ready(self.ports)

    def stop(self) -> None:
        if self.process is not None:
            processes.stop(self.process, grace_s=0)
            seaweed.remove_sockets(self.ports)
            self.process = None

    def fresh_config(self, **changes: object) -> StoreConfig:
        """The same server below a prefix that no one else uses."""
        return self.config.model_copy(update={"prefix": f"t/{secrets.token_hex(6)}", **changes})


@contextmanager
def running_s3_server(folder: Path) -> Iterator[S3Server]:
    ports = seaweed.SeaweedPorts.find(set())
    config = seaweed.store_config(ports, access_key=secrets.token_hex(8), secret_key=secrets.token_hex(16))
    server = S3Server(ports, config, folder)
    try:
        server.start()
        assert processes.wait_until(lambda: seaweed.is_writable(config), timeout_s=20), processes.tail(server.log)
        yield server
    finally:
        server.stop()
