"""Preflight: is every host fit for the training, and are they equal where they must be? All findings at once.

Each node puts what it knows of itself into the store and waits for the others; every node comes to the same verdict.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from fcntl import ioctl
from pathlib import Path
from typing import Literal

from taas.errors import ObjectMissing, PreflightFailed
from taas.flavors import FLAVORS
from taas_tasks.launch import clock, network
from taas_tasks.launch.group_run import GroupReport
from taas_tasks.layout import RunKeys
from taas_tasks.result_values import Measured
from taas_tasks.store.base import ObjectStore
from taas_tasks.values import LaunchPlan, Value, Versions

_COMPARED_PACKAGES = ("torch", "numpy", "pytorch-lightning", "lightning", "pyarrow", "cloudpickle", "taas")
_MIN_DISK_BYTES = 1 << 30
_MIN_SHM_BYTES_PER_RANK = 64 << 20
_SIOCGIFADDR = 0x8915


class NodeInfo(Value):
    """What a node says of itself before the start. ``port``: where node 0 serves the rendezvous."""

    version: Literal[1] = 1
    node_rank: int
    host: str
    address: str
    port: int | None = None
    versions: Versions
    num_gpus: int
    gpu_model: str | None = None
    disk_free_bytes: int
    shm_bytes: int
    interface: str | None = None
    clock_skew_s: float = 0.0
    findings: list[str] = []


def installed_versions() -> Versions:
    """Return the versions that must agree between the nodes of a gang."""
    packages = {name: found for name in _COMPARED_PACKAGES if (found := _version(name)) is not None}
    return Versions(python=platform.python_version(), torch=packages.get("torch"), packages=packages)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def interface_of(address: str) -> str | None:
    """Return the network interface that has the IPv4 address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return "lo" if address.startswith("127.") else None


def own_findings(plan: LaunchPlan, info: NodeInfo, *, guard: str | None) -> list[str]:
    """Return what makes this node alone unfit, each with what was got, what is needed and how to mend it."""
    found = []
    if not plan.emulate_gpus and info.num_gpus < plan.nproc_per_node:
        found.append(
            f"{info.num_gpus} GPUs are visible, {plan.flavor} has {plan.nproc_per_node}: check the driver and"
            " CUDA_VISIBLE_DEVICES"
        )
    model = FLAVORS[plan.flavor].gpu_model if plan.flavor in FLAVORS else None
    if not plan.emulate_gpus and model and info.gpu_model and model.lower() not in info.gpu_model.lower():
        found.append(f"the GPUs are {info.gpu_model}, {plan.flavor} has {model}: the inventory names the wrong flavor")
    if info.disk_free_bytes < _MIN_DISK_BYTES:
        found.append(f"{info.disk_free_bytes >> 20} MB of disk are free, 1024 MB are needed: clear the host's folder")
    needed = _MIN_SHM_BYTES_PER_RANK * plan.nproc_per_node
    if info.shm_bytes < needed:
        found.append(
            f"/dev/shm has {info.shm_bytes >> 20} MB, {needed >> 20} MB are needed: mount it larger (--shm-size)"
        )
    found += clock.findings(info.clock_skew_s)
    if not network.can_bind(info.address):
        found.append(f"the address {info.address} is not one of this host: mend it in the inventory")
    if guard is None and plan.other_ranks == "refuse":
        found.append(
            "no way to keep other ranks from writing the project folder works here (mount or user namespaces,"
            ' Landlock): allow one of them, or ask for other_ranks: "scratch"'
        )
    return found


def reach_findings(info: NodeInfo, first: NodeInfo) -> list[str]:
    """Return why this node's ranks could not talk to node 0, whose rendezvous is served by now."""
    if info.node_rank == 0:
        return []
    source = network.source_address(first.address)
    found = network.route_findings(address=info.address, master=first.address, source=source)
    return found or network.connect_findings(address=info.address, master=first.address, port=int(first.port or 0))


def differences(infos: Sequence[NodeInfo]) -> list[tuple[NodeInfo, str]]:
    """Return where nodes differ that must agree, said of each node that is not like node 0."""
    first = infos[0]
    found = []
    for info in infos[1:]:
        wanted = {"python": first.versions.python, **first.versions.packages}
        got = {"python": info.versions.python, **info.versions.packages}
        for name in sorted(wanted.keys() | got.keys()):
            if wanted.get(name) != got.get(name):
                text = f"{name} is {got.get(name, 'missing')}, on {first.host} it is {wanted.get(name, 'missing')}"
                found.append((info, f"{text}: install the same versions on every host"))
    return found


def judge(infos: Sequence[NodeInfo]) -> None:
    """Raise ``PreflightFailed`` with every finding of every node, if there is one."""
    findings: dict[str, list[str]] = defaultdict(list)
    for info in infos:
        findings[_name(info)] += info.findings
    for info, text in differences(infos):
        findings[_name(info)].append(text)
    found = {name: texts for name, texts in findings.items() if texts}
    if found:
        lines = [f"{name}: {text}" for name, texts in found.items() for text in texts]
        raise PreflightFailed("the hosts are not fit for the training: " + "; ".join(lines), findings=found)


def measured(info: NodeInfo, report: GroupReport | None) -> Measured:
    """Return what the check has measured on this node, for its result."""
    speeds = report.model_dump(exclude={"findings"}) if report is not None else {}
    return Measured(interface=info.interface, clock_skew_s=info.clock_skew_s, **speeds)


def _name(info: NodeInfo) -> str:
    return f"{info.host} (node {info.node_rank})"


def shm_bytes() -> int:
    """Return the size of /dev/shm, 0 where there is none."""
    return shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0


def exchange(
    store: ObjectStore,
    info: NodeInfo,
    *,
    run: str,
    generation: int,
    nnodes: int,
    timeout_s: float,
    second: bool = False,
    check: Callable[[], None] = lambda: None,
    sleep: Callable[[float], None] = time.sleep,
) -> list[NodeInfo]:
    """Publish this node's information and return that of all nodes, in the order of their node ranks.

    ``second``: this is the round after each node has tried to reach node 0.
    ``check`` is called between looks and raises when there is a reason to wait no longer.

    Raises:
        PreflightFailed: A node said nothing within ``timeout_s``.
    """
    key = RunKeys(run).node_reach if second else RunKeys(run).node_info
    store.put(key(generation, info.node_rank), info.to_bytes())
    found = {info.node_rank: info}
    deadline = time.monotonic() + timeout_s
    pause_s = 0.05
    while True:
        for node_rank in set(range(nnodes)) - found.keys():
            try:
                data = store.get(key(generation, node_rank))
            except ObjectMissing:
                continue
            found[node_rank] = NodeInfo.model_validate_json(data)
        if len(found) == nnodes:
            return [found[node_rank] for node_rank in range(nnodes)]
        check()
        if time.monotonic() > deadline:
            raise _missing(sorted(set(range(nnodes)) - found.keys()), timeout_s)
        sleep(pause_s)
        pause_s = min(0.5, pause_s * 1.5)


def _missing(node_ranks: list[int], timeout_s: float) -> PreflightFailed:
    names = ", ".join(f"node {node_rank}" for node_rank in node_ranks)
    text = f"said nothing within {timeout_s:.0f} s: its node agent did not start, or cannot reach the object store"
    return PreflightFailed(f"{names} {text}", findings={f"node {rank}": [text] for rank in node_ranks})
