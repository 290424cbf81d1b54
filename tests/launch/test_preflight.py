from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from taas.errors import PreflightFailed, RunCancelled
from taas_tasks.launch.preflight import NodeInfo, exchange, interface_of, judge, own_findings, reach_findings
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import LaunchPlan, Versions


def info(node_rank: int = 0, **given: Any) -> NodeInfo:
    versions = Versions(python="3.11.2", torch="2.13.0", packages={"torch": "2.13.0"})
    common: dict[str, Any] = {"host": f"h{node_rank}", "address": "127.0.0.1", "versions": versions, "num_gpus": 8}
    sizes = {"disk_free_bytes": 1 << 40, "shm_bytes": 1 << 40}
    return NodeInfo(node_rank=node_rank, **{**common, **sizes, **given})


def plan(**given: Any) -> LaunchPlan:
    common: dict[str, Any] = {"run": "r", "run_id": "r", "project": "p", "snapshot": "s", "generation": 1, "nnodes": 2}
    sizes = {"nproc_per_node": 8, "flavor": "g2.8", "emulate_gpus": False, "seed": 0, "cache_bytes": 1}
    return LaunchPlan(**{**common, **sizes, **given})


def test_fit_host_has_no_findings() -> None:
    assert own_findings(plan(), info(gpu_model="NVIDIA A100-SXM4-80GB"), guard="mount") == []


def test_every_fault_of_a_host_is_found_at_once() -> None:
    sizes: dict[str, Any] = {"disk_free_bytes": 1, "shm_bytes": 1, "clock_skew_s": 1000.0}
    unfit = info(num_gpus=7, gpu_model="Tesla V100", address="192.0.2.1", **sizes)
    found = own_findings(plan(), unfit, guard=None)
    for text in ("7 GPUs", "Tesla V100", "disk", "/dev/shm", "192.0.2.1", "project folder", "clock"):
        assert any(text in line for line in found), text
    assert len(found) == 7


def test_gpus_are_not_asked_for_where_they_are_emulated() -> None:
    assert own_findings(plan(emulate_gpus=True), info(num_gpus=0), guard="mount") == []


def test_host_without_a_write_guard_serves_for_scratch() -> None:
    assert own_findings(plan(other_ranks="scratch", emulate_gpus=True), info(), guard=None) == []


def test_different_versions_and_all_findings_are_told_together() -> None:
    other = Versions(python="3.12.1", torch="2.12.0", packages={"torch": "2.12.0"})
    with pytest.raises(PreflightFailed) as caught:
        judge([info(0, findings=["no disk"]), info(1, versions=other)])
    assert caught.value.fields["findings"]["h0 (node 0)"] == ["no disk"]
    about_1 = caught.value.fields["findings"]["h1 (node 1)"]
    assert any("torch is 2.12.0, on h0 it is 2.13.0" in line for line in about_1)
    assert any("python is 3.12.1" in line for line in about_1)


def test_equal_fit_hosts_pass() -> None:
    judge([info(0), info(1)])


def test_nodes_find_each_other() -> None:
    store = MemoryStore()
    found: dict[int, list[NodeInfo]] = {}

    def one(node_rank: int) -> None:
        found[node_rank] = exchange(store, info(node_rank), run="r", generation=1, nnodes=3, timeout_s=10)

    threads = [threading.Thread(target=one, args=(node_rank,)) for node_rank in (2, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [node.host for node in found[1]] == ["h0", "h1", "h2"]
    assert found[0] == found[1] == found[2]


def test_node_that_does_not_come_is_named() -> None:
    with pytest.raises(PreflightFailed, match="node 1 said nothing"):
        exchange(MemoryStore(), info(0), run="r", generation=1, nnodes=2, timeout_s=0.2)


def test_reason_to_stop_ends_the_wait() -> None:
    def aborted() -> None:
        raise RunCancelled("no")

    with pytest.raises(RunCancelled):
        exchange(MemoryStore(), info(0), run="r", generation=1, nnodes=2, timeout_s=10, check=aborted)


def test_interface_of_the_loopback_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


def test_faults_of_two_hosts_of_four_are_both_in_the_message() -> None:
    with pytest.raises(PreflightFailed) as caught:
        judge([info(0), info(1, findings=["no disk"]), info(2), info(3, findings=["no GPU"])])
    assert "h1 (node 1): no disk" in str(caught.value)
    assert "h3 (node 3): no GPU" in str(caught.value)
    assert set(caught.value.fields["findings"]) == {"h1 (node 1)", "h3 (node 3)"}


def test_node_that_cannot_connect_to_node_0_says_so_and_node_0_does_not_try() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = info(0, port=server.getsockname()[1])
        assert reach_findings(info(1), first) == []
    (found,) = reach_findings(info(1), first)
    assert "cannot connect to node 0" in found
    assert reach_findings(first, first) == []


def test_second_round_is_told_apart_from_the_first() -> None:
    store = MemoryStore()
    given: dict[str, Any] = {"run": "r", "generation": 1, "nnodes": 1, "timeout_s": 1.0}
    exchange(store, info(0), **given)
    (told,) = exchange(store, info(0, findings=["x"]), second=True, **given)
    assert told.findings == ["x"]
