"""One cluster for the session, and one stack that drives it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taas_tasks.stack import Stack
from tests.cluster.cluster import ROOT, Cluster
from tests.cluster.podman import why_not
from tests.cluster.runs import ClusterRuns


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, and skip them where no cluster can be made."""
    mine = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = why_not() if mine else None
    for item in mine:
        item.add_marker(pytest.mark.cluster)
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"no cluster on this machine: {reason}"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Five hosts of their own."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture(scope="session")
def runs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterRuns]:
    """What the tests do with runs on a stack that drives the cluster."""
    inventory, connections = with_a_stranger(cluster)
    stack = Stack(
        tmp_path_factory.mktemp("stack"),
        inventory=inventory,
        connections=connections,
        s3_address=cluster.gateway,
        supervise=True,
    )
    try:
        stack.up()
        with ClusterRuns(stack, cluster) as found:
            yield found
    finally:
        stack.down()
        stack.drop_database()


def with_a_stranger(cluster: Cluster) -> tuple[dict[str, Any], dict[str, str]]:
    """Return inventory and connections with one host more (g1.1), whose pinned key is another's."""
    hosts, connections = cluster.inventory()["hosts"], cluster.connections()
    real = next(host for host in hosts if host["name"] == "g2-0")
    stranger = {**real, "name": "stranger", "flavor": "g1.1", "connection_id": "stranger", "root": f"{ROOT}/stranger"}
    wrong = json.loads(connections["AIRFLOW_CONN_CLUSTER_G2_0"])
    wrong["extra"]["host_key"] = cluster.host("g2-1").host_key
    return {"hosts": [*hosts, stranger]}, {**connections, "AIRFLOW_CONN_STRANGER": json.dumps(wrong)}
