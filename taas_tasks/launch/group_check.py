"""Can the processes of this training talk to each other? Tried by processes that live for this alone.

One process per node: it connects to every other node, so that who cannot reach whom is known by name, then forms a gloo
group as the ranks will (same environment, same interface) and reduces a small and a larger tensor. Where there are
GPUs, one process per GPU then does so over NCCL. Nodes tell each other what they found over the rendezvous' store, so
every node knows the findings of all.

The NCCL part follows torch's documentation and has not yet run on GPUs; what it measures is unproven until it has.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from taas_tasks.launch.group_run import Findings, GroupReport, GroupSpec
from taas_tasks.launch.network import connect_findings
from taas_tasks.launch.rendezvous import listen

SMALL_ROUNDS = 10
LARGE_BYTES = 8 << 20
LARGE_ROUNDS = 2
NCCL_BYTES = 256 << 20
NCCL_ROUNDS = 5
_kept: list[Any] = []
"""Groups are never freed: their destructors may hang, and the process leaves by ``os._exit``."""


def run(spec_json: str, local_rank: int) -> str:
    """Entry point of a process of the check; ``local_rank`` is 0 but for the further GPUs of a node."""
    spec = GroupSpec.model_validate_json(spec_json)
    master = spec.peers[0].address
    timeout = timedelta(seconds=spec.timeout_s)
    store = TCPStore(master, spec.port, is_master=False, wait_for_workers=False, timeout=timeout)
    own = PrefixStore(f"taas-group-check-{spec.generation}", store)
    return check(spec, own, local_rank=local_rank).model_dump_json()


def check(spec: GroupSpec, store: Store, *, local_rank: int = 0) -> GroupReport:
    """Take part in the check and return its report; the same findings on every node."""
    measured: dict[str, float] = {}
    if local_rank == 0 and len(spec.peers) > 1:
        for stage in (_mesh, _gloo):
            findings, numbers = stage(spec, store)
            measured |= numbers
            if findings:
                return GroupReport(findings=findings)
        store.set(f"over-gloo/{spec.node_rank}", "")
    if spec.num_gpus:
        findings, numbers = _nccl(spec, store, local_rank)
        measured |= numbers
        if findings:
            return GroupReport(findings=findings)
    return GroupReport(**measured)


def _mesh(spec: GroupSpec, store: Store) -> tuple[Findings, dict[str, float]]:
    """Connect to every other node, each way."""
    me = spec.peers[spec.node_rank]
    with listen(me.address) as listening:
        store.set(f"at/{spec.node_rank}", str(listening.getsockname()[1]))
        at = _hear(store, "at", range(len(spec.peers)), spec.meet_s)
        if missing := _missing(at, len(spec.peers), spec.meet_s):
            return missing, {}
        found = []
        for node_rank, peer in enumerate(spec.peers):
            if node_rank != spec.node_rank:
                port = int(at[node_rank])
                name = f"node {node_rank} ({peer.host})"
                limit_s = spec.timeout_s / len(spec.peers)
                found += connect_findings(
                    address=me.address, master=peer.address, port=port, name=name, timeout_s=limit_s
                )
        return _tell(spec, store, "mesh", found), {}


def _gloo(spec: GroupSpec, store: Store) -> tuple[Findings, dict[str, float]]:
    size = len(spec.peers)
    timeout = timedelta(seconds=spec.timeout_s)
    numbers: dict[str, float] = {}
    found: list[str] = []
    try:
        group: Any = dist.ProcessGroupGloo(PrefixStore("gloo", store), spec.node_rank, size, timeout)
        _kept.append(group)
        _must_sum(lambda tensor: group.allreduce([tensor]).wait(), spec.node_rank, size, device="cpu")
        small_s, large_s = _times(
            lambda tensor: group.allreduce([tensor]).wait(), LARGE_BYTES, LARGE_ROUNDS, device="cpu"
        )
        numbers = {"gloo_ms": small_s * 1e3, "gloo_mb_per_s": LARGE_BYTES / 1e6 / large_s}
    except Exception as error:  # noqa: BLE001  # torch raises RuntimeError, DistError and others
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "the default one")
        found.append(_sentence("gloo", interface, spec, error))
    # Nobody leaves before all have what they were sent.
    return _tell(spec, store, "gloo", found), numbers


def _nccl(spec: GroupSpec, store: Store, local_rank: int) -> tuple[Findings, dict[str, float]]:
    """All-reduce over all GPUs. Follows torch's documentation; unproven: it has not yet run on GPUs."""
    nnodes = len(spec.peers)
    if nnodes > 1 and len(_hear(store, "over-gloo", range(nnodes), spec.meet_s + 3 * spec.timeout_s)) < nnodes:
        return {}, {}  # the node's process 0 says why
    rank, size = spec.node_rank * spec.num_gpus + local_rank, nnodes * spec.num_gpus
    numbers: dict[str, float] = {}
    found: list[str] = []
    try:
        numbers = _measure_nccl(spec, store, rank=rank, size=size, local_rank=local_rank)
    except Exception as error:  # noqa: BLE001  # torch raises RuntimeError, DistError and others
        interface = os.environ.get("NCCL_SOCKET_IFNAME", "the default one")
        found.append(f"GPU {local_rank}: {_sentence('NCCL', interface, spec, error)}")
    store.set(f"nccl/{rank}", json.dumps(found))
    said = _hear(store, "nccl", range(size), 2 * spec.timeout_s)
    findings: Findings = {}
    for other in range(size):
        text = said.get(other)
        default = [f"GPU {other % spec.num_gpus} gave no sign of life in the all-reduce over NCCL"]
        if texts := default if text is None else json.loads(text):
            findings.setdefault(other // spec.num_gpus, []).extend(texts)
    return findings, numbers


def _measure_nccl(spec: GroupSpec, store: Store, *, rank: int, size: int, local_rank: int) -> dict[str, float]:
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a timeout is to raise, not to abort the process
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        store=PrefixStore("nccl-group", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=spec.timeout_s),
        device_id=device,
    )

    def reduce(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)
        torch.cuda.synchronize(device)

    _must_sum(reduce, rank, size, device=str(device))
    small_s, large_s = _times(reduce, NCCL_BYTES, NCCL_ROUNDS, device=str(device))
    # As nccl-tests count it: what an ideal ring moves over each link.
    bus_bytes = NCCL_BYTES * 2 * (size - 1) / size
    return {"nccl_ms": small_s * 1e3, "nccl_bus_gb_per_s": bus_bytes / 1e9 / large_s}


