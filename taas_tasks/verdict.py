"""The verdict on a training: which rank failed first, where, why; from the results of all nodes. Needs no torch.

When a rank dies its peers fail milliseconds later in their collectives, often before anyone noticed the first death.
So failures of communication count as consequences: the first failure of another kind is the cause; only where there is
none is the first failure of communication.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from taas.errors import JobLost, ObjectMissing, RankFailed, TaasError, error_from_dict
from taas_tasks.layout import RunKeys
from taas_tasks.store.base import ObjectStore
from taas_tasks.values import LaunchResult, NodeResult, RankResult

USER_ERROR = "user error"
CUDA_OOM = "CUDA OOM"
KILLED = "killed by the kernel"
CRASHED = "crashed"
COMMUNICATION = "NCCL/timeout"
DATA = "data"
LAUNCH = "launch"
HOST_LOST = "host lost"
STOPPED = "stopped"
"""Ended by the node agent because something else had failed."""

_COMMUNICATION_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_COMMUNICATION_PHRASES = (
    "NCCL",
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "gloo/transport",
    "Gloo connectFullMesh",
    "Timed out waiting",
    "Socket Timeout",
    "store->get",
    "wait timeout",
)
_CONSEQUENCES = (STOPPED, COMMUNICATION)


def class_of_exception(type_names: Sequence[str], message: str) -> str:
    """Return the class of an exception, from the names of its type and bases (most derived first) and its message."""
    if "DeliveryError" in type_names:
        return DATA
    if "LaunchError" in type_names:
        return LAUNCH
    if "OutOfMemoryError" in type_names or "CUDA out of memory" in message:
        return CUDA_OOM
    if _COMMUNICATION_TYPES.intersection(type_names):
        return COMMUNICATION
    is_torch_error = "RuntimeError" in type_names or "ConnectionError" in type_names
    if is_torch_error and any(phrase in message for phrase in _COMMUNICATION_PHRASES):
        return COMMUNICATION
    return USER_ERROR


def class_of_exit(*, exit_code: int | None, signal_number: int | None) -> str:
    """Return the class of a rank that ended without a word."""
    if signal_number == signal.SIGKILL:
        return KILLED
    if signal_number is not None:
        return CRASHED
    return USER_ERROR


def describe_exit(*, exit_code: int | None, signal_number: int | None, oom_kills: int = 0) -> str:
    """Return a sentence on a rank that ended without a word; ``oom_kills`` as the host's kernel counted meanwhile."""
    if signal_number == signal.SIGKILL:
        cause = (
            f"the host's kernel ended {oom_kills} process(es) for want of memory meanwhile: lower the batch size or"
            " num_workers, or take a flavor with more RAM"
            if oom_kills
            else "out of memory? The kernel did not count a kill for want of memory, so someone else may have sent it"
        )
        return f"killed by SIGKILL ({cause})"
    if signal_number is not None:
        return f"died of {signal.Signals(signal_number).name}"
    return f"left by os._exit({exit_code}) or from C code, with no traceback"


@dataclass(frozen=True)
class Verdict:
    """What ended a training. ``rank`` is None where no rank is to blame (a host lost, a preflight, an abort)."""

    error_class: str
    message: str
    host: str | None = None
    node_rank: int | None = None
    rank: int | None = None
    traceback_tail: str | None = None
    notes: list[str] = field(default_factory=list)

    def sentence(self) -> str:
        """Return the verdict in one line."""
        where = f" on {self.host}" if self.host else ""
        who = f"rank {self.rank}{where}" if self.rank is not None else f"the training{where}"
        return f"{who} failed first ({self.error_class}): {self.message}"


@dataclass(frozen=True)
class _Failure:
    node: NodeResult
    rank: RankResult

    @property
    def order(self) -> tuple[bool, float]:
        """Causes before consequences, then by time."""
        return self.rank.error_class in _CONSEQUENCES, self.rank.failed_at or float("inf")


def diagnose(nodes: Sequence[NodeResult]) -> Verdict | None:
    """Return the verdict over all nodes, or None when every node is fine."""
    failures = [_Failure(node, rank) for node in nodes for rank in node.ranks if rank.error_class is not None]
    failures.sort(key=lambda failure: failure.order)
    first = failures[0] if failures else None
    lost = [node for node in nodes if node.error and node.error.get("type") == "JobLost"]
    if first is not None and first.rank.error_class not in _CONSEQUENCES:
        return _rank_verdict(first, failures[1:])
    if lost:
        return _lost_verdict(lost[0], failures)
    if first is not None and first.rank.error_class != STOPPED:
        return _with_those_who_left(_rank_verdict(first, failures[1:]), nodes)
    return _node_verdict(nodes)


