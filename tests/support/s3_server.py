"""A real S3 server (SeaweedFS) for tests."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3

from taas_tasks.stack import processes, seaweed
from taas_tasks.stack.ports import LOOPBACK
from taas_tasks.values import StoreConfig

_MAY_DO_ALL = json.dumps(
    {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": ["s3:*"], "Resource": ["arn:aws:s3:::*"]}]}
)
_ATTEMPTS = 3


@dataclass
class S3Server:
    """A running server; ``config`` holds its root keys. Can be killed and started again on the same ports."""

    ports: seaweed.SeaweedPorts
    config: StoreConfig
    folder: Path
    address: str = LOOPBACK
    process: processes.ProcessId | None = None

    @property
    def log(self) -> Path:
        return self.folder / "weed.log"

    def start(self) -> None:
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        env = seaweed.environment(self.config, self.folder)
        # The guard kills the server when the test process dies in whatever way.
        command = [
            *seaweed.command(self.ports, data, address=self.address),
            "-s3.iam.readOnly=false",
        ]  # for ``new_keys``
        argv = [sys.executable, "-I", "-m", "taas_tasks.stack.guard", *command]
        self.process = processes.start(argv, env=env, log=self.log, cwd=self.folder)
        assert processes.wait_until(self._is_ready, timeout_s=30), f"no S3 server:\n{processes.tail(self.log)}"

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.is_alive(), f"the S3 server ended:\n{processes.tail(self.log)}"
        return seaweed.is_ready(self.ports, address=self.address)

    def stop(self) -> None:
        if self.process is not None:
            processes.stop(self.process, grace_s=0)
            seaweed.remove_sockets(self.ports)
            self.process = None

    def new_keys(self) -> dict[str, str]:
        """Another user's keys, who may do all: what session credentials look like when they are renewed."""
        client = boto3.client(
            "iam",
            endpoint_url=self.config.endpoint_url,
            aws_access_key_id=self.config.access_key,
            aws_secret_access_key=self.config.secret_key,
            region_name=self.config.region,
        )
        with closing(client):
            user = f"user-{secrets.token_hex(4)}"
            client.create_user(UserName=user)
            client.put_user_policy(UserName=user, PolicyName="all", PolicyDocument=_MAY_DO_ALL)
            key = client.create_access_key(UserName=user)["AccessKey"]
        keys = {"access_key": key["AccessKeyId"], "secret_key": key["SecretAccessKey"]}
        config = self.config.model_copy(update=keys)
        assert processes.wait_until(lambda: seaweed.is_writable(config), timeout_s=20), "the keys are not accepted"
        return keys

    def fresh_config(self, **changes: object) -> StoreConfig:
        """The same server below a prefix that no one else uses."""
        return self.config.model_copy(update={"prefix": f"t/{secrets.token_hex(6)}", **changes})


@contextmanager
def running_s3_server(folder: Path, *, address: str = LOOPBACK) -> Iterator[S3Server]:
    server = _started(folder, address)
    try:
        assert processes.wait_until(lambda: seaweed.is_writable(server.config), timeout_s=20), processes.tail(
            server.log
        )
        yield server
    finally:
        server.stop()


def _started(folder: Path, address: str) -> S3Server:
    """Start a server; on other ports when someone took one of them meanwhile."""
    for attempt in range(_ATTEMPTS):
        ports = seaweed.SeaweedPorts.find(set())
        keys = {"access_key": secrets.token_hex(8), "secret_key": secrets.token_hex(16)}
        config = seaweed.store_config(ports, **keys, address=address)
        server = S3Server(ports, config, folder / f"try-{attempt}", address)
        server.folder.mkdir(parents=True)
        try:
            server.start()
        except BaseException as error:
            server.stop()
            if attempt == _ATTEMPTS - 1 or not isinstance(error, AssertionError):
                raise
        else:
            return server
    raise AssertionError("unreachable")
