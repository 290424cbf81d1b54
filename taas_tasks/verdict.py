"""The verdict on a training: which rank failed first, where, why; from the results of all nodes. Needs no torch.

When a rank dies its peers fail milliseconds later in their collectives, often before anyone noticed the first death.
So failures of communication count as consequences: the first failure of another kind is the cause; only where there is
none is the first failure of communication.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from taas.errors import JobLost, ObjectMissing, RankFailed, TaasError, error_from_dict
from taas.flavors import Flavor
from taas_tasks.layout import RunKeys
from taas_tasks.result_values import LaunchResult, NodeResult, RankResult, Restart
from taas_tasks.store.base import ObjectStore

USER_ERROR = "user error"
CUDA_OOM = "CUDA OOM"
KILLED = "killed by the kernel"
CRASHED = "crashed"
COMMUNICATION = "NCCL/timeout"
DATA = "data"
LAUNCH = "launch"
HOST_LOST = "host lost"
HANG = "hang"
PREFLIGHT = "preflight"
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
    failed_at: float | None = None
    notes: list[str] = field(default_factory=list)

    def sentence(self) -> str:
        """Return the verdict in one line."""
        where = f" on {self.host}" if self.host else ""
        who = f"rank {self.rank}{where}" if self.rank is not None else f"the training{where}"
        if self.error_class == HANG:
            cause = f"; {who} is the odd one" if self.rank is not None else ""
            return f"the training hangs ({HANG}): {self.message}{cause}"
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
    hung = [failure for failure in failures if failure.rank.error_class == HANG]
    if hung:
        return _hang_verdict(hung, [failure for failure in failures if failure not in hung])
    first = failures[0] if failures else None
    lost = [node for node in nodes if node.error and node.error.get("type") == "JobLost"]
    if first is not None and first.rank.error_class not in _CONSEQUENCES:
        return _rank_verdict(first, failures[1:])
    if lost:
        return _lost_verdict(lost[0], failures)
    if first is not None and first.rank.error_class != STOPPED:
        return _with_those_who_left(_rank_verdict(first, failures[1:]), nodes)
    return _node_verdict(nodes)


def launch_error(result: LaunchResult, *, flavor: Flavor | None = None) -> TaasError | None:
    """Return the error that says the verdict over a whole training, or None when it went well.

    Args:
        result: of all nodes.
        flavor: of the hosts, to price what is lost.
    """
    return launch_error_of(result.nodes, flavor=flavor)


def launch_error_of(nodes: Sequence[NodeResult], *, flavor: Flavor | None = None) -> TaasError | None:
    """Return the error that says the verdict, or None when every node is fine. The cause is its first line.

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
        "failed_at": verdict.failed_at,
        "gpu_seconds_lost": lost.gpu_seconds if (lost := lost_of(nodes)) else None,
    }
    told = [verdict.sentence(), *_when(verdict, nodes), *([lost.sentence(flavor)] if lost else [])]
    told += [f"restarted before: {one.told}" for one in restarts_of(nodes)]
    if verdict.rank is not None or verdict.error_class == HANG:
        told += [verdict.traceback_tail] if verdict.traceback_tail else []
        return RankFailed("\n".join(told), **fields)
    if verdict.error_class == HOST_LOST:
        return JobLost("\n".join(told), **fields)
    raised = [node.error for node in nodes if node.error is not None and node.error.get("type") != "LaunchError"]
    raised = raised or [node.error for node in nodes if node.error is not None]
    return error_from_dict(raised[0])


@dataclass(frozen=True)
class Lost:
    """GPU time whose work is gone. ``since``: "the last complete checkpoint" or "the start"."""

    num_gpus: int
    num_hosts: int
    seconds: float
    since: str

    @property
    def gpu_seconds(self) -> float:
        """GPUs times seconds."""
        return round(self.num_gpus * self.seconds, 1)

    def sentence(self, flavor: Flavor | None = None) -> str:
        """Say it, with the price where the flavor is known."""
        price = f", {self.num_hosts * self.seconds * flavor.price:.0f} units of price" if flavor is not None else ""
        gpus = f"{self.num_gpus} GPU{'s' if self.num_gpus != 1 else ''}"
        return f"Lost: {self.gpu_seconds:.0f} GPU-seconds ({gpus} x {self.seconds:.0f} s since {self.since}){price}"


def lost_of(nodes: Sequence[NodeResult]) -> Lost | None:
    """Return what a failed training lost, or None when its ranks never ran. Pure.

    One rank is one GPU. The checkpoint is rank 0's newest complete one, if it was written after the start. Times are
    those of the hosts' clocks, which preflight has compared.
    """
    starts = [node.times["ranks_started"] for node in nodes if "ranks_started" in node.times]
    ends = [node.times["ranks_ended"] for node in nodes if "ranks_ended" in node.times]
    if not starts or not ends:
        return None
    start, end = min(starts), max(ends)
    saved = max((node.times["checkpoint"] for node in nodes if "checkpoint" in node.times), default=start)
    from_checkpoint = saved > start
    per_node = max(len(node.ranks) for node in nodes)  # a lost host left none
    return Lost(
        num_gpus=per_node * len(nodes),
        num_hosts=len(nodes),
        seconds=max(0.0, end - max(start, saved)),
        since="the last complete checkpoint" if from_checkpoint else "the start",
    )


