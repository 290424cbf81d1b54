"""The cluster, the stack that drives it, and what is looked at and done there from outside."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks.launch.notes import Note, read
from taas_tasks.compute.inventory import Host, Inventory
from taas_tasks.compute.ssh import SshAddress, SshTransport
from taas_tasks.project import commit
from taas_tasks.stack import Stack
from taas_tasks.store import open_store
from tests.cluster.cluster import PYTHON, Cluster, ClusterHost
from tests.cluster.podman import podman

PROJECT = "bench"
RANKS_PER_HOST = 2
FLAVOR = "g2.2"
SCRIPT = Path(__file__).with_name("train.py")
ON_HOST = "/tmp/bench-train.py"
OF_JOBS = (b"TAAS_JOB_ID=", b"supervisor.py")
_DAGS = Path(__file__).parents[2] / "dags"


def until(condition: Callable[[], Any], *, wait_s: float, every_s: float = 0.25) -> Any:
    """Return the condition's first true value, or None when none came in time."""
    give_up = time.monotonic() + wait_s
    while not (value := condition()):
        if time.monotonic() > give_up:
            return None
        time.sleep(every_s)
    return value


class Api:
    """Airflow's REST API, logged in as admin."""

    def __init__(self, stack: Stack) -> None:
        self._http = httpx.Client(base_url=stack.url, timeout=30)
        user, password = stack.login
        reply = self._http.post("/auth/token", json={"username": user, "password": password})
        self._http.headers["Authorization"] = f"Bearer {reply.raise_for_status().json()['access_token']}"

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> Any:
        return self._http.get(path, params=params).raise_for_status().json()

    def knows(self, dag: str) -> bool:
        return self._http.get(f"/api/v2/dags/{dag}").status_code == 200

    def trigger(self, dag: str, run_id: str, conf: dict[str, Any]) -> None:
        wanted = {"dag_run_id": run_id, "logical_date": None, "conf": conf}
        reply = self._http.post(f"/api/v2/dags/{dag}/dagRuns", json=wanted)
        if reply.status_code != 200:
            raise RuntimeError(f"{dag} was not triggered: {reply.text}")

    def run_state(self, dag: str, run_id: str) -> str:
        return str(self.get(f"/api/v2/dags/{dag}/dagRuns/{run_id}")["state"])

    def tasks(self, dag: str, run_id: str) -> dict[str, dict[str, Any]]:
        found = self.get(f"/api/v2/dags/{dag}/dagRuns/{run_id}/taskInstances", limit=100)["task_instances"]
        return {one["task_id"]: one for one in found}

    def mark_failed(self, dag: str, run_id: str, task: str) -> None:
        path = f"/api/v2/dags/{dag}/dagRuns/{run_id}/taskInstances/{task}"
        self._http.patch(path, json={"new_state": "failed"}).raise_for_status()

    def log(self, dag: str, run_id: str, task: str) -> list[dict[str, Any]]:
        path = f"/api/v2/dags/{dag}/dagRuns/{run_id}/taskInstances/{task}/logs/1"
        return [line for line in self.get(path, full_content=True)["content"] if isinstance(line, dict)]


class World:
    """What all launches share."""

    def __init__(self, cluster: Cluster, stack: Stack, api: Api) -> None:
        self.cluster = cluster
        self.stack = stack
        self.api = api
        self.store = open_store(stack.store_config())
        self._hosts = {_namespace(_first_process(host)): host.name for host in cluster.hosts}

    def notes(self, mark: str) -> list[Note]:
        """Return what the ranks of a launch have noted."""
        command = ["sh", "-c", f"cat /tmp/{mark}.*.notes 2>/dev/null || true"]
        hosts = [host.name for host in self.cluster.hosts]
        return [one for name in hosts for one in read(name, self.cluster.exec(name, command))]

    def pid_outside(self, note: Note) -> int:
        """Return a rank's pid as this machine knows it."""
        for pid, host in self._processes().items():
            if host == note.host and _pid_inside(pid) == note.pid:
                return pid
        raise RuntimeError(f"rank {note.rank} (pid {note.pid} on {note.host}) is gone")

    def left(self, mark: str) -> list[int]:
        """Return the processes of a launch on all hosts, those of any job of TaaS's included."""
        wanted = (mark.encode(), *OF_JOBS)
        return [pid for pid in self._processes() if any(one in words for one in wanted for words in _words(pid))]

    def _processes(self) -> dict[int, str]:
        """Return every process on any host: its pid as this machine knows it, and the host."""
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        found = {pid: self._hosts.get(_namespace(pid)) for pid in pids}
        return {pid: host for pid, host in found.items() if host is not None}

    def end(self, mark: str) -> None:
        """Kill what a launch has left, so that the next one has the hosts to itself."""
        for _ in range(20):
            found = self.left(mark)
            if not found:
                return
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.5)
        raise RuntimeError(f"these do not end: {found}")

    def held_slots(self) -> list[str]:
        """Return who holds slots, asked over SSH as TaaS does."""
        hosts = Inventory.model_validate(self.stack.inventory).hosts
        return [slot["label"] for host in hosts for slot in self._transport(host).call("slots", {})["slots"]]

    def _transport(self, host: Host) -> SshTransport:
        there = next(one for one in self.cluster.hosts if one.connection_id == host.connection_id)
        address = SshAddress(
            connection_id=there.connection_id,
            host=there.address,
            port=there.port,
            user=there.user,
            private_key=there.private_key,
            host_key=there.host_key,
        )
        return SshTransport(address, Path(host.root), python=PYTHON)


@contextmanager
def running(folder: Path, *, num_hosts: int) -> Iterator[World]:
    """Give a cluster of GPU hosts and a stack that drives it; both are gone afterwards."""
    with ExitStack() as exits:
        cluster = exits.enter_context(Cluster(folder / "cluster", num_cpu_hosts=0, num_gpu_hosts=num_hosts))
        stack = Stack(
            folder / "stack",
            inventory=cluster.inventory(),
            connections=cluster.connections(),
            s3_address=cluster.gateway,
            dags=_dags(folder),
            supervise=True,
        )
        exits.callback(stack.drop_database)
        exits.callback(stack.down)
        stack.up()
        api = Api(stack)
        exits.callback(api.close)
        world = World(cluster, stack, api)
        commit(world.store, PROJECT, {"train.py": SCRIPT.read_bytes()}, author="bench")
        _put_script(cluster)
        names = ("taas_train", *(f"bench_remote_job_{num}" for num in (1, 2, 4)))
        if not until(lambda: all(map(api.knows, names)), wait_s=90, every_s=1):
            raise RuntimeError(f"Airflow does not know {[name for name in names if not api.knows(name)]} after 90 s")
        yield world


def _dags(folder: Path) -> Path:
    """Make a DAG folder that has the project's and the benchmark's."""
    dags = folder / "dags"
    dags.mkdir()
    for source in [*_DAGS.glob("*.py"), *Path(__file__).with_name("dags").glob("*.py")]:
        shutil.copy(source, dags)
    return dags


def _put_script(cluster: Cluster) -> None:
    code = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
    for host in cluster.hosts:
        cluster.exec(host.name, [PYTHON, "-c", code, ON_HOST, SCRIPT.read_text()], user=host.user)


def _first_process(host: ClusterHost) -> int:
    return int(podman("inspect", "--format", "{{.State.Pid}}", host.container))


def _namespace(pid: int) -> str:
    with suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    return ""


def _words(pid: int) -> list[bytes]:
    """Return the command line and the environment of a process."""
    with suppress(OSError):
        return [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
    return []


def _pid_inside(pid: int) -> int | None:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return None
