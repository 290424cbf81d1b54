"""What a stack remembers between two commands: ports, processes, secrets."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from taas.errors import TaasError
from taas_tasks.stack.ports import LOOPBACK
from taas_tasks.stack.processes import ProcessId
from taas_tasks.store.files import write_then_move
from taas_tasks.values import Value


class StartedProcess(Value):
    """A process of the stack. Known by pid and start time: a pid alone may belong to someone else by now."""

    pid: int
    started_ticks: int
    started_at: float

    @property
    def id(self) -> ProcessId:
        """The process."""
        return ProcessId(self.pid, self.started_ticks)


class State(Value):
    """The state file; no secrets in it."""

    version: Literal[1] = 1
    boot_id: str
    ports: dict[str, int] = {}
    s3_address: str = LOOPBACK
    processes: dict[str, StartedProcess] = {}
    postgres_folder: str | None = None
    migrated: str | None = None  # Airflow's version that the database was made for


class Secrets(Value):
    """Random, made once per stack, kept in a 0600 file."""

    version: Literal[1] = 1
    s3_access_key: str
    s3_secret_key: str
    postgres_password: str
    fernet_key: str
    jwt_secret: str
    api_secret_key: str
    admin_password: str
    viewer_password: str

    @classmethod
    def make(cls) -> Secrets:
        """Return new ones."""
        return cls(
            s3_access_key=secrets.token_hex(10),
            s3_secret_key=secrets.token_hex(20),
            postgres_password=secrets.token_hex(16),
            fernet_key=base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
            jwt_secret=secrets.token_hex(32),
            api_secret_key=secrets.token_hex(32),
            admin_password=secrets.token_urlsafe(12),
            viewer_password=secrets.token_urlsafe(12),
        )


@dataclass(frozen=True)
class StackFiles:
    """Every path below a stack's folder."""

    root: Path

    @property
    def state(self) -> Path:
        """The state file."""
        return self.root / "state.json"

    @property
    def secrets(self) -> Path:
        """The secrets (0600)."""
        return self.root / "secrets.json"

    @property
    def client(self) -> Path:
        """What the ``taas`` command reads: URL, user, password (0600)."""
        return self.root / "client.toml"

    @property
    def airflow_home(self) -> Path:
        """Airflow's own files."""
        return self.root / "airflow"

    @property
    def passwords(self) -> Path:
        """The logins of Airflow's simple auth manager (0600)."""
        return self.airflow_home / "passwords.json"

    @property
    def s3(self) -> Path:
        """The S3 server's data."""
        return self.root / "s3"

    @property
    def hosts(self) -> Path:
        """One folder per emulated host."""
        return self.root / "hosts"

    def log(self, name: str) -> Path:
        """The log of one process."""
        return self.root / "logs" / f"{name}.log"

    def make_folders(self) -> None:
        """Make them all."""
        for folder in (self.airflow_home, self.s3, self.hosts, self.root / "logs"):
            folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other commands on this stack waiting."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "lock").open("w") as file:
            flock(file, LOCK_EX)
            yield

    def read_state(self) -> State:
        """Return the state; a new one when there is none, or when the machine was started anew since."""
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        if not self.state.exists():
            return State(boot_id=boot_id)
        try:
            state = State.model_validate_json(self.state.read_bytes())
        except ValidationError as error:
            raise TaasError(
                f"{self.state} cannot be read ({error}): stop the stack's processes and remove it"
            ) from error
        return state if state.boot_id == boot_id else state.model_copy(update={"boot_id": boot_id, "processes": {}})

    def write_state(self, state: State) -> None:
        """Write the state."""
        with write_then_move(self.state) as file:
            file.write(state.model_dump_json(indent=1).encode())

    def read_secrets(self) -> Secrets:
        """Return the secrets; made at the first call."""
        if not self.secrets.exists():
            _write_private(self.secrets, Secrets.make().to_bytes())
        return Secrets.model_validate_json(self.secrets.read_bytes())

    def write_logins(self, found: Secrets, *, url: str) -> None:
        """Write the logins, for Airflow and for the ``taas`` command."""
        passwords = {"admin": found.admin_password, "viewer": found.viewer_password}
        _write_private(self.passwords, json.dumps(passwords).encode())
        client = f'url = "{url}"\nusername = "admin"\npassword = "{found.admin_password}"\n'
        _write_private(self.client, client.encode())


def _write_private(path: Path, data: bytes) -> None:
    if not path.exists() or path.read_bytes() != data:
        with write_then_move(path, mode=0o600) as file:
            file.write(data)