def restart_after(nodes: Sequence[NodeResult], *, number: int, max_restarts: int, at: float) -> Restart:
    """Return why a gang starts again, from how its ranks ended on all nodes, and where it can go on."""
    verdict = diagnose(nodes)
    step = max((node.checkpoint_step for node in nodes[:1] if node.checkpoint_step is not None), default=None)
    cause = verdict.sentence().splitlines()[0] if verdict is not None else "a node came back without a word"
    goes_on = (
        f"resumes from checkpoint step {step}"
        if step is not None
        else "begins anew, unless the script keeps checkpoints of its own: there is none of taas.checkpoint"
    )
    return Restart(
        number=number,
        at=at,
        error_class=verdict.error_class if verdict else LAUNCH,
        rank=verdict.rank if verdict else None,
        host=verdict.host if verdict else None,
        checkpoint_step=step,
        told=f"restart {number} of {max_restarts} after {cause}; {goes_on}",
    )


def restarts_of(nodes: Sequence[NodeResult]) -> list[Restart]:
    """Return the restarts of a try, each once: every node tells of all that it has seen."""
    found = {one.number: one for node in reversed(nodes) for one in node.restarts}
    return [found[number] for number in sorted(found)]


def _when(verdict: Verdict, nodes: Sequence[NodeResult]) -> list[str]:
    """Return the line that says when it failed: UTC, and seconds after the ranks' start."""
    if verdict.failed_at is None:
        return []
    utc = datetime.fromtimestamp(verdict.failed_at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    starts = [node.times["ranks_started"] for node in nodes if "ranks_started" in node.times]
    after = f", {verdict.failed_at - min(starts):.1f} s after the ranks' start" if starts else ""
    return [f"When: {utc} UTC{after}"]


def gather(
    store: ObjectStore, run: str, generation: int, nnodes: int, *, hosts: Sequence[str] | None = None
) -> LaunchResult:
    """Return the results of all nodes of one try; a node that left none is a lost one, known by its host's name."""
    names = hosts or [f"node {node_rank}" for node_rank in range(nnodes)]
    nodes = [_node_result(store, run, generation, node_rank, names[node_rank]) for node_rank in range(nnodes)]
    return LaunchResult(generation=generation, ok=all(node.ok for node in nodes), nodes=nodes)


def _node_result(store: ObjectStore, run: str, generation: int, node_rank: int, host: str) -> NodeResult:
    try:
        return NodeResult.model_validate_json(store.get(RunKeys(run).node_result(generation, node_rank)))
    except ObjectMissing:
        error = JobLost(f"node {node_rank} left no result: its host or its node agent was lost", node_rank=node_rank)
    return NodeResult(
        node_rank=node_rank,
        host=host,
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
        failed_at=first.rank.failed_at,
        notes=[_note(other) for other in others],
    )


def _hang_verdict(hung: Sequence[_Failure], others: Sequence[_Failure]) -> Verdict:
    """Name the odd one out: who sat in user code, else who waited in another collective than most."""
    by_rank = sorted(hung, key=lambda failure: failure.rank.rank)
    groups: dict[str | None, list[_Failure]] = {}
    for failure in by_rank:
        groups.setdefault(failure.rank.collective, []).append(failure)
    odd = groups.get(None) or min(groups.values(), key=len)
    rest = [failure for failure in by_rank if failure not in odd]
    first = odd[0] if rest else None
    stood = "; ".join(_standing(group) for group in groups.values() if group is not odd)
    if first is None:
        message = f"no rank made a step; {_standing(odd)}"
    else:
        message = f"no rank made a step; {_standing(odd)} while {stood}"
    shown = first or by_rank[0]
    return Verdict(
        error_class=HANG,
        message=message,
        host=first.node.host if first else None,
        node_rank=first.node.node_rank if first else None,
        rank=first.rank.rank if first else None,
        traceback_tail=shown.rank.traceback_tail,
        failed_at=shown.rank.failed_at,
        notes=[_note(failure) for failure in [*by_rank, *others] if failure is not first],
    )


def _standing(group: Sequence[_Failure]) -> str:
    """Say where the ranks of a group stood: "rank(s) 0, 1, 2 waited in all_reduce at train.py:9 (main)"."""
    places = sorted({failure.rank.place or "an unknown place" for failure in group})
    listed = ", ".join(places[:3]) + (", …" if len(places) > 3 else "")
    collective = group[0].rank.collective
    verb = f"waited in {collective} at" if collective else "sat in user code at"
    return f"rank{'s' if len(group) > 1 else ''} {_ranks([failure.rank.rank for failure in group])} {verb} {listed}"


def _ranks(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


def _with_those_who_left(verdict: Verdict, nodes: Sequence[NodeResult]) -> Verdict:
    """Say which ranks had ended normally when a collective failed: most often that is why it failed."""
    left = sorted(rank.rank for node in nodes for rank in node.ranks if rank.error_class is None)
    if not left:
        return verdict
    message = (
        f"{verdict.message}\nRank(s) {_ranks(left)} had come to the end of the script before, without an error: "
        "each rank must take part in every collective, so all must make the same number of steps"
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
    error_class = PREFLIGHT if (node.error or {}).get("type") == "PreflightFailed" else LAUNCH
    return Verdict(error_class=error_class, message=message, host=node.host, node_rank=node.node_rank)


def _note(failure: _Failure) -> str:
    message = (failure.rank.message or "").strip().splitlines()
    return (
        f"rank {failure.rank.rank} on {failure.node.host}: {failure.rank.error_class}: {message[0] if message else ''}"
    )
