"""The node agent's side of the check of the group: what its processes are given, and what they say. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from taas_tasks.launch.aside import Aside, AsideFailed
from taas_tasks.result_values import GroupSpeeds
from taas_tasks.values import Value

Findings = dict[int, list[str]]


class Peer(Value):
    """A node of the gang."""

    host: str
    address: str


class GroupSpec(Value):
    """What every process of the check must know. ``port``: of the rendezvous' store on node 0.

    ``meet_s`` bounds the wait for the processes of other nodes, which start when their fork servers have imported;
    ``timeout_s`` each connection and each group.
    """

    peers: list[Peer]
    node_rank: int
    port: int
    num_gpus: int = 0  # of each node; 0: no NCCL
    generation: int
    meet_s: float = 120.0
    timeout_s: float = 30.0


class GroupReport(GroupSpeeds):
    """What the check found: findings by node rank, and how fast the groups were."""

    findings: Findings = {}


class _Node(Protocol):
    """What must be known of a node."""

    @property
    def host(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def port(self) -> int | None: ...


def check_group(
    nodes: Sequence[_Node],
    *,
    node_rank: int,
    num_gpus: int,
    generation: int,
    folder: Path,
    check: Callable[[], None],
    timeout_s: float = 30.0,
    meet_s: float = 120.0,
) -> GroupReport:
    """Run this node's processes of the check and return the report of its first one, with what killed the others."""
    from taas_tasks.launch import group_check

    spec = GroupSpec(
        peers=[Peer(host=node.host, address=node.address) for node in nodes],
        node_rank=node_rank,
        port=int(nodes[0].port or 0),
        num_gpus=num_gpus,
        generation=generation,
        timeout_s=timeout_s,
        meet_s=meet_s,
    )
    with ExitStack() as stack:
        asides = [
            stack.enter_context(
                Aside(group_check.run, spec.model_dump_json(), local_rank, folder=folder, name=f"group-{local_rank}")
            )
            for local_rank in range(max(1, num_gpus))
        ]
        reports, died = [], []
        for local_rank, aside in enumerate(asides):
            try:
                said = aside.wait(timeout_s=meet_s + 8 * timeout_s, check=check)
                reports.append(GroupReport.model_validate_json(said))
            except AsideFailed as failed:
                died.append(f"process {local_rank} of the check of the group failed: {failed}")
    return _with(reports, node_rank, died)


def _with(reports: Sequence[GroupReport], node_rank: int, died: list[str]) -> GroupReport:
    report = reports[0] if reports else GroupReport()
    if not died:
        return report
    findings = {**report.findings, node_rank: [*report.findings.get(node_rank, []), *died]}
    return report.model_copy(update={"findings": findings})
