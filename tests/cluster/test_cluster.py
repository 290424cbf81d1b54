"""The hosts are what they are taken for: apart from each other, logged in to by key only, and they can break."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from taas.errors import HostRefused, HostUnreachable
from taas_tasks.compute.ssh import Patience, SshTransport
from tests.cluster.cluster import PYTHON, ROOT, Cluster
from tests.cluster.podman import podman
from tests.support.s3_server import running_s3_server

HASTY = Patience(connect_s=2.0, login_s=3.0, open_s=2.0, call_s=4.0)


def transport(cluster: Cluster, name: str, **changes: str) -> SshTransport:
    return SshTransport(cluster.address(name).model_copy(update=changes), Path(ROOT), python=PYTHON, patience=HASTY)


def test_each_host_has_its_own_name_address_and_processes(cluster: Cluster) -> None:
    names = [host.name for host in cluster.hosts]
    assert names == ["c1-0", "c1-1", "c1-2", "g2-0", "g2-1"]
    assert [cluster.exec(name, ["hostname"]) for name in names] == names
    assert len({host.address for host in cluster.hosts} | {cluster.gateway}) == 6
    mark = "a-sleeper-of-this-test"
    container = cluster.host("c1-1").container
    podman("exec", "--detach", "--env", f"MARK={mark}", container, "sleep", "60")
    assert [(one.host, one.command) for one in cluster.processes_of(mark)] == [("c1-1", "sleep 60 ")]
    cluster.exec("c1-1", ["pkill", "sleep"])
    assert cluster.processes_of(mark) == []


def test_hosts_have_python_and_torch_and_nothing_of_ours(cluster: Cluster) -> None:
    code = (
        "import importlib.util as u, sys, torch;"
        "print(sys.version_info[:2], torch.__version__.split('+')[0], *map(u.find_spec, ['taas', 'airflow']))"
    )
    assert cluster.exec("c1-0", [PYTHON, "-I", "-c", code], wait_s=90) == "(3, 11) 2.13.0 None None"


def test_a_verb_runs_on_a_host_and_the_engine_comes_along(cluster: Cluster) -> None:
    assert transport(cluster, "c1-0").call("slots", {})["slots"] == []


def test_another_hosts_key_is_refused(cluster: Cluster) -> None:
    with pytest.raises(HostRefused, match=r"host.*key"):
        transport(cluster, "c1-0", host_key=cluster.host("c1-1").host_key).call("slots", {})


def test_a_cut_network_is_silent_and_a_mended_one_works(cluster: Cluster) -> None:
    host = cluster.host("c1-2")
    before = transport(cluster, "c1-2")
    before.call("slots", {})
    cluster.cut_network("c1-2")
    try:
        began = time.monotonic()
        with pytest.raises(TimeoutError), socket.create_connection((host.address, host.port), timeout=1):
            pass
        assert time.monotonic() - began > 0.9  # nobody said no
        with pytest.raises(HostUnreachable):
            before.call("slots", {})
    finally:
        cluster.mend_network("c1-2")
    assert before.call("slots", {})["slots"] == []


def test_a_killed_host_comes_back_with_its_disk(cluster: Cluster) -> None:
    cluster.exec("c1-2", ["sh", "-c", f"echo kept > {ROOT}/note"], user="taas")
    cluster.kill("c1-2")
    with pytest.raises(OSError), socket.create_connection((cluster.host("c1-2").address, 22), timeout=1):
        pass
    cluster.start("c1-2")
    assert cluster.exec("c1-2", ["cat", f"{ROOT}/note"]) == "kept"
    assert transport(cluster, "c1-2").call("slots", {})["slots"] == []


def test_a_frozen_host_goes_on_where_it_was(cluster: Cluster) -> None:
    host = transport(cluster, "c1-2")
    host.call("slots", {})
    cluster.pause("c1-2")
    try:
        with pytest.raises(HostUnreachable):
            host.call("slots", {})
    finally:
        cluster.unpause("c1-2")
    assert host.call("slots", {})["slots"] == []


def test_ended_connections_are_replaced(cluster: Cluster) -> None:
    host = transport(cluster, "c1-2")
    host.call("slots", {})
    cluster.drop_ssh("c1-2")
    assert host.call("slots", {})["slots"] == []


def test_hosts_reach_an_s3_server_over_their_network(cluster: Cluster, tmp_path: Path) -> None:
    ask = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1] + '/healthz', timeout=5).status)"
    with running_s3_server(tmp_path, address=cluster.gateway) as server:
        assert cluster.exec("g2-1", [PYTHON, "-c", ask, str(server.config.endpoint_url)], user="taas") == "200"


def test_what_a_killed_process_left_is_removed_by_the_next_cluster(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\n"
        "from tests.cluster.cluster import Cluster\n"
        "with Cluster(pathlib.Path(sys.argv[1]), num_cpu_hosts=1, num_gpu_hosts=0) as cluster:\n"
        "    print(cluster.hosts[0].container, flush=True)\n"
        "    time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        container = owner.stdout.readline().strip()
        assert container
    finally:
        owner.kill()
        owner.communicate()
    with Cluster(tmp_path / "b", num_cpu_hosts=1, num_gpu_hosts=0) as cluster:
        names = podman("ps", "--all", "--format", "{{.Names}}").split()
        networks = podman("network", "ls", "--format", "{{.Name}}").split()
        assert container not in names
        assert container.removesuffix("-c1-0") not in networks
        assert cluster.hosts[0].container in names
        mine = cluster.hosts[0].container
    assert mine not in podman("ps", "--all", "--format", "{{.Names}}").split()
