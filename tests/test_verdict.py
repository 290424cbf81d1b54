from __future__ import annotations

import subprocess
import sys

import pytest

from taas.errors import JobLost, PreflightFailed, RankFailed, RunCancelled, error_from_dict
from taas_tasks.layout import RunKeys
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import LaunchResult, NodeResult, RankResult
from taas_tasks.verdict import class_of_exception, class_of_exit, describe_exit, diagnose, gather, launch_error


def rank(number: int, error_class: str | None = None, failed_at: float | None = None, message: str = "m") -> RankResult:
    code = 0 if error_class is None else 1
    told = {"error_class": error_class, "failed_at": failed_at, "message": message if error_class else None}
    return RankResult(rank=number, local_rank=number % 8, exit_code=code, **told)  # type: ignore[arg-type]


def node(number: int, *ranks: RankResult, error: Exception | None = None) -> NodeResult:
    told = error.to_dict() if isinstance(error, RankFailed | JobLost | PreflightFailed | RunCancelled) else None
    ok = error is None and all(found.error_class is None for found in ranks)
    return NodeResult(node_rank=number, host=f"h{number}", generation=1, ok=ok, ranks=list(ranks), error=told)


def result(*nodes: NodeResult) -> LaunchResult:
    return LaunchResult(generation=1, ok=all(found.ok for found in nodes), nodes=list(nodes))


def test_no_verdict_when_all_is_fine() -> None:
    assert diagnose([node(0, rank(0)), node(1, rank(1))]) is None
    assert launch_error(result(node(0, rank(0)))) is None


def test_first_failure_in_time_is_the_verdict_and_the_others_are_notes() -> None:
    verdict = diagnose([node(0, rank(0, "user error", 20.0)), node(1, rank(1, "CUDA OOM", 10.0))])
    assert verdict is not None
    assert (verdict.rank, verdict.host, verdict.error_class) == (1, "h1", "CUDA OOM")
    assert verdict.notes == ["rank 0 on h0: user error: m"]


def test_lost_connections_of_peers_come_behind_the_death_that_was_noticed_later() -> None:
    peers = [rank(number, "NCCL/timeout", 10.0) for number in (0, 1, 2)]
    verdict = diagnose([node(0, *peers, rank(3, "killed by the kernel", 10.1))])
    assert verdict is not None
    assert verdict.rank == 3


def test_communication_failure_is_the_verdict_where_nothing_else_failed() -> None:
    verdict = diagnose([node(0, rank(0, "stopped"), rank(1, "NCCL/timeout", 11.0), rank(2, "NCCL/timeout", 10.0))])
    assert verdict is not None
    assert (verdict.rank, verdict.error_class) == (2, "NCCL/timeout")


def test_lost_host_comes_before_the_connections_that_broke_with_it() -> None:
    nodes = [node(0, rank(0, "NCCL/timeout", 10.0)), node(1, error=JobLost("node 1 left no result"))]
    verdict = diagnose(nodes)
    assert verdict is not None
    assert (verdict.error_class, verdict.host) == ("host lost", "h1")
    error = launch_error(result(*nodes))
    assert isinstance(error, JobLost)
    assert error.retryable


def test_all_ranks_killed_is_a_verdict_and_no_crash() -> None:
    ranks = [rank(number, "killed by the kernel", 10.0 + number, "killed by SIGKILL") for number in range(8)]
    error = launch_error(result(node(0, *ranks)))
    assert isinstance(error, RankFailed)
    assert error.fields["rank"] == 0
    assert len(error.fields["notes"]) == 7


def test_error_of_a_node_without_ranks_is_passed_on() -> None:
    error = launch_error(result(node(0, error=PreflightFailed("unfit", findings={"h0": ["x"]}))))
    assert isinstance(error, PreflightFailed)
    assert error.fields["findings"] == {"h0": ["x"]}
    assert isinstance(launch_error(result(node(0, error=RunCancelled("by a user")))), RunCancelled)


def test_error_names_rank_host_class_and_traceback_and_survives_json() -> None:
    failed = rank(5, "user error", 1.0, "ValueError: x").model_copy(update={"traceback_tail": "in train.py line 3"})
    error = launch_error(result(node(1, failed)))
    assert isinstance(error, RankFailed)
    assert error.message == "rank 5 on h1 failed first (user error): ValueError: x\nin train.py line 3"
    assert error_from_dict(error.to_dict()).fields == error.fields


def test_gather_gives_a_lost_node_for_each_missing_result() -> None:
    store = MemoryStore()
    store.put(RunKeys("r").node_result(1, 0), node(0, rank(0)).to_bytes())
    found = gather(store, "r", 1, 2)
    assert not found.ok
    assert found.nodes[0].ok
    assert found.nodes[1].error is not None
    assert found.nodes[1].error["type"] == "JobLost"


@pytest.mark.parametrize(
    ("names", "message", "expected"),
    [
        (["ValueError", "Exception"], "x", "user error"),
        (["OutOfMemoryError", "RuntimeError"], "CUDA out of memory. Tried to allocate", "CUDA OOM"),
        (["RuntimeError"], "CUDA out of memory", "CUDA OOM"),
        (["DistBackendError", "RuntimeError"], "NCCL error", "NCCL/timeout"),
        (["RuntimeError"], "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1", "NCCL/timeout"),
        (["RuntimeError"], "shape '[2]' is invalid", "user error"),
        (["KeyError"], "NCCL", "user error"),
        (["DeliveryError", "TaasError"], "shard", "data"),
    ],
)
def test_class_of_exception(names: list[str], message: str, expected: str) -> None:
    assert class_of_exception(names, message) == expected


def test_exit_without_a_word_is_described() -> None:
    assert class_of_exit(exit_code=None, signal_number=9) == "killed by the kernel"
    assert class_of_exit(exit_code=None, signal_number=11) == "crashed"
    assert class_of_exit(exit_code=3, signal_number=None) == "user error"
    assert "lower the batch size" in describe_exit(exit_code=None, signal_number=9, oom_kills=1)
    assert "did not count" in describe_exit(exit_code=None, signal_number=9)
    assert "SIGSEGV" in describe_exit(exit_code=None, signal_number=11)


def test_verdict_needs_no_torch() -> None:
    code = "import sys, taas_tasks.verdict; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
