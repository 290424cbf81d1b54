"""Ranks and agents that fail: the gang is down within seconds everywhere, and the verdict names the first one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from taas.errors import RankFailed
from taas_tasks.layout import payload_key
from taas_tasks.verdict import diagnose, launch_error
from tests.launch.conftest import MakeGang
from tests.launch.gang import Gang

# Ranks that work on something that is no collective: only the agents can tell the others.
BUSY = """
    import os, sys, time, ctypes, subprocess
    rank = int(os.environ["RANK"])
    print("ready", flush=True)
    time.sleep(1.5)
    how = {"all": ["os._exit", "os._exit(0)", "segfault", "sys.exit"][rank % 4]}.get(sys.argv[1], sys.argv[1])
    if rank == int(sys.argv[2]) or sys.argv[1] == "all":
        if how == "raise":
            def deep():
                raise ValueError("the loss is NaN")
            deep()
        if how == "os._exit":
            os._exit(3)
        if how == "segfault":
            ctypes.string_at(0)
        if how == "sys.exit":
            sys.exit("bad flags")
        if how == "os._exit(0)":
            os._exit(0)
    time.sleep(300)
"""


def test_exception_on_another_node_ends_the_gang_and_is_the_verdict(make_gang: MakeGang) -> None:
    gang = make_gang(BUSY, nnodes=2, nproc=2, plan={"args": ["raise", "2"]})
    gang.wait_for("the loss is NaN", node_rank=1)
    result = gang.wait(timeout_s=120)  # the others would go on for 300 s
    assert gang.processes() == []
    error = launch_error(result)
    assert isinstance(error, RankFailed)
    assert error.fields["rank"] == 2
    assert error.fields["host"] == "host-1"
    assert error.fields["error_class"] == "user error"
    assert "ValueError: the loss is NaN" in error.message
    tail = str(error.fields["traceback_tail"])
    assert "in deep" in tail
    assert "rank_main" not in tail
    assert any("rank 0" in note and "stopped" in note for note in error.fields["notes"])
    assert gang.outcome(1)["error"]["type"] == "RankFailed"
    assert "node 1 on host-1 failed" in gang.outcome(0)["error"]["message"]


def test_ranks_that_leave_without_an_exception_are_told_apart(make_gang: MakeGang) -> None:
    gang = make_gang(BUSY, nproc=4, plan={"args": ["all", "-1"]})
    nodes = gang.wait().nodes
    by_rank = {rank.rank: rank for rank in nodes[0].ranks}
    assert [(by_rank[rank].error_class, by_rank[rank].exit_code, by_rank[rank].signal) for rank in range(4)] == [
        ("user error", 3, None),
        ("user error", 0, None),
        ("crashed", None, signal.SIGSEGV),
        ("user error", 1, None),
    ], gang.all_output()
    assert "os._exit(3)" in str(by_rank[0].message)
    assert "os._exit(0)" in str(by_rank[1].message)
    assert "Segmentation fault" in str(by_rank[2].traceback_tail)
    assert "sys.exit('bad flags')" in str(by_rank[3].message)
    assert "[host-0 r3] bad flags" in gang.out()


def test_cuda_oom_on_one_rank_ends_the_gang_and_is_its_class(make_gang: MakeGang) -> None:
    script = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        dist.all_reduce(torch.ones(1))
    """
    error = launch_error(make_gang(script, nproc=2).wait(timeout_s=120))  # rank 0 would wait for 30 minutes
    assert error is not None
    assert (error.fields["rank"], error.fields["error_class"]) == (1, "CUDA OOM")
    assert error.message.startswith("rank 1 on host-0 failed first (CUDA OOM): OutOfMemoryError: CUDA out of memory")


def test_segfault_on_one_host_ends_the_others_with_no_exit_barrier(make_gang: MakeGang) -> None:
    gang = make_gang(BUSY, nnodes=2, nproc=1, plan={"args": ["segfault", "1"]})
    gang.wait_for("ready", node_rank=1)
    verdict = diagnose(gang.wait(timeout_s=120).nodes)  # torch's own barrier at the exit waits for 300 s
    assert verdict is not None
    assert (verdict.rank, verdict.host, verdict.error_class) == (1, "host-1", "crashed")
    assert "SIGSEGV" in verdict.message


def test_killed_rank_is_the_verdict_not_its_peers_that_lost_the_connection(make_gang: MakeGang) -> None:
    script = """
        import os, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        print(f"pid={os.getpid()} ready", flush=True)
        while True:
            dist.all_reduce(torch.ones(1))
            time.sleep(0.01)
    """
    gang = make_gang(script, nproc=3)
    for rank in range(3):
        gang.wait_for(f"r{rank}] pid=")
    os.kill(gang.rank_pids()[1], signal.SIGKILL)
    result = gang.wait(timeout_s=120)  # its peers would wait for 30 minutes
    verdict = diagnose(result.nodes)
    assert verdict is not None
    assert (verdict.rank, verdict.error_class) == (1, "killed by the kernel")
    assert "SIGKILL" in verdict.message
    peers = [rank for rank in result.nodes[0].ranks if rank.rank != 1]
    assert all(rank.error_class in ("NCCL/timeout", "stopped") for rank in peers), peers
    assert any(rank.error_class == "NCCL/timeout" for rank in peers), peers