def launch_error(result: LaunchResult) -> TaasError | None:
    """Return the error that says the verdict over a whole training, or None when it went well."""
    return launch_error_of(result.nodes)


def launch_error_of(nodes: Sequence[NodeResult]) -> TaasError | None:
    """Return the error that says the verdict, or None when every node is fine.

    ``RankFailed`` where a rank failed, ``JobLost`` where a host was lost, otherwise what a node itself raised
    (``PreflightFailed``, ``RunCancelled``, a store's error).
    """
    verdict = diagnose(nodes)
    if verdict is None:
        return None
    fields: dict[str, Any] = {
        "rank": verdict.rank,
        "host": verdict.host,
        "node_rank": verdict.node_rank,
        "error_class": verdict.error_class,
        "traceback_tail": verdict.traceback_tail,
        "notes": verdict.notes,
    }
    if verdict.rank is not None:
        tail = f"\n{verdict.traceback_tail}" if verdict.traceback_tail else ""
        return RankFailed(verdict.sentence() + tail, **fields)
    if verdict.error_class == HOST_LOST:
        return JobLost(verdict.sentence(), **fields)
    raised = [node.error for node in nodes if node.error is not None and node.error.get("type") != "LaunchError"]
    raised = raised or [node.error for node in nodes if node.error is not None]
    return error_from_dict(raised[0])


def gather(store: ObjectStore, run: str, generation: int, nnodes: int) -> LaunchResult:
    """Return the results of all nodes of one try; a node that left none is a lost one."""
    nodes = [_node_result(store, run, generation, node_rank) for node_rank in range(nnodes)]
    return LaunchResult(generation=generation, ok=all(node.ok for node in nodes), nodes=nodes)


def _node_result(store: ObjectStore, run: str, generation: int, node_rank: int) -> NodeResult:
    try:
        return NodeResult.model_validate_json(store.get(RunKeys(run).node_result(generation, node_rank)))
    except ObjectMissing:
        error = JobLost(f"node {node_rank} left no result: its host or its node agent was lost", node_rank=node_rank)
    return NodeResult(
        node_rank=node_rank,
        host=f"node {node_rank}",
        generation=generation,
        ok=False,
        ranks=[],
        error=error.to_dict(),
    )


def _rank_verdict(first: _Failure, others: Sequence[_Failure]) -> Verdict:
    return Verdict(
        error_class=first.rank.error_class or USER_ERROR,
        message=first.rank.message or "no message",
        host=first.node.host,
        node_rank=first.node.node_rank,
        rank=first.rank.rank,
        traceback_tail=first.rank.traceback_tail,
        notes=[_note(other) for other in others],
    )


def _with_those_who_left(verdict: Verdict, nodes: Sequence[NodeResult]) -> Verdict:
    """Say which ranks had ended normally when a collective failed: most often that is why it failed."""
    left = sorted(rank.rank for node in nodes for rank in node.ranks if rank.error_class is None)
    if not left:
        return verdict
    named = ", ".join(map(str, left[:8])) + (", …" if len(left) > 8 else "")
    message = (
        f"{verdict.message}\nRank(s) {named} had come to the end of the script before, without an error: each rank must"
        " take part in every collective, so all must make the same number of steps"
    )
    return replace(verdict, message=message)


def _lost_verdict(lost: NodeResult, failures: Sequence[_Failure]) -> Verdict:
    message = str((lost.error or {}).get("message", "its host was lost"))
    notes = [_note(failure) for failure in failures]
    return Verdict(error_class=HOST_LOST, message=message, host=lost.host, node_rank=lost.node_rank, notes=notes)


def _node_verdict(nodes: Sequence[NodeResult]) -> Verdict | None:
    failed = [node for node in nodes if not node.ok and node.error is not None]
    # A LaunchError alone says "stopped because of another node"; whatever else was raised is nearer to the cause.
    failed.sort(key=lambda node: (node.error or {}).get("type") == "LaunchError")
    if not failed:
        return None
    node = failed[0]
    message = str((node.error or {}).get("message", ""))
    return Verdict(error_class=LAUNCH, message=message, host=node.host, node_rank=node.node_rank)


def _note(failure: _Failure) -> str:
    message = (failure.rank.message or "").strip().splitlines()
    return (
        f"rank {failure.rank.rank} on {failure.node.host}: {failure.rank.error_class}: {message[0] if message else ''}"
    )
