"""A cluster on one machine: hosts with addresses, files and processes of their own, and an SSH server each.

Each host is a container of ``docker/host``'s image on a network that this makes. What happens to real hosts can be done
to them: they die, freeze, come back, and their network falls silent. Needs podman as root (``why_not``).
"""

from __future__ import annotations

import ipaddress
import json
import random
import secrets
import shlex
import socket
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh

from taas_tasks.compute.ssh import SshAddress
from taas_tasks.stack import processes
from tests.cluster import remains
from tests.cluster.image import image
from tests.cluster.podman import PodmanError, podman

USER = "taas"
PORT = 22
ROOT = "/srv/taas"
PYTHON = "/opt/taas/bin/python"
GPU_FLAVORS = ("g2.2", "g2.1", "g2.8")
_FIRST_HOST = 11
_READY_S = 30.0
_SHM = "1g"
_MEMORY = "4g"
_NOT_ITSELF = {"INPUT": ("!", "-i", "lo"), "OUTPUT": ("!", "-o", "lo")}
_random = random.SystemRandom()  # processes that seed ``random`` alike must not draw the same subnets


@dataclass(frozen=True)
class ClusterHost:
    """A host, and how one logs in. ``flavor``: the one whose name the host bears (GPU hosts serve ``GPU_FLAVORS``)."""

    name: str
    flavor: str
    address: str
    container: str
    private_key: str = field(repr=False)
    host_key: str
    port: int = PORT
    user: str = USER

    @property
    def connection_id(self) -> str:
        """The id of its Airflow connection."""
        return f"cluster_{self.name.replace('-', '_')}"


@dataclass(frozen=True)
class Found:
    """A process on a host."""

    host: str
    pid: int
    command: str


class Cluster:
    """A context manager; its hosts can be logged in to when it is entered, and are gone when it is left."""

    def __init__(self, folder: Path, *, num_cpu_hosts: int = 3, num_gpu_hosts: int = 2) -> None:
        """Describe a cluster; nothing is started here.

        Args:
            folder: Keys are kept there; must not be one that others read.
            num_cpu_hosts: Of the flavor c1.4, named c1-0, c1-1, ...
            num_gpu_hosts: GPU hosts (emulated on CPUs), named g2-0, g2-1, ...
        """
        self._folder = folder
        self._names = [f"c1-{n}" for n in range(num_cpu_hosts)] + [f"g2-{n}" for n in range(num_gpu_hosts)]
        self._key = asyncssh.generate_private_key("ssh-ed25519")
        self._mark = f"taas-{secrets.token_hex(4)}"
        self._exit = ExitStack()
        self.hosts: list[ClusterHost] = []
        self.gateway = ""

    def __enter__(self) -> Cluster:
        remains.remove()
        with ExitStack() as started:
            name = image()
            subnet = started.enter_context(_network(self._mark))
            self.gateway = str(subnet[1])
            self.hosts = [
                self._describe(host, str(subnet[_FIRST_HOST + place])) for place, host in enumerate(self._names)
            ]
            started.callback(remains.remove_containers, self._mark)
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda host: self._create(host, name), self.hosts))
            self.wait_for(*(host.name for host in self.hosts))
            self._exit = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    # --- what others need to know ---

    def host(self, name: str) -> ClusterHost:
        """Return the host of that name."""
        return next(host for host in self.hosts if host.name == name)

    def inventory(self) -> dict[str, Any]:
        """Return the hosts as TaaS's inventory. GPU hosts are in it once for each flavor, below a folder of its own."""
        return {"hosts": [line for host in self.hosts for line in _inventory_lines(host)]}

    def address(self, name: str) -> SshAddress:
        """Return how the engine's transport logs in to a host."""
        host = self.host(name)
        return SshAddress(
            connection_id=host.connection_id,
            host=host.address,
            port=host.port,
            user=host.user,
            private_key=host.private_key,
            host_key=host.host_key,
        )

    def connections(self) -> dict[str, str]:
        """Return Airflow's connections to the hosts as environment variables."""
        return {
            f"AIRFLOW_CONN_{host.connection_id.upper()}": json.dumps(
                {
                    "conn_type": "ssh",
                    "host": host.address,
                    "port": host.port,
                    "login": host.user,
                    "extra": {"private_key": host.private_key, "host_key": host.host_key},
                }
            )
            for host in self.hosts
        }

    # --- what can be done on hosts ---

    def exec(self, name: str, argv: Sequence[str], *, user: str = "root", wait_s: float = 30) -> str:
        """Run a command on a host, not over its network, and return what it printed.

        Raises:
            PodmanError: it failed.
        """
        return podman("exec", "--user", user, self.host(name).container, *argv, wait_s=wait_s)

    def kill(self, name: str) -> None:
        """Kill all of a host at once, as a power cut does; its disk stays."""
        podman("kill", "--signal", "KILL", self.host(name).container)
        podman("wait", self.host(name).container)

    def start(self, name: str) -> None:
        """Start a host that was killed; returns when one can log in."""
        podman("start", self.host(name).container)
        self.wait_for(name)

    def pause(self, name: str) -> None:
        """Freeze every process of a host; connections to it stay open and silent."""
        podman("pause", self.host(name).container)

    def unpause(self, name: str) -> None:
        """Let them go on."""
        podman("unpause", self.host(name).container)

    def cut_network(self, name: str) -> None:
        """Drop every packet from and to a host, silently: nobody is told, and its processes go on."""
        for chain, what in _NOT_ITSELF.items():
            self._in_network_of(name, "iptables", "-w", "-A", chain, *what, "-j", "DROP")

    def mend_network(self, name: str) -> None:
        """Let packets through again."""
        for chain, what in _NOT_ITSELF.items():
            self._in_network_of(name, "iptables", "-w", "-D", chain, *what, "-j", "DROP")

    def drop_ssh(self, name: str) -> None:
        """End every SSH connection of a host; the server stays."""
        self.exec(name, ["sh", "-c", "pkill -KILL -f '^sshd: [t]aas' || test $? = 1"])

    def wait_for(self, *names: str) -> None:
        """Wait until SSH servers answer."""
        for name in names:
            host = self.host(name)
            ready = processes.wait_until(lambda host=host: _answers(host), timeout_s=_READY_S)  # type: ignore[misc]
            assert ready, f"{name} does not answer:\n{podman('logs', '--tail', '20', host.container)}"

    def processes_of(self, *marks: str) -> list[Found]:
        """Return every process on any running host that bears one of the words in its environment or command line."""
        wanted = [mark.encode() for mark in marks]
        found = []
        for host in self.hosts:
            for pid in _processes_in(host.container):
                words = [_read(pid, "cmdline"), _read(pid, "environ")]
                if any(mark in each for mark in wanted for each in words):
                    found.append(Found(host.name, pid, words[0].replace(b"\0", b" ").decode(errors="replace")))
        return found

    # --- how ---

    def _describe(self, name: str, address: str) -> ClusterHost:
        key = asyncssh.generate_private_key("ssh-ed25519")
        keys = self._folder / name
        keys.mkdir(parents=True, mode=0o700)
        for path, text, mode in (
            (keys / "host", key.export_private_key().decode(), 0o600),
            (keys / "authorized_keys", self._key.export_public_key().decode(), 0o644),
        ):
            path.touch(mode=mode)
            path.write_text(text)
        keys.chmod(0o755)
        return ClusterHost(
            name=name,
            flavor="c1.4" if name.startswith("c1") else GPU_FLAVORS[0],
            address=address,
            container=f"{self._mark}-{name}",
            private_key=self._key.export_private_key().decode(),
            host_key=" ".join(key.export_public_key().decode().split()[:2]),
        )

    def _create(self, host: ClusterHost, image_name: str) -> None:
        podman(
            "run",
            "--detach",
            *("--name", host.container, "--hostname", host.name, "--network", self._mark, "--ip", host.address),
            *remains.labels(self._mark),
            *("--shm-size", _SHM, "--memory", _MEMORY, "--memory-swap", _MEMORY, "--tmpfs", "/tmp:rw,mode=1777"),
            *("--volume", f"{self._folder / host.name}:/etc/ssh/keys:ro"),
            image_name,
        )

    def _in_network_of(self, name: str, *argv: str) -> None:
        pid = podman("inspect", "--format", "{{.State.Pid}}", self.host(name).container)
        command = ["nsenter", "--net", f"--target={pid}", *argv]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode != 0:
            raise PodmanError(f"{shlex.join(command)}: {done.stderr.strip()}")


