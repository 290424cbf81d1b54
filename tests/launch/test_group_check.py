from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from taas_tasks.launch import group_check, network
from taas_tasks.launch.aside import Aside, AsideFailed
from taas_tasks.launch.group_run import GroupReport, GroupSpec, Peer, check_group
from taas_tasks.launch.preflight import NodeInfo
from taas_tasks.launch.rendezvous import host_store, join_store
from tests.launch.test_preflight import info

Specs = dict[int, GroupSpec]


def specs(size: int, port: int, **given: Any) -> Specs:
    peers = [Peer(host=f"h{node_rank}", address="127.0.0.1") for node_rank in range(size)]
    common: dict[str, Any] = {"port": port, "generation": 1, "meet_s": 60.0, "timeout_s": 20.0}
    return {rank: GroupSpec(peers=peers, node_rank=rank, **{**common, **given}) for rank in range(size)}


def run_all(specs: Specs, folder: Path, targets: dict[int, Any] | None = None) -> dict[int, GroupReport]:
    """Run the check's process of each node; all come from one fork server."""
    with ExitStack() as stack:
        asides = {
            rank: stack.enter_context(
                Aside(
                    (targets or {}).get(rank, group_check.run), spec.model_dump_json(), 0, folder=folder, name=f"{rank}"
                )
            )
            for rank, spec in specs.items()
        }
        return {rank: GroupReport.model_validate_json(aside.wait(timeout_s=60)) for rank, aside in asides.items()}


def ends_after_mesh(spec_json: str, local_rank: int) -> str:
    spec = GroupSpec.model_validate_json(spec_json)
    store = TCPStore("127.0.0.1", spec.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
    group_check._mesh(spec, PrefixStore(f"taas-group-check-{spec.generation}", store))
    return GroupReport().model_dump_json()


@pytest.mark.usefixtures("fork_server")
def test_nodes_that_reach_each_other_have_no_findings_and_tell_how_fast_they_are(tmp_path: Path) -> None:
    store = host_store("127.0.0.1")
    reports = run_all(specs(3, store.port), tmp_path)
    for report in reports.values():
        assert report.findings == {}
        assert report.gloo_ms is not None
        assert report.gloo_ms > 0
        assert report.gloo_mb_per_s is not None
        assert report.gloo_mb_per_s > 0
        assert report.nccl_ms is None


@pytest.mark.usefixtures("fork_server")
def test_node_that_another_cannot_reach_is_named_to_all(tmp_path: Path) -> None:
    store = host_store("127.0.0.1")
    given = specs(3, store.port, timeout_s=3.0)
    elsewhere = [*given[0].peers[:2], Peer(host="h2", address="127.0.0.9")]  # nothing listens there
    given[0] = given[0].model_copy(update={"peers": elsewhere})
    reports = run_all(given, tmp_path)
    assert reports[0].findings == reports[1].findings == reports[2].findings
    assert list(reports[1].findings) == [0]
    assert "cannot connect to node 2 (h2) at 127.0.0.9" in reports[1].findings[0][0]


@pytest.mark.usefixtures("fork_server")
def test_node_whose_process_dies_in_the_all_reduce_is_named(tmp_path: Path) -> None:
    store = host_store("127.0.0.1")
    reports = run_all(specs(2, store.port, timeout_s=2.0), tmp_path, {1: ends_after_mesh})
    assert "nothing was heard of it for 4 s" in reports[0].findings[1][0]
    assert "an all-reduce over gloo with 2 node(s) by interface lo failed" in reports[0].findings[0][0]


@pytest.mark.usefixtures("fork_server")
def test_node_that_does_not_come_is_named_after_a_bounded_time(tmp_path: Path) -> None:
    store = host_store("127.0.0.1")
    nodes: list[NodeInfo] = [info(0, port=store.port), info(1)]
    report = check_group(
        nodes, node_rank=0, num_gpus=0, generation=1, folder=tmp_path, check=lambda: None, timeout_s=1, meet_s=1
    )
    assert list(report.findings) == [1]
    assert "did not come" in report.findings[1][0]


@pytest.mark.usefixtures("fork_server")
def test_process_that_fails_is_told_with_its_reason(tmp_path: Path) -> None:
    with Aside(group_check.run, "no json", 0, folder=tmp_path, name="x") as aside, pytest.raises(AsideFailed) as caught:
        aside.wait(timeout_s=60)
    assert "ValidationError" in str(caught.value)


def test_rendezvous_store_serves_on_after_connections_that_say_nothing() -> None:
    store = host_store("127.0.0.1")
    for number in range(20):
        assert network.connect_findings(address="127.0.0.1", master="127.0.0.1", port=store.port) == []
        join_store("127.0.0.1", store.port).set(f"key-{number}", "x")
        assert store.get(f"key-{number}") == b"x"
