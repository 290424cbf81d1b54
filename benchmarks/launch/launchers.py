"""The launchers: TaaS, torchrun started by hand over ssh, and the provider's SSHRemoteJobOperator running torchrun."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from benchmarks.launch.world import FLAVOR, ON_HOST, PROJECT, RANKS_PER_HOST, World, until
from taas.errors import ObjectMissing
from taas_tasks.layout import RunKeys, run_key
from taas_tasks.verdict import gather
from tests.cluster.cluster import PYTHON, ClusterHost

_PORTS = itertools.count(29500)
_INTERFACE = "eth0"
_OVER = ("success", "failed")


@dataclass(frozen=True)
class Wanted:
    """A launch."""

    mark: str
    num_hosts: int
    num_steps: int
    pause_s: float
    max_restarts: int = 0

    @property
    def world_size(self) -> int:
        return self.num_hosts * RANKS_PER_HOST

    @property
    def args(self) -> list[str]:
        return [str(self.num_steps), str(self.pause_s)]


class Launch(ABC):
    """One launch, to be begun once."""

    def __init__(self, world: World, wanted: Wanted) -> None:
        self.world = world
        self.wanted = wanted

    @abstractmethod
    def begin(self) -> None:
        """Start it; the clock runs from just before this."""

    @abstractmethod
    def states(self) -> list[str]:
        """Return the state of each part that the user sees: "success", "failed", or what it is in meanwhile."""

    @abstractmethod
    def messages(self) -> list[str]:
        """Return what each part that failed says to its user at last."""

    def logs(self) -> list[str]:
        """Return all that each part that failed has logged."""
        return self.messages()

    @abstractmethod
    def cancel(self) -> None:
        """Do what a user does to end it."""

    def reached(self) -> Mapping[str, float | None]:
        """Return when what comes before the script was reached (unix seconds), in order."""
        return {}

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """End what this process has started for it."""

    @property
    def has_failed(self) -> bool:
        return "failed" in self.states()

    @property
    def is_over(self) -> bool:
        states = self.states()
        return bool(states) and all(state in _OVER for state in states)


def names_rank(message: str, rank: int, host: str) -> bool:
    """Return whether a message says that ``rank`` failed first: TaaS's verdict, or torchrun's root cause."""
    if f"rank {rank} on {host}" in message.split("failed first")[0]:
        return True
    root = re.search(r"Root Cause.*?rank\s*:\s*(\d+)\b", message, re.DOTALL)
    return root is not None and int(root.group(1)) == rank


class Taas(Launch):
    """A request to ``taas_train``; the part that the user sees is the task ``train``."""

    def begin(self) -> None:
        conf = {
            "project": PROJECT,
            "script": "train.py",
            "args": self.wanted.args,
            "flavor": FLAVOR,
            "gpus": self.wanted.world_size,
            "env": {"BENCH_RUN": self.wanted.mark},
            "max_restarts": self.wanted.max_restarts,
        }
        self.world.api.trigger("taas_train", self.wanted.mark, conf)

    def states(self) -> list[str]:
        tasks = self.world.api.tasks("taas_train", self.wanted.mark)
        before = [str(tasks[name]["state"]) for name in ("validate", "plan") if name in tasks]
        return ["failed"] if "failed" in before else [str(tasks.get("train", {}).get("state"))]

    def messages(self) -> list[str]:
        try:
            return [self.world.store.get(self._keys.last_words("train")).decode()]
        except ObjectMissing:
            return ["\n".join(str(line.get("event")) for line in self._log()[-5:])]

    def cancel(self) -> None:
        self.world.api.mark_failed("taas_train", self.wanted.mark, "train")

    def logs(self) -> list[str]:
        return ["\n".join(str(line["event"]) for line in self._log())]

    def close(self) -> None:
        """Wait until the run is over: its last tasks would take time from the next launch."""
        _await_run(self.world, "taas_train", self.wanted.mark)

    def reached(self) -> Mapping[str, float | None]:
        tasks = self.world.api.tasks("taas_train", self.wanted.mark)
        nodes = gather(self.world.store, self._keys.run, 1, self.wanted.num_hosts).nodes
        log = self._log()
        held = next((_seconds(line["timestamp"]) for line in log if str(line["event"]).startswith("starting ")), None)
        return {
            "validated": _seconds(tasks["validate"]["end_date"]),
            "planned": _seconds(tasks["plan"]["end_date"]),
            "train task started": _seconds(next(line["timestamp"] for line in log if line.get("timestamp"))),
            "hosts held": held,
            **{
                told: max((node.times[name] for node in nodes if name in node.times), default=None)
                for told, name in (
                    ("agents started", "agent_started"),
                    ("preflight done", "preflight_done"),
                    ("ranks started", "ranks_started"),
                )
            },
        }

    @property
    def _keys(self) -> RunKeys:
        return RunKeys(run_key(self.wanted.mark))

    def _log(self) -> list[dict[str, str]]:
        return [line for line in self.world.api.log("taas_train", self.wanted.mark, "train") if line.get("timestamp")]


def torchrun(hosts: Sequence[ClusterHost], wanted: Wanted) -> list[str]:
    """Return the shell command of each host: what torch's documentation says, c10d on the first host."""
    port = next(_PORTS)
    return [
        shlex.join(
            [
                *("env", f"BENCH_RUN={wanted.mark}", f"GLOO_SOCKET_IFNAME={_INTERFACE}", "OMP_NUM_THREADS=1"),
                *(PYTHON, "-m", "torch.distributed.run", "--nnodes", str(len(hosts))),
                *("--nproc-per-node", str(RANKS_PER_HOST), "--max-restarts", str(wanted.max_restarts)),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address}:{port}"),
                *("--rdzv-id", wanted.mark, "--local-addr", host.address, ON_HOST, *wanted.args),
            ]
        )
        for host in hosts
    ]


