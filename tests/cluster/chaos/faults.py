"""Doing harm: each kind of fault, to a target that is there at the moment, and mending what lasts."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.chaos.schedule import Fault, FaultKind
from tests.cluster.cluster import Cluster
from tests.cluster.podman import PodmanError

_LOOK = """
import json, pathlib
found = {}
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        environ = (folder / "environ").read_bytes().split(b"\\0")
        command = (folder / "cmdline").read_bytes().replace(b"\\0", b" ").decode(errors="replace")
        parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        continue
    job = next((one.partition(b"=")[2].decode() for one in environ if one.startswith(b"TAAS_JOB_ID=")), None)
    found[int(folder.name)] = {"parent": parent, "command": command, "job": job}
print(json.dumps(found))
"""


@dataclass(frozen=True)
class HostProcess:
    """A process on a host. ``job``: the id of the job that it belongs to; a supervisor's own is None."""

    host: str
    pid: int
    parent: int
    command: str
    job: str | None


@dataclass(frozen=True)
class Hit:
    """A fault that was applied: what it hit, from when to when it lasted (seconds since the start)."""

    kind: FaultKind
    target: str
    at_s: float
    until_s: float
    job: str | None = None


@dataclass
class Harm:
    """Applies faults, one after the other.

    Attributes:
        cluster: its hosts.
        services: by kind of fault, what kills and brings back a service of the stack.
        task_processes: the processes in which Airflow runs tasks of ours now: name of the task instance -> pid.
    """

    cluster: Cluster
    services: Mapping[FaultKind, Callable[[], None]]
    task_processes: Callable[[], Mapping[str, int]]
    began: float = field(default_factory=time.monotonic)
    hits: list[Hit] = field(default_factory=list)
    missed: list[FaultKind] = field(default_factory=list)
    _ill: set[str] = field(default_factory=set)
    _mends: list[threading.Thread] = field(default_factory=list)

    def now_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.began

    def apply(self, fault: Fault) -> None:
        """Apply a fault, or note that there is nothing that it could hit."""
        if fault.kind in self.services:
            at_s = self.now_s()
            self.services[fault.kind]()
            self.hits.append(Hit(fault.kind, fault.kind, at_s, self.now_s()))
        elif fault.kind == "task process":
            self._kill_task_process(fault)
        elif fault.kind == "ssh connections":
            self._drop_ssh(fault)
        elif fault.kind in ("host killed", "host paused", "network cut"):
            self._make_ill(fault)
        else:
            self._kill_on_host(fault)

    def mend_all(self) -> None:
        """Wait until every host is well again."""
        for mend in self._mends:
            mend.join()

    def well(self) -> list[str]:
        """Return the hosts that nothing is the matter with."""
        return [host.name for host in self.cluster.hosts if host.name not in self._ill]

    def processes(self) -> list[HostProcess]:
        """Return what runs on the hosts that are well."""
        return [process for name in self.well() for process in processes_on(self.cluster, name)]

    def _kill_task_process(self, fault: Fault) -> None:
        found = sorted(self.task_processes().items())
        if not found:
            self.missed.append(fault.kind)
            return
        name, pid = found[int(fault.draw * len(found))]
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            self.missed.append(fault.kind)
            return
        self._note(fault, name)

    def _drop_ssh(self, fault: Fault) -> None:
        well = self.well()
        name = well[int(fault.draw * len(well))]
        self.cluster.drop_ssh(name)
        self._note(fault, name)

    def _kill_on_host(self, fault: Fault) -> None:
        found = [process for process in self.processes() if is_target(fault.kind, process)]
        ranks = {(one.host, one.pid) for one in found}
        if fault.kind == "rank":  # the fork server's children, not itself
            found = [one for one in found if (one.host, one.parent) in ranks]
        if not found:
            self.missed.append(fault.kind)
            return
        found.sort(key=lambda one: (one.host, one.pid))
        hit = found[int(fault.draw * len(found))]
        self.cluster.exec(hit.host, ["sh", "-c", f"kill -9 {hit.pid} || true"])
        self._note(fault, f"{hit.host} pid {hit.pid}", job=hit.job)

    def _make_ill(self, fault: Fault) -> None:
        well = self.well()
        if len(well) < len(self.cluster.hosts) - 1:  # two at once leave too few hosts for any request to go on
            self.missed.append(fault.kind)
            return
        name = well[int(fault.draw * len(well))]
        harm, mend = {
            "host killed": (self.cluster.kill, self.cluster.start),
            "host paused": (self.cluster.pause, self.cluster.unpause),
            "network cut": (self.cluster.cut_network, self.cluster.mend_network),
        }[fault.kind]
        self._ill.add(name)
        harm(name)
        self._note(fault, name, lasts_s=fault.lasts_s)

        def later() -> None:
            time.sleep(fault.lasts_s)
            mend(name)
            self._ill.discard(name)

        thread = threading.Thread(target=later, name=f"mend {name}")
        thread.start()
        self._mends.append(thread)

    def _note(self, fault: Fault, target: str, *, lasts_s: float = 0.0, job: str | None = None) -> None:
        self.hits.append(Hit(fault.kind, target, self.now_s(), self.now_s() + lasts_s, job))


def is_target(kind: FaultKind, process: HostProcess) -> bool:
    """Return whether a fault of this kind may hit the process."""
    if kind == "supervisor":
        return "compute/supervisor.py" in process.command
    if process.job is None:
        return False
    marks = {"prep process": "taas_tasks.prep", "node agent": "taas_tasks.launch.agent_program", "rank": "forkserver"}
    return marks[kind] in process.command


def processes_on(cluster: Cluster, name: str) -> list[HostProcess]:
    """Return what runs on a host; nothing when it does not answer."""
    try:
        found = json.loads(cluster.exec(name, ["python3", "-c", _LOOK]))
    except (PodmanError, ValueError):
        return []
    return [HostProcess(name, int(pid), one["parent"], one["command"], one["job"]) for pid, one in found.items()]


def task_processes(ids: Mapping[str, str]) -> dict[str, int]:
    """Return the processes that run Airflow's task instances: name -> pid, given name -> id."""
    titles = {f"airflow worker -- {id_}".encode(): name for name, id_ in ids.items()}
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes().rstrip(b"\0 ")
        except OSError:
            continue
        for prefix, name in titles.items():
            if title.startswith(prefix):
                found[name] = int(path.parent.name)
    return found