def test_rank_that_leaves_early_without_an_error_does_not_leave_its_peers_waiting(make_gang: MakeGang) -> None:
    script = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        print("ready", flush=True)
        if os.environ["RANK"] != "2":
            for _ in range(3):
                dist.all_reduce(torch.ones(1))
    """
    gang = make_gang(script, nproc=3)
    gang.wait_for("r2] ready")
    verdict = diagnose(gang.wait(timeout_s=120).nodes)  # its peers would wait for 30 minutes
    assert verdict is not None
    assert verdict.error_class == "NCCL/timeout"
    assert "Rank(s) 2 had come to the end of the script before" in verdict.message


def test_rank_that_works_on_alone_after_its_peers_have_ended_is_not_disturbed(make_gang: MakeGang) -> None:
    script = """
        import os, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        dist.barrier()
        if os.environ["RANK"] == "0":
            time.sleep(4)
            print("saved", flush=True)
        dist.destroy_process_group()
    """
    gang = make_gang(script, nproc=3)
    result = gang.wait()
    assert result.ok, gang.all_output()
    assert "r0] saved" in gang.out()


def test_lost_node_agent_takes_its_ranks_along_and_is_found_by_the_others(make_gang: MakeGang) -> None:
    script = """
        import os, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        print(f"pid={os.getpid()} ready", flush=True)
        while True:
            dist.all_reduce(torch.ones(1))
            time.sleep(0.01)
    """
    gang = make_gang(script, nnodes=2, nproc=1)
    gang.wait_for("ready", node_rank=1)
    gang.agents[1].kill()
    result = gang.wait(timeout_s=15)
    assert gang.processes() == []
    verdict = diagnose(result.nodes)
    assert verdict is not None
    assert (verdict.error_class, verdict.node_rank, verdict.rank) == ("host lost", 1, None)


def test_node_that_fails_before_the_start_frees_the_one_that_waits_for_it(make_gang: MakeGang) -> None:
    def spoil(gang: Gang) -> None:
        key = payload_key("demo", "0" * 64)
        gang.store.put(key, b"not what the request names")
        gang.plan_of[1] = {"script": None, "cell_payload": key, "cell_sha256": "0" * 64}

    gang = make_gang("", nnodes=2, nproc=1, before=spoil)
    gang.wait(timeout_s=100)  # less than the time that preflight gives a silent node
    assert "sha256" in gang.outcome(1)["error"]["message"]
    assert gang.outcome(0)["ok"] is False
    assert gang.processes() == []


def test_terminated_agent_leaves_no_process(make_gang: MakeGang) -> None:
    script = """
        import os, signal, subprocess, time, torch
        from torch.utils.data import DataLoader
        if __name__ == "__main__":
            signal.signal(signal.SIGTERM, lambda *_: None)  # as Lightning's handler: does not end the process
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            batches = iter(DataLoader(list(range(1000)), num_workers=2))
            next(batches)
            print("ready", flush=True)
            time.sleep(1000)
    """
    gang = make_gang(script, nproc=2)
    gang.wait_for("r1] ready")
    gang.wait_for("r0] ready")
    assert len(gang.processes()) >= 2 * 4
    gang.agents[0].terminate()
    gang.wait(timeout_s=15)
    assert gang.processes() == []
    assert gang.outcome()["error"]["type"] == "RunCancelled"
    assert "SIGTERM" in gang.outcome()["error"]["message"]


def test_abort_object_stops_the_training(make_gang: MakeGang) -> None:
    gang = make_gang(BUSY, nproc=1, plan={"args": ["sleep", "0"]})
    gang.wait_for("ready")
    gang.store.put_if_absent(f"runs/{gang.run}/abort", b"prepare failed for good")
    gang.wait()
    assert gang.outcome()["error"]["type"] == "RunCancelled"
    assert "prepare failed for good" in gang.outcome()["error"]["message"]


def test_restart_gives_the_same_ranks_and_trains_to_the_end(make_gang: MakeGang, tmp_path: Path) -> None:
    script = """
        import os, pathlib, torch, torch.distributed as dist
        dist.init_process_group("nccl", init_method="env://")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        rank = dist.get_rank()
        mark = pathlib.Path(os.environ["MARKS"]) / f"started-{rank}"
        first = not mark.exists()
        mark.touch()
        dist.barrier()
        if first and rank == 1:
            raise RuntimeError("only once")
        dist.all_reduce(ones)
        print(f"sum={int(ones)} rank={rank}")
    """
    gang = make_gang(script, nnodes=2, nproc=1, plan={"max_restarts": 1}, env={"MARKS": str(tmp_path)})
    result = gang.wait()
    assert result.ok, gang.all_output()
    assert "[host-0 r0] sum=4 rank=0" in gang.out(0)
    assert "[host-1 r1] sum=4 rank=1" in gang.out(1)
