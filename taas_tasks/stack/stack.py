"""The local stack as one thing: up, down, status.

Six processes, each with its own pid and log: SeaweedFS, PostgreSQL, and Airflow's api-server, scheduler, dag-processor
and triggerer. All that they keep is below one folder. They outlive whoever started them, unless ``supervise``.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taas.errors import TaasError
from taas_tasks.stack import airflow_processes, postgres, processes, seaweed
from taas_tasks.stack.ports import LOOPBACK, free_port, is_free, is_listening
from taas_tasks.stack.processes import ProcessId
from taas_tasks.stack.state import Secrets, StackFiles, StartedProcess, State
from taas_tasks.values import StoreConfig

log = logging.getLogger(__name__)

S3, POSTGRES, WARDEN = "s3", "postgres", "warden"
AIRFLOW = tuple(airflow_processes.COMMANDS)
PARTS = (S3, POSTGRES, *AIRFLOW)
_SOURCES = Path(__file__).resolve().parents[2]
_S3_GRACE_S = 2.0  # its clean stop can take 27 s, and it loses nothing by SIGKILL


class StackError(TaasError):
    """A part of the stack does not start or stop; says which, why, and the end of its log."""


@dataclass(frozen=True)
class PartStatus:
    """How a part is. ``problem``: why it is not healthy, in a sentence; None when it is."""

    name: str
    pid: int | None
    problem: str | None


class Stack:
    """The stack whose files are below ``root``."""

    def __init__(
        self,
        root: Path,
        *,
        hosts_gpu: int = 4,
        hosts_cpu: int = 8,
        inventory: Mapping[str, Any] | None = None,
        connections: Mapping[str, str] | None = None,
        s3_address: str | None = None,
        dags: Path | None = None,
        plugins: Path | None = None,
        env: Mapping[str, str] | None = None,
        supervise: bool = False,
        timeout_s: float = 180.0,
    ) -> None:
        """Describe a stack; nothing is started here.

        Args:
            root: the folder; made by ``up``.
            hosts_gpu: emulated machines of the flavor g2.8.
            hosts_cpu: emulated machines of the flavor c1.4.
            inventory: the hosts, in the place of emulated ones (``taas_tasks.compute.inventory``).
            connections: Airflow's connections to them, as environment variables (``AIRFLOW_CONN_ID``).
            s3_address: where the S3 server listens, an address of this machine that the hosts reach; by default where
                it did at the last ``up``, at first on loopback.
            dags: Airflow's DAG folder; by default the one beside this package.
            plugins: Airflow's plugins folder; by default the one beside this package.
            env: environment of the Airflow processes besides what the stack sets; by default next to nothing.
            supervise: everything ends when the process that called ``up`` ends, in whatever way.
            timeout_s: how long ``up`` and ``restart`` wait for a part to be healthy.
        """
        self.files = StackFiles(root.resolve())
        emulated = airflow_processes.inventory(self.files.hosts, hosts_gpu=hosts_gpu, hosts_cpu=hosts_cpu)
        self.inventory: Mapping[str, Any] = emulated if inventory is None else inventory
        self._connections = connections or {}
        self._asked_s3_address = s3_address
        self._dags = dags or _SOURCES / "dags"
        self._plugins = plugins or _SOURCES / "plugins"
        self._base_env = dict(env) if env is not None else _plain_environment(root)
        self._supervise = supervise
        self._timeout_s = timeout_s
        self._mark = hashlib.sha256(str(self.files.root).encode()).hexdigest()[:16]

    # ---- what others ask

    @property
    def url(self) -> str:
        """Airflow's UI and API."""
        return self._airflow_setup().url

    @property
    def login(self) -> tuple[str, str]:
        """User and password of Airflow's administrator."""
        return "admin", self._secrets().admin_password

    def viewer_login(self) -> tuple[str, str]:
        """User and password of one who may only look."""
        return "viewer", self._secrets().viewer_password

    def store_config(self) -> StoreConfig:
        """Return how the object store is reached."""
        found = self._secrets()
        return seaweed.store_config(
            self._seaweed_ports(),
            access_key=found.s3_access_key,
            secret_key=found.s3_secret_key,
            address=self._s3_address(),
        )

    def environment(self) -> dict[str, str]:
        """Return the environment in which ``airflow`` and Airflow's Python API work on this stack."""
        return {
            **self._base_env,
            **airflow_processes.environment(self._airflow_setup()),
            processes.MARKER: self._mark,
        }

    def pids(self) -> dict[str, int]:
        """Return the pid of each process that runs, by name."""
        return {name: each.pid for name, each in self._state().processes.items() if each.id.is_alive()}

    def log(self, name: str) -> Path:
        """Return the log of a process."""
        return self.files.log(name)

    def status(self) -> list[PartStatus]:
        """Return how each part is."""
        state = self._state()
        return [self._status_of(name, state.processes.get(name)) for name in PARTS]

    # ---- up

    def up(self, *, parts: Collection[str] = PARTS) -> None:
        """Start what does not run, and return when all parts are healthy. Doing it twice changes nothing.

        Args:
            parts: only these, as for a test that needs no Airflow; Airflow's need the other two.

        Raises:
            StackError: a part is not healthy in time; what this call started is stopped again.
        """
        with self.files.locked():
            before = self.pids()
            try:
                self._up(parts)
            except BaseException:
                self._stop([name for name in self.pids() if name not in before], grace_s=2.0)
                raise

    def _up(self, parts: Collection[str]) -> None:
        self.files.make_folders()
        self._assign_s3_address()
        self._assign_ports()
        self.files.write_logins(self._secrets(), url=self.url)
        if self._supervise:
            self._ensure(WARDEN)
        made_anew = POSTGRES in parts and self._ensure_postgres_data()
        servers = [name for name in (S3, POSTGRES) if name in parts]
        for name in servers:
            self._ensure(name)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._wait_for, ([name] for name in servers)))
        airflow = [name for name in AIRFLOW if name in parts]
        if airflow:
            self._migrate(anyway=made_anew)
        for name in airflow:
            self._ensure(name)
        self._wait_for(airflow)

    def restart(self, name: str, *, grace_s: float = 10.0) -> None:
        """Stop one process, if it runs, start it, and wait until it is healthy."""
        with self.files.locked():
            self._stop([name], grace_s=grace_s)
            self._ensure(name)
            self._wait_for([name])

    def _ensure(self, name: str) -> None:
        known = self._state().processes.get(name)
        if known is not None and known.id.is_alive():
            return
        if known is not None:
            processes.reap(known.pid)  # as a zombie of ours it would look alive to PostgreSQL
        processes.kill_all(lambda: self._strays(name))
        starters = {S3: self._start_s3, POSTGRES: self._start_postgres, WARDEN: self._start_warden}
        started_at = time.time()
        process = starters.get(name, lambda: self._start_airflow(name))()
        state = self._state()
        entry = StartedProcess(pid=process.pid, started_ticks=process.started_ticks, started_at=started_at)
        self.files.write_state(state.model_copy(update={"processes": {**state.processes, name: entry}}))

    def _strays(self, name: str) -> list[ProcessId]:
        """Return what works on our data and is not in the state, as when that was lost: two servers would spoil it."""
        state = self._state()
        known = {each.pid for each in state.processes.values() if each.id.is_alive()}
        folder = state.postgres_folder

        def is_stray(pid: int) -> bool:
            if name == S3:
                return seaweed.is_server_of(processes.arguments(pid), self.files.s3)
            return name == POSTGRES and folder is not None and postgres.is_part_of(pid, Path(folder) / "data")

        return processes.matching(lambda pid: pid not in known and is_stray(pid))

    def _start_s3(self) -> ProcessId:
        ports = self._seaweed_ports()
        seaweed.remove_sockets(ports)
        env = seaweed.environment(self.store_config(), self.files.s3)
        argv = seaweed.command(ports, self.files.s3, address=self._s3_address())
        return processes.start(argv, env=env, log=self.log(S3), cwd=self.files.s3)

    def _start_postgres(self) -> ProcessId:
        return postgres.launch(self._postgres(), self.log(POSTGRES))

    def _start_airflow(self, name: str) -> ProcessId:
        argv = airflow_processes.command(name)
        return processes.start(argv, env=self.environment(), log=self.log(name), cwd=self.files.airflow_home)

    def _start_warden(self) -> ProcessId:
        me = ProcessId.of(os.getpid())
        if me is None:
            raise StackError("this process cannot be found in /proc: the stack needs Linux")
        argv = [
            sys.executable,
            "-m",
            "taas_tasks.stack.warden",
            str(self.files.root),
            str(me.pid),
            str(me.started_ticks),
        ]
        return processes.start(argv, env=self._base_env, log=self.log(WARDEN), cwd=self.files.root)

    def _ensure_postgres_data(self) -> bool:
        """Make the database cluster; return whether it is a new one."""
        if self._state().postgres_folder is None:
            folder = str(postgres.choose_folder(self.files.root))
            self.files.write_state(self._state().model_copy(update={"postgres_folder": folder}))
        server = self._postgres()
        was_there = (server.data / "PG_VERSION").exists()
        postgres.initialise(server, self._secrets().postgres_password)
        return not was_there

    def _migrate(self, *, anyway: bool) -> None:
        version = importlib.metadata.version("apache-airflow")
        if self._state().migrated == version and not anyway:
            return
        argv = [sys.executable, "-m", "airflow", "db", "migrate"]
        with self.log("migrate").open("wb") as output:
            done = subprocess.run(
                argv, env=self.environment(), stdout=output, stderr=subprocess.STDOUT, timeout=180, check=False
            )
        if done.returncode != 0:
            raise StackError(f"Airflow's database cannot be made:\n{processes.tail(self.log('migrate'))}")
        self.files.write_state(self._state().model_copy(update={"migrated": version}))

    def _wait_for(self, names: Iterable[str]) -> None:
        for name in names:
            waited = processes.wait_until(lambda name=name: self._is_healthy(name), timeout_s=self._timeout_s)  # type: ignore[misc]
            if not waited:
                found = self._status_of(name, self._state().processes.get(name))
                raise StackError(
                    f"{name} is not healthy after {self._timeout_s:.0f} s: {found.problem}. The end of "
                    f"{self.log(name)}:\n{processes.tail(self.log(name))}",
                    part=name,
                )

    def _is_healthy(self, name: str) -> bool:
        found = self._status_of(name, self._state().processes.get(name))
        if found.pid is None:
            text = f"{name} ended at its start. The end of {self.log(name)}:\n{processes.tail(self.log(name))}"
            raise StackError(text, part=name)
        return found.problem is None

    def _status_of(self, name: str, started: StartedProcess | None) -> PartStatus:
        if started is None:
            return PartStatus(name, None, "it was not started")
        if not started.id.is_alive():
            processes.reap(started.pid)
            return PartStatus(name, None, f"its process {started.pid} is gone")
        return PartStatus(name, started.pid, self._problem(name, since=started.started_at))

    def _problem(self, name: str, *, since: float) -> str | None:
        if name == S3:
            ready = seaweed.is_ready(self._seaweed_ports(), address=self._s3_address())
            return None if ready and seaweed.is_writable(self.store_config()) else "it does not take objects"
        if name == POSTGRES:
            return None if postgres.is_ready(self._postgres()) else "it takes no connections"
        answer = airflow_processes.health(self._state().ports["airflow"])
        return airflow_processes.unhealthy_reason(name, answer, since=since)

    # ---- down

    def down(self, *, grace_s: float = 10.0) -> None:
        """Stop everything of the stack, jobs on its emulated hosts included; the files stay.

        Raises:
            StackError: something still listens on a port of the stack.
        """
        with self.files.locked():
            self._stop(AIRFLOW, grace_s=grace_s)
            num_left = processes.kill_all(self._leftovers)
            if num_left:
                log.info("killed %d processes that the stack's tasks and jobs had left", num_left)
            self._stop([S3, POSTGRES, WARDEN], grace_s=grace_s)
            processes.kill_all(lambda: [*self._strays(S3), *self._strays(POSTGRES)])
            self._refuse_listeners()

    def drop_database(self) -> None:
        """Remove Airflow's database of a stack that is down; the next ``up`` makes a new one."""
        with self.files.locked():
            folder = self._state().postgres_folder
            if folder is not None:
                shutil.rmtree(folder)
                self.files.write_state(self._state().model_copy(update={"postgres_folder": None}))

    def _stop(self, names: Iterable[str], *, grace_s: float) -> None:
        known = self._state().processes
        wanted = {name: known[name].id for name in names if name in known and known[name].pid != os.getpid()}
        with ThreadPoolExecutor(max(1, len(wanted))) as pool:
            list(pool.map(lambda name: self._stop_one(name, wanted[name], grace_s), wanted))
        state = self._state()
        left = {name: process for name, process in state.processes.items() if name not in wanted}
        if left != state.processes:
            self.files.write_state(state.model_copy(update={"processes": left}))

    def _stop_one(self, name: str, process: ProcessId, grace_s: float) -> None:
        if name == POSTGRES:
            processes.stop(process, grace_s=grace_s, first=postgres.STOP_SIGNAL)
        elif name == S3:
            processes.stop(process, grace_s=min(grace_s, _S3_GRACE_S))
            seaweed.remove_sockets(self._seaweed_ports())
        else:
            processes.stop(process, grace_s=grace_s, first=signal.SIGKILL if name == WARDEN else signal.SIGTERM)

    def _leftovers(self) -> list[ProcessId]:
        """Return what Airflow's processes have left behind, and all jobs on the emulated hosts."""
        jobs = [folder.name.encode() for folder in self.files.hosts.glob("*/jobs/*")]
        marks = {f"{processes.MARKER}={self._mark}".encode(), *(b"TAAS_JOB_ID=" + job for job in jobs)}
        return [*processes.marked(marks), *processes.matching(self._is_supervisor)]

    def _is_supervisor(self, pid: int) -> bool:
        arguments = processes.arguments(pid)
        below = str(self.files.hosts).encode() + b"/"
        return any(part.endswith(b"supervisor.py") for part in arguments) and arguments[-1].startswith(below)

    def _refuse_listeners(self) -> None:
        ports = self._state().ports.values()

        def busy_ports() -> list[int]:
            places = [(port, address) for port in ports for address in {LOOPBACK, self._s3_address()}]
            return sorted({port for port, address in places if is_listening(port, address=address)})

        if not processes.wait_until(lambda: not busy_ports(), timeout_s=5.0):
            busy = busy_ports()
            raise StackError(f"something still listens on {busy}, though all processes of the stack were stopped")

    # ---- parts

    def _state(self) -> State:
        return self.files.read_state()

    def _secrets(self) -> Secrets:
        return self.files.read_secrets()

    def _s3_address(self) -> str:
        return self._state().s3_address

    def _assign_s3_address(self) -> None:
        """Keep the address of an earlier time, unless another is asked for."""
        asked, state = self._asked_s3_address, self._state()
        if asked is None or asked == state.s3_address:
            return
        if S3 in self.pids():
            raise StackError(
                f"the S3 server listens on {state.s3_address}, asked for was {asked}: stop the stack first"
            )
        self.files.write_state(state.model_copy(update={"s3_address": asked}))

    def _assign_ports(self) -> None:
        """Keep the ports of an earlier time where they are free or ours; else find others."""
        state, alive = self._state(), self.pids()
        ports = dict(state.ports)
        kept = {
            S3: [name for name in ports if name.startswith("s3")],
            POSTGRES: ["postgres"],
            "api-server": ["airflow"],
        }
        for part, names in kept.items():
            if part not in alive and not all(name in ports and is_free(ports[name]) for name in names):
                for name in names:
                    ports.pop(name, None)
        taken = set(ports.values())
        if "s3" not in ports:
            found = seaweed.SeaweedPorts.find(taken)
            ports.update({_port_name(name): port for name, port in vars(found).items()})
        for name in ("postgres", "airflow"):
            if name not in ports:
                ports[name] = free_port(taken=taken)
        self.files.write_state(state.model_copy(update={"ports": ports}))

    def _seaweed_ports(self) -> seaweed.SeaweedPorts:
        ports = self._ports()
        names = seaweed.SeaweedPorts.__dataclass_fields__
        return seaweed.SeaweedPorts(**{name: ports[_port_name(name)] for name in names})

    def _postgres(self) -> postgres.PostgresServer:
        folder = self._state().postgres_folder
        if folder is None:
            raise StackError(f"there is no stack below {self.files.root}: `up` makes one")
        return postgres.PostgresServer(Path(folder), self._ports()["postgres"], postgres.unprivileged_user())

    def _ports(self) -> dict[str, int]:
        ports = self._state().ports
        if not ports:
            raise StackError(f"there is no stack below {self.files.root}: `up` makes one")
        return ports

    def _airflow_setup(self) -> airflow_processes.AirflowSetup:
        found, ports = self._secrets(), self._ports()
        return airflow_processes.AirflowSetup(
            home=self.files.airflow_home,
            port=ports["airflow"],
            database_url=postgres.url(ports["postgres"], found.postgres_password),
            dags=self._dags,
            plugins=self._plugins,
            fernet_key=found.fernet_key,
            jwt_secret=found.jwt_secret,
            api_secret_key=found.api_secret_key,
            passwords_file=self.files.passwords,
            store=self.store_config(),
            inventory=self.inventory,
            connections=self._connections,
        )


def _port_name(field: str) -> str:
    return "s3" if field == "s3" else f"s3.{field}"


def _plain_environment(root: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    return {"PATH": path, "HOME": str(root.resolve()), "LANG": "C.UTF-8"}