def _must_sum(reduce: Callable[[torch.Tensor], Any], rank: int, size: int, *, device: str) -> None:
    tensor = torch.full((1,), float(rank + 1), device=device)
    reduce(tensor)
    wanted = size * (size + 1) / 2
    if tensor.item() != wanted:
        raise RuntimeError(f"the sum over {size} processes was {tensor.item()}, not {wanted}")


def _times(
    reduce: Callable[[torch.Tensor], Any], num_bytes: int, num_rounds: int, *, device: str
) -> tuple[float, float]:
    """Return the seconds of an all-reduce of one number (median) and of ``num_bytes`` (the best after a first one)."""
    small = [_seconds(reduce, torch.ones(1, device=device)) for _ in range(SMALL_ROUNDS)]
    tensor = torch.zeros(num_bytes // 4, device=device)
    reduce(tensor)
    return statistics.median(small), min(_seconds(reduce, tensor) for _ in range(num_rounds))


def _seconds(reduce: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> float:
    before = time.perf_counter()
    reduce(tensor)
    return time.perf_counter() - before


def _tell(spec: GroupSpec, store: Store, stage: str, findings: list[str]) -> Findings:
    """Tell the other nodes, and return what all have found at this stage; who says nothing is a finding, too."""
    store.set(f"{stage}/{spec.node_rank}", json.dumps(findings))
    limit_s = 2 * spec.timeout_s  # the others may be in a timeout of their own
    said = _hear(store, stage, range(len(spec.peers)), limit_s)
    found = {node_rank: list(json.loads(text)) for node_rank, text in said.items()}
    return {node_rank: texts for node_rank, texts in found.items() if texts} | _missing(said, len(spec.peers), limit_s)


def _hear(store: Store, stage: str, numbers: Sequence[int], limit_s: float) -> dict[int, str]:
    """Return what the others have put for this stage within the limit."""
    deadline = time.monotonic() + limit_s
    found = {}
    for number in numbers:
        key = f"{stage}/{number}"
        left_s = max(0.01, deadline - time.monotonic())
        try:
            store.wait([key], timedelta(seconds=left_s))
        except dist.DistStoreError:
            continue
        found[number] = store.get(key).decode()
    return found


def _missing(said: dict[int, str], size: int, limit_s: float) -> Findings:
    text = f"it did not come to the check of the group, or died in it: nothing was heard of it for {limit_s:.0f} s"
    return {node_rank: [text] for node_rank in range(size) if node_rank not in said}


def _sentence(kind: str, interface: str, spec: GroupSpec, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0]
    names = [f"{peer.address} is {peer.host}" for peer in spec.peers if peer.address in reason]
    named = f" ({'; '.join(dict.fromkeys(names))})" if names else ""
    text = f"an all-reduce over {kind} with {len(spec.peers)} node(s) by interface {interface.lstrip('=')} failed"
    return f"{text}: {reason}{named}; let all TCP ports through between the hosts, and check the interface's MTU"
