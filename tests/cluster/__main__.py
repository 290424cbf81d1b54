"""A cluster to try by hand: ``python -m tests.cluster up`` (as root) makes hosts and a stack that drives them."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from taas_tasks.stack import Stack
from tests.cluster.cluster import Cluster
from tests.cluster.podman import why_not


def main() -> int:
    """Run until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("command", choices=["up"])
    parser.add_argument("--root", type=Path, default=Path("var/cluster"), help="the folder of the stack (var/cluster)")
    asked = parser.parse_args()
    if reason := why_not():
        print(f"no cluster can be made here: {reason}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        serve(cluster, asked.root)
    return 0


def serve(cluster: Cluster, root: Path) -> None:
    """Start a stack on the cluster, say where it is, and stop it when we are interrupted."""
    stack = Stack(
        root,
        inventory=cluster.inventory(),
        connections=cluster.connections(),
        s3_address=cluster.gateway,
        supervise=True,
    )
    try:
        stack.up()
        user, password = stack.login
        print(f"Airflow  {stack.url}   user {user}, password {password}")
        for host in cluster.hosts:
            print(f"{host.name:8} {host.address:15} podman kill|start|pause|unpause {host.container}")
        print("Ctrl-C ends everything", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        print("stopping")
    finally:
        stack.down()


if __name__ == "__main__":
    sys.exit(main())