class Torchrun(Launch):
    """By hand: OpenSSH's client for each host, without a terminal; the part that the user sees is each client."""

    def __init__(self, world: World, wanted: Wanted, *, folder: Path) -> None:
        super().__init__(world, wanted)
        self._folder = folder / wanted.mark
        self._clients: list[subprocess.Popen[bytes]] = []

    def begin(self) -> None:
        self._folder.mkdir()
        hosts = self.world.cluster.hosts[: self.wanted.num_hosts]
        for host, command in zip(hosts, torchrun(hosts, self.wanted), strict=True):
            self._clients.append(self._start(host, command))

    def _start(self, host: ClusterHost, command: str) -> subprocess.Popen[bytes]:
        key, known = self._folder / f"{host.name}.key", self._folder / f"{host.name}.known"
        key.touch(mode=0o600)
        key.write_text(host.private_key)
        known.write_text(f"{host.address} {host.host_key}\n")
        options = ["-F", "none", "-i", str(key), "-o", f"UserKnownHostsFile={known}", "-o", "BatchMode=yes"]
        argv = ["ssh", *options, "-o", "LogLevel=ERROR", f"{host.user}@{host.address}", command]
        with (self._folder / f"{host.name}.log").open("wb") as log:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def states(self) -> list[str]:
        return [{None: "running", 0: "success"}.get(client.poll(), "failed") for client in self._clients]

    def messages(self) -> list[str]:
        logs = sorted(self._folder.glob("*.log"))
        told = zip(logs, self.states(), strict=True)
        return [log.read_text(errors="replace")[-3000:] for log, state in told if state == "failed"]

    def cancel(self) -> None:
        self.close()

    def close(self) -> None:
        for client in self._clients:
            client.terminate()
        for client in self._clients:
            client.wait(10)


class Operator(Launch):
    """A DAG with one SSHRemoteJobOperator per host; the part that the user sees is each task."""

    @property
    def _dag(self) -> str:
        return f"bench_remote_job_{self.wanted.num_hosts}"

    def begin(self) -> None:
        hosts = self.world.cluster.hosts[: self.wanted.num_hosts]
        commands = torchrun(hosts, self.wanted)
        nodes = [
            {"connection": host.connection_id, "command": command}
            for host, command in zip(hosts, commands, strict=True)
        ]
        self.world.api.trigger(self._dag, self.wanted.mark, {"nodes": nodes})

    def states(self) -> list[str]:
        return [str(task["state"]) for task in self.world.api.tasks(self._dag, self.wanted.mark).values()]

    def messages(self) -> list[str]:
        """Return the error of each failed task; what the remote command printed is further up in its log."""
        return [_error(log) for log in self._logs()]

    def logs(self) -> list[str]:
        return ["\n".join(str(line.get("event")) for line in log) for log in self._logs()]

    def _logs(self) -> list[list[dict[str, object]]]:
        tasks = self.world.api.tasks(self._dag, self.wanted.mark)
        failed = [name for name, task in tasks.items() if task["state"] == "failed"]
        return [self.world.api.log(self._dag, self.wanted.mark, name) for name in failed]

    def cancel(self) -> None:
        for name, task in self.world.api.tasks(self._dag, self.wanted.mark).items():
            if task["state"] not in _OVER:
                self.world.api.mark_failed(self._dag, self.wanted.mark, name)

    def close(self) -> None:
        """Wait until the run is over."""
        _await_run(self.world, self._dag, self.wanted.mark)


def _await_run(world: World, dag: str, run_id: str) -> None:
    until(lambda: world.api.run_state(dag, run_id) in _OVER, wait_s=60)


def _error(log: Sequence[Mapping[str, object]]) -> str:
    """Return the message of the exception that ended a task."""
    for line in reversed(log):
        details = line.get("error_detail")
        if isinstance(details, list) and details:
            return str(details[0].get("exc_value"))
    return ""


def _seconds(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()
