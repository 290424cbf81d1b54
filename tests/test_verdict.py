from __future__ import annotations

import subprocess
import sys

import pytest

from taas.errors import JobLost, LaunchError, PreflightFailed, RankFailed, RunCancelled, error_from_dict
from taas.flavors import FLAVORS
from taas_tasks.layout import RunKeys
from taas_tasks.result_values import LaunchResult, NodeResult, RankResult
from taas_tasks.store.memory import MemoryStore
from taas_tasks.verdict import (
    class_of_exception,
    class_of_exit,
    describe_exit,
    diagnose,
    gather,
    launch_error,
    lost_of,
    restart_after,
)


def rank(number: int, error_class: str | None = None, failed_at: float | None = None, message: str = "m") -> RankResult:
    code = 0 if error_class is None else 1
    told = {"error_class": error_class, "failed_at": failed_at, "message": message if error_class else None}
    return RankResult(rank=number, local_rank=number % 8, exit_code=code, **told)  # type: ignore[arg-type]


def node(number: int, *ranks: RankResult, error: Exception | None = None) -> NodeResult:
    told = (
        error.to_dict()
        if isinstance(error, RankFailed | LaunchError | JobLost | PreflightFailed | RunCancelled)
        else None
    )
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
    assert (
        error.message
        == "rank 5 on h1 failed first (user error): ValueError: x\nWhen: 1970-01-01 00:00:01 UTC\nin train.py line 3"
    )
    assert error_from_dict(error.to_dict()).fields == error.fields


def at(found: NodeResult, **times: float) -> NodeResult:
    return found.model_copy(update={"times": times})


def test_what_is_lost_is_gpus_times_seconds_since_the_checkpoint_or_the_start() -> None:
    ranks = [rank(0, "user error", 90.0), rank(1, "stopped")]
    nodes = [
        at(node(0, *ranks), ranks_started=10.0, ranks_ended=100.0),
        at(node(1, error=JobLost("gone"))),
    ]
    lost = lost_of(nodes)
    assert lost is not None
    assert (lost.num_gpus, lost.num_hosts, lost.seconds, lost.gpu_seconds) == (4, 2, 90.0, 360.0)
    assert lost.sentence() == "Lost: 360 GPU-seconds (4 GPUs x 90 s since the start)"
    saved = [at(nodes[0], ranks_started=10.0, ranks_ended=100.0, checkpoint=80.0), nodes[1]]
    lost = lost_of(saved)
    assert lost is not None
    assert lost.sentence(FLAVORS["g2.8"]) == (
        "Lost: 80 GPU-seconds (4 GPUs x 20 s since the last complete checkpoint), 37120 units of price"
    )
    # One that was there before the start is of another run.
    lost = lost_of([at(nodes[0], ranks_started=10.0, ranks_ended=100.0, checkpoint=5.0)])
    assert lost is not None
    assert lost.since == "the start"
    assert lost_of([node(0, error=PreflightFailed("unfit"))]) is None


def test_the_cause_is_the_first_line_then_when_and_what_is_lost() -> None:
    failed = rank(5, "user error", 70.0, "ValueError: x").model_copy(update={"traceback_tail": "in train.py line 3"})
    error = launch_error(result(at(node(1, failed), ranks_started=10.0, ranks_ended=71.0)))
    assert error is not None
    assert error.message.splitlines() == [
        "rank 5 on h1 failed first (user error): ValueError: x",
        "When: 1970-01-01 00:01:10 UTC, 60.0 s after the ranks' start",
        "Lost: 61 GPU-seconds (1 GPU x 61 s since the start)",
        "in train.py line 3",
    ]
    assert error.fields["gpu_seconds_lost"] == 61.0


def test_what_the_rendezvous_raises_on_top_does_not_hide_the_rank_that_failed() -> None:
    on_top = LaunchError("stopped, because the nodes lost each other: RendezvousConnectionError")
    nodes = [node(0, rank(0, "stopped"), error=on_top), node(1, rank(1, "user error", 5.0, "KeyError: 'x'"))]
    error = launch_error(result(*nodes))
    assert isinstance(error, RankFailed)
    assert error.message.startswith("rank 1 on h1 failed first (user error): KeyError: 'x'")


def hung(number: int, place: str, collective: str | None = None) -> RankResult:
    where = {"place": place, "collective": collective, "traceback_tail": f"stacks of {number}"}
    return rank(number, "hang", 50.0, "stood").model_copy(update=where)


def test_a_hang_is_blamed_on_the_rank_that_is_in_no_collective() -> None:
    nodes = [
        node(0, hung(0, "train.py:9 (main)", "all_reduce"), hung(1, "train.py:9 (main)", "all_reduce")),
        node(1, hung(2, "train.py:9 (main)", "all_reduce"), hung(3, "data.py:17 (read)")),
    ]
    verdict = diagnose(nodes)
    assert verdict is not None
    assert (verdict.error_class, verdict.rank, verdict.host) == ("hang", 3, "h1")
    assert verdict.sentence() == (
        "the training hangs (hang): no rank made a step; rank 3 sat in user code at data.py:17 (read) while "
        "ranks 0, 1, 2 waited in all_reduce at train.py:9 (main); rank 3 on h1 is the odd one"
    )
    assert verdict.traceback_tail == "stacks of 3"
    assert len(verdict.notes) == 3


def test_a_hang_with_all_ranks_at_one_place_names_no_rank() -> None:
    error = launch_error(result(node(0, hung(0, "a.py:1 (f)", "barrier"), hung(1, "a.py:1 (f)", "barrier"))))
    assert isinstance(error, RankFailed)
    assert error.fields["rank"] is None
    assert "ranks 0, 1 waited in barrier at a.py:1 (f)" in error.message


def test_a_restart_tells_its_cause_and_where_it_goes_on() -> None:
    nodes = [node(0, rank(0, "NCCL/timeout", 9.0)), node(1, rank(5, "killed by the kernel", 10.0, "killed by SIGKILL"))]
    found = restart_after(nodes, number=1, max_restarts=3, at=11.0)
    assert (found.rank, found.host, found.error_class, found.checkpoint_step) == (5, "h1", "killed by the kernel", None)
    nodes[0] = nodes[0].model_copy(update={"checkpoint_step": 120})
    assert restart_after(nodes, number=1, max_restarts=3, at=11.0).told == (
        "restart 1 of 3 after rank 5 on h1 failed first (killed by the kernel): killed by SIGKILL; "
        "resumes from checkpoint step 120"
    )


def test_gather_gives_a_lost_node_for_each_missing_result() -> None:
    store = MemoryStore()
    store.put(RunKeys("r").node_result(1, 0), node(0, rank(0)).to_bytes())
    found = gather(store, "r", 1, 2)
    assert not found.ok
    assert found.nodes[0].ok
    assert found.nodes[1].error is not None
    assert found.nodes[1].error["type"] == "JobLost"


def test_a_host_that_left_no_result_is_named_as_the_inventory_names_it() -> None:
    store = MemoryStore()
    store.put(RunKeys("r").node_result(1, 0), node(0, rank(0)).to_bytes())
    error = launch_error(gather(store, "r", 1, 2, hosts=["g2-0", "g2-1"]))
    assert isinstance(error, JobLost)
    assert error.fields["host"] == "g2-1" and "on g2-1" in error.message.splitlines()[0]


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
