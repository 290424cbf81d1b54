"""Puts torch's elastic agent together for one node and runs it. Imports torch, so it is imported late."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.rendezvous.api import RendezvousError

from taas_tasks.launch import rank_main
from taas_tasks.launch.checkpoint_copies import CheckpointCopies, restore
from taas_tasks.launch.files import RankFiles
from taas_tasks.launch.gang import GangAgent, GangOutcome
from taas_tasks.launch.outcome import NodeLedger
from taas_tasks.launch.rendezvous import GangRendezvous
from taas_tasks.launch.watch import StopReason, Watch
from taas_tasks.store.base import ObjectStore
from taas_tasks.values import LaunchPlan

_log = logging.getLogger(__name__)

_MONITOR_S = 0.1
LAST_COPY_S = 10.0
"""How long a failed training waits for the copy of its last checkpoint: the verdict must not come late."""


def run_gang(
    plan: LaunchPlan,
    *,
    node_rank: int,
    address: str,
    store: Store,
    files: RankFiles,
    before_start: Callable[[Mapping[int, int]], None],
    stop_reason: Callable[[], StopReason | None],
    watch: Watch,
    ledger: NodeLedger,
    objects: ObjectStore,
    project: Path,
) -> GangOutcome:
    """Run this node's ranks until all nodes have ended or one has failed; the outcome is put into ``ledger``."""
    run_id = f"{plan.run}-g{plan.generation}"
    rendezvous = GangRendezvous(store, run_id=run_id, node_rank=node_rank, nnodes=plan.nnodes, address=address)
    spec = WorkerSpec(
        role="rank",
        local_world_size=plan.nproc_per_node,
        entrypoint=rank_main.main,
        args=(str(files.spec),),
        rdzv_handler=rendezvous,
        max_restarts=plan.max_restarts,
        monitor_interval=_MONITOR_S,
        local_addr=address,
    )
    agent = GangAgent(
        spec,
        rendezvous=rendezvous,
        files=files,
        before_start=before_start,
        stop_reason=stop_reason,
        watch=watch,
        hang_timeout_s=plan.hang_timeout_s,
    )
    copies = _checkpoints(plan, objects, project) if node_rank == 0 else None
    watch.watch_ranks(agent.stillness)
    watch.call_on_stop(lambda: _give_up(rendezvous))
    ok = False
    try:
        result = agent.run()
        ok = result is not None and result.state == WorkerState.SUCCEEDED
    except RendezvousError as error:
        # Closed by the watch, or node 0's agent, which serves the store, is gone.
        agent.stopped_for = stop_reason() or StopReason("failed", f"the nodes lost each other: {error}")
    finally:
        outcome = agent.outcome(ok=ok)
        ledger.take(outcome)
        if copies is not None:
            copies.stop(wait_s=0.0 if ok else LAST_COPY_S)
    return outcome


def _checkpoints(plan: LaunchPlan, objects: ObjectStore, project: Path) -> CheckpointCopies:
    """Bring what an earlier try has saved, and begin to copy what this one saves."""
    step = restore(objects, run=plan.run, generation=plan.generation, project=project)
    if step is not None:
        _log.info("an earlier try's checkpoint of step %d is there for taas.checkpoint.latest()", step)
    copies = CheckpointCopies(objects, run=plan.run, generation=plan.generation, project=project)
    copies.start()
    return copies


def _give_up(rendezvous: GangRendezvous) -> None:
    """Free an agent that waits in the rendezvous for a node that will not come."""
    try:
        rendezvous.set_closed()
    except RendezvousError as error:
        _log.warning("could not close the rendezvous: %s", error)