@contextmanager
def _network(mark: str) -> Iterator[ipaddress.IPv4Network]:
    """Make a network of a subnet that nobody uses."""
    for _ in range(20):
        subnet = ipaddress.IPv4Network(f"10.{_random.randint(100, 250)}.{_random.randint(0, 255)}.0/24")
        try:
            podman("network", "create", "--subnet", str(subnet), "--disable-dns", *remains.labels(mark), mark)
        except PodmanError as error:
            if "already used" not in str(error):
                raise
            continue
        try:
            yield subnet
        finally:
            podman("network", "rm", "--force", mark)
        return
    raise PodmanError("20 private subnets drawn at random were all in use")


def _inventory_lines(host: ClusterHost) -> list[dict[str, Any]]:
    is_gpu = host.name.startswith("g2")
    line = {
        "name": host.name,
        "flavor": host.flavor,
        "transport": "ssh",
        "address": host.address,
        "root": ROOT,
        "python": PYTHON,
        "connection_id": host.connection_id,
        "emulate_gpus": is_gpu,
    }
    others = GPU_FLAVORS[1:] if is_gpu else ()
    more = [{**line, "name": f"{host.name}-{each}", "flavor": each, "root": f"{ROOT}/{each}"} for each in others]
    return [line, *more]


def _answers(host: ClusterHost) -> bool:
    try:
        with socket.create_connection((host.address, host.port), timeout=1) as connection:
            connection.settimeout(1)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _processes_in(container: str) -> list[int]:
    """Return the processes of a container by their pids outside; also while it is frozen."""
    first = podman("inspect", "--format", "{{.State.Pid}}", container)
    if first == "0":
        return []
    namespace = _namespace(first)
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if namespace and _namespace(path.name) == namespace]


def _namespace(pid: str) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return None


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
