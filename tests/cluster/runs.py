"""What the cluster's tests do with runs: those of the end-to-end tests, and what happens on the hosts."""

from __future__ import annotations

from tests.cluster.cluster import Cluster, Found
from taas_tasks.compute.inventory import Host, Inventory
from taas_tasks.stack import Stack
from tests.e2e.runs import Runs


class ClusterRuns(Runs):
    """A client of a stack that drives a cluster."""

    def __init__(self, stack: Stack, cluster: Cluster) -> None:
        super().__init__(stack)
        self.cluster = cluster
