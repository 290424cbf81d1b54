"""Gangs that start again: from the last complete checkpoint and the trainer's own position, on these or other hosts."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from taas_tasks.layout import RunKeys
from taas_tasks.verdict import restarts_of
from tests.delivery.support import RUN, Prepared
from tests.launch.conftest import MakeGang
from tests.launch.gang import Gang

pytestmark = pytest.mark.store

UNITS = 48
WORLD_SIZE = 2
TRAINS = """
    import os, sys, time, pathlib, torch, torch.distributed as dist, taas
    how, at = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    first = os.environ["TRY"] == "1" and attempt == "0"
    loader = taas.loader("data")
    found = taas.checkpoint.latest()
    step = 0
    if found is not None:
        step, state = found
        loader.load_state_dict(state)

    class Dies:
        def __reduce__(self):  # in the middle of torch.save
            os.kill(os.getpid(), 9)

    with (pathlib.Path(os.environ["MARKS"]) / f"{os.environ['TRY']}-{attempt}-{rank}").open("a") as taken:
        for element in loader:
            step += 1
            dist.all_reduce(torch.ones(1))
            print(step, int(element["id"][1]), time.time(), file=taken, flush=True)
            if first and how == "save" and rank == 0 and step == at:
                taas.checkpoint([torch.zeros(1 << 20), Dies()], step=step)
            elif step % 4 == 0:
                taas.checkpoint(loader.state_dict(), step=step)
            if first and how == "kill" and rank == 1 and step == at:
                os.kill(os.getpid(), 9)
            if first and how == "stay" and step == at:
                print(f"stays at step {step}", flush=True)
                time.sleep(300)
"""


def prepare(gang: Gang) -> None:
    prepared = Prepared(gang.store, units=UNITS, length=UNITS).commit_all()
    gang.plan["loaders"] = {"data": prepared.plan.model_dump()}


def taken(marks: Path, name: str) -> list[tuple[int, int]]:
    """The (step, index)s that both ranks took in one attempt."""
    rows = [line.split() for rank in range(WORLD_SIZE) for line in (marks / f"{name}-{rank}").read_text().splitlines()]
    return [(int(step), int(index)) for step, index, _ in rows]


def seconds_without_a_step(marks: Path) -> float:
    """From the last step before the restart to the first one after it."""
    times = [
        [
            float(line.split()[2])
            for rank in range(WORLD_SIZE)
            for line in (marks / f"{name}-{rank}").read_text().splitlines()
        ]
        for name in ("1-0", "1-1")
    ]
    return min(times[1]) - max(times[0])


def assert_resumed_exactly(marks: Path, before: str, after: str, *, step: int) -> None:
    assert min(number for number, _ in taken(marks, after)) == step + 1
    counted = [index for number, index in taken(marks, before) if number <= step]
    assert sorted(counted + [index for _, index in taken(marks, after)]) == list(range(UNITS))


def test_a_rank_killed_on_another_node_restarts_the_gang_from_the_checkpoint_with_no_element_lost_or_doubled(
    make_gang: MakeGang, tmp_path: Path
) -> None:
    env = {"MARKS": str(tmp_path), "TRY": "1"}
    plan = {"args": ["kill", "10"], "max_restarts": 3}
    gang = make_gang(TRAINS, nnodes=2, nproc=1, run=RUN, before=prepare, plan=plan, env=env)
    result = gang.wait()
    assert result.ok, gang.all_output()
    assert_resumed_exactly(tmp_path, "1-0", "1-1", step=8)
    (restart,) = restarts_of(result.nodes)
    assert (restart.number, restart.rank, restart.host, restart.checkpoint_step) == (1, 1, "host-1", 8)
    assert restart.told.startswith(
        "restart 1 of 3 after rank 1 on host-1 failed first (killed by the kernel): killed by SIGKILL"
    )
    assert restart.told.endswith("resumes from checkpoint step 8")
    for node in (0, 1):  # both nodes tell the same
        assert [one.told for one in result.nodes[node].restarts] == [restart.told]
        assert restart.told in (gang.job(node) / "err").read_text()
    waited = seconds_without_a_step(tmp_path)
    print(f"dead rank -> next step: {waited:.1f} s")
    assert waited < 60


def test_a_kill_in_the_middle_of_a_checkpoint_resumes_from_the_one_before(make_gang: MakeGang, tmp_path: Path) -> None:
    env = {"MARKS": str(tmp_path), "TRY": "1"}
    plan = {"args": ["save", "12"], "max_restarts": 1}
    gang = make_gang(TRAINS, nnodes=2, nproc=1, run=RUN, before=prepare, plan=plan, env=env)
    result = gang.wait()
    assert result.ok, gang.all_output()
    assert_resumed_exactly(tmp_path, "1-0", "1-1", step=8)
    assert [(one.rank, one.host) for one in restarts_of(result.nodes)] == [(0, "host-0")]


def test_a_next_try_on_other_hosts_resumes_from_the_copy_in_the_store(make_gang: MakeGang, tmp_path: Path) -> None:
    env = {"MARKS": str(tmp_path), "TRY": "1"}
    gang = make_gang(TRAINS, nproc=2, run=RUN, before=prepare, plan={"args": ["stay", "10"]}, env=env)
    gang.wait_for("stays at step 10")
    marker = RunKeys(RUN).checkpoints(1) + "step-000000000008.json"
    deadline = time.monotonic() + 30
    while gang.store.head(marker) is None:
        assert time.monotonic() < deadline, gang.all_output()
        time.sleep(0.1)
    for pid in gang.processes():  # the host is gone, with all that lay on it
        os.kill(pid, signal.SIGKILL)
    gang.agents[0].wait()
    plan = {"args": ["", "0"], "loaders": gang.plan["loaders"]}
    again = make_gang(TRAINS, config=gang.config, generation=2, nproc=2, run=RUN, plan=plan, env={**env, "TRY": "2"})
    result = again.wait()
    assert result.ok, again.all_output()
    assert_resumed_exactly(tmp_path, "1-0", "2-0", step=8)


def test_restarts_are_counted_for_the_gang_whichever_node_fails(make_gang: MakeGang) -> None:
    script = """
        import os, time
        if os.environ["RANK"] == os.environ["TORCHELASTIC_RESTART_COUNT"]:
            raise ValueError("rank " + os.environ["RANK"])
        time.sleep(300)
    """
    gang = make_gang(script, nnodes=2, nproc=1, plan={"max_restarts": 1})
    result = gang.wait(timeout_s=120)
    assert not result.ok
    (restart,) = restarts_of(result.nodes)
    assert (restart.rank, restart.error_class) == (0, "user error")
    assert "begins anew" in restart.told


def test_a_gang_that_is_killed_outright_leaves_no_named_semaphore(make_gang: MakeGang) -> None:
    gang = make_gang("import time\nprint('ready', flush=True)\ntime.sleep(300)", nproc=2)
    pid = gang.agents[0].pid
    for rank in (0, 1):
        gang.wait_for(f"r{rank}] ready")
    deadline = time.monotonic() + 10
    while found := list(Path("/dev/shm").glob(f"sem.taas-{pid}-*")):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    for other in gang.processes():
        os.kill(other, signal.SIGKILL)
    gang.agents[0].wait()
    assert list(Path("/dev/shm").glob(f"sem.taas-{pid}-*")) == []
