"""What a cluster leaves behind when its process was killed: found by labels, and removed by whoever comes next."""

from __future__ import annotations

import json
import os

from taas_tasks.stack.processes import ProcessId
from tests.cluster.podman import podman

_OWNER, _CLUSTER = "taas.owner", "taas.cluster"


def labels(cluster: str) -> list[str]:
    """Return the options that mark a container or network as a cluster's and as this process's."""
    me = ProcessId.of(os.getpid())
    assert me is not None
    return ["--label", f"{_CLUSTER}={cluster}", "--label", f"{_OWNER}={me.pid}.{me.started_ticks}"]


def remove() -> None:
    """Remove what belongs to clusters whose process has ended."""
    containers = json.loads(podman("ps", "--all", "--filter", f"label={_OWNER}", "--format", "json") or "[]")
    for container in containers:
        if _is_orphan(container["Labels"][_OWNER]):
            _remove_container(container["Id"])
    for network in json.loads(podman("network", "ls", "--filter", f"label={_OWNER}", "--format", "json") or "[]"):
        if _is_orphan(network["labels"][_OWNER]):
            podman("network", "rm", "--force", network["name"])


def remove_containers(cluster: str) -> None:
    """Remove every container of a cluster."""
    for container in podman("ps", "--all", "--quiet", "--filter", f"label={_CLUSTER}={cluster}").split():
        _remove_container(container)


def _remove_container(container: str) -> None:
    podman("rm", "--force", "--time", "0", container)


def _is_orphan(owner: str) -> bool:
    pid, _, started_ticks = owner.partition(".")
    return not ProcessId(int(pid), int(started_ticks)).is_alive()
