"""Gangs that hang: found on every node, with the stacks of all ranks, the odd one named; what only looks so goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from taas_tasks.delivery.counters import PassCounters
from taas_tasks.launch.files import RankFiles
from taas_tasks.launch.hang import NodeStillness, StillnessWatch, is_hang, steps_of_newest_passes
from taas_tasks.verdict import diagnose, launch_error
from tests.delivery.support import RUN, Prepared
from tests.launch.conftest import MakeGang
from tests.launch.gang import Gang

HANGS = """
    import sys, time, torch, torch.distributed as dist
    import data
    dist.init_process_group("gloo")
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(5):
        layer(torch.ones(1)).backward()
        dist.all_reduce(layer.weight.grad)
        optimizer.step()
    print("five steps", flush=True)
    if dist.get_rank() == 3 and len(sys.argv) == 1:
        data.read()
    if dist.get_rank() == 3:
        dist.barrier()
    dist.all_reduce(torch.ones(1))
    if len(sys.argv) == 1:
        time.sleep(300)
"""
DATA = "import time\n\n\ndef read():\n    time.sleep(300)\n"


def test_a_rank_that_sits_in_user_code_while_the_others_of_two_nodes_wait_is_named(make_gang: MakeGang) -> None:
    gang = make_gang(HANGS, files={"data.py": DATA}, nnodes=2, nproc=2, plan={"hang_timeout_s": 2})
    gang.wait_for("five steps", node_rank=1)
    result = gang.wait(timeout_s=90)
    assert gang.processes() == []
    error = launch_error(result)
    assert error is not None
    assert (error.fields["error_class"], error.fields["rank"], error.fields["host"]) == ("hang", 3, "host-1")
    first_line = error.message.splitlines()[0]
    assert "rank 3 sat in user code at data.py:5 (read) while ranks 0, 1, 2 waited in all_reduce" in first_line
    assert "Lost: " in error.message and "GPU-seconds (4 GPUs x " in error.message
    for rank in range(4):
        assert f"r{rank}] [taas] the training hangs; rank {rank} " in gang.out(rank // 2)
        assert "in <module>" in gang.out(rank // 2)
    assert 'data.py", line 5 in read' in gang.out(1)


def test_ranks_that_wait_in_different_collectives_are_told_apart(make_gang: MakeGang) -> None:
    gang = make_gang(HANGS, files={"data.py": DATA}, nproc=4, plan={"hang_timeout_s": 2, "args": ["mismatch"]})
    verdict = diagnose(gang.wait(timeout_s=90).nodes)
    assert verdict is not None
    assert (verdict.error_class, verdict.rank) == ("hang", 3), gang.all_output()
    assert (
        "rank 3 waited in barrier at train.py:15 (<module>) while ranks 0, 1, 2 waited in all_reduce" in verdict.message
    )


LIVES = """
    import os, time, torch, torch.distributed as dist, taas
    from torch.utils.data import DataLoader
    dist.init_process_group("gloo")
    layer = torch.nn.Linear(1, 1)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    if dist.get_rank() == 0:
        for _ in DataLoader(list(range(8)), batch_size=2):  # validation on rank 0, longer than the timeout in all
            time.sleep(0.8)
        for step in range(4):
            taas.log(step=step)
            time.sleep(0.8)
        for step in range(2):
            taas.checkpoint({}, step=step)
            time.sleep(0.8)
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(4)  # alone, after its peers have ended
    print("trained")
"""


def test_what_one_rank_does_while_its_peers_wait_is_no_hang(make_gang: MakeGang) -> None:
    gang = make_gang(LIVES, nproc=2, plan={"hang_timeout_s": 1.5})
    result = gang.wait(timeout_s=90)
    assert result.ok, gang.all_output()


def test_a_hang_is_restarted_like_any_failure(make_gang: MakeGang) -> None:
    script = """
        import os, time, torch
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(300)
        print("went on")
    """
    gang = make_gang(script, nproc=1, plan={"hang_timeout_s": 1, "max_restarts": 1})
    result = gang.wait(timeout_s=90)
    assert result.ok, gang.all_output()
    (restart,) = result.nodes[0].restarts
    assert (restart.error_class, restart.number) == ("hang", 1)
    assert "train.py:5" in restart.told


def test_waiting_for_elements_that_are_not_prepared_yet_is_no_hang(make_gang: MakeGang) -> None:
    script = """
        import torch, torch.distributed as dist, taas
        dist.init_process_group("gloo")
        loader = taas.loader("data")
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
        for step, element in enumerate(loader):
            dist.all_reduce(torch.ones(1))
            print(f"step {step}", flush=True)
    """
    made: list[Prepared] = []

    def prepare(gang: Gang) -> None:
        made.append(Prepared(gang.store, units=8, length=8))
        made[0].commit(0, 0)  # of two segments with four elements each
        gang.plan["loaders"] = {"data": made[0].plan.model_dump()}

    plan = {"hang_timeout_s": 1}
    gang = make_gang(script, nproc=2, run=RUN, before=prepare, plan=plan)
    gang.wait_for("step 1")
    time.sleep(6)  # long enough to be called a hang, three times over
    made[0].commit(0, 1)
    result = gang.wait(timeout_s=90)
    assert result.ok, gang.all_output()
    assert "r1] step 3" in gang.out()


# --- the rule ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> RankFiles:
    made = RankFiles(tmp_path)
    made.make_folders()
    return made


def note(files: RankFiles, rank: int, *, count: int = 0, optimizer_steps: int = 0, waiting: int = 0) -> None:
    numbers = (count, optimizer_steps, waiting)
    files.progress(rank).write_bytes(b"".join(number.to_bytes(8, "little") for number in numbers))


def test_before_the_first_optimizer_step_four_times_as_long_is_given(files: RankFiles) -> None:
    watch = StillnessWatch(files, [0, 1], attempt=0, timeout_s=10, now=0)
    note(files, 0, count=3)
    assert not watch.look(1).still
    assert not watch.look(41).still
    assert watch.look(41.1).still
    note(files, 1, count=1, optimizer_steps=1)
    assert not watch.look(50).still
    assert not watch.look(60).still
    assert watch.look(60.1).still


def test_a_rank_that_waits_for_data_keeps_the_gang_from_being_judged_and_is_told(files: RankFiles) -> None:
    watch = StillnessWatch(files, [0, 1], attempt=0, timeout_s=10, now=0)
    note(files, 0, optimizer_steps=1)
    note(files, 1, optimizer_steps=1, waiting=1)
    told = watch.look(1000)
    assert (told.still, told.waits_for_data) == (False, [1])
    note(files, 1, optimizer_steps=1)
    watch.look(1001)
    assert watch.look(1020).still


def test_elements_of_a_delivered_loader_are_progress(files: RankFiles) -> None:
    watch = StillnessWatch(files, [0], attempt=0, timeout_s=10, now=0)
    note(files, 0, optimizer_steps=1)
    made = [
        PassCounters(files.counters_dir, loader="a.b", rank=0, number=number, epoch=0, offset=0, replay=False)
        for number in (0, 1)
    ]
    watch.look(5)
    made[1].steps[0] += 1
    assert steps_of_newest_passes(files.counters_dir) == {0: {"a.b.000000.00000001.pass": 1}}
    assert watch.look(14).idle_s == 0
    for one in made:
        one.close()


def test_a_rank_that_has_ended_keeps_the_others_from_being_judged(files: RankFiles) -> None:
    watch = StillnessWatch(files, [0, 1], attempt=0, timeout_s=10, now=0)
    files.closing(1).touch()
    assert not watch.look(1000).still


def test_a_hang_needs_all_nodes_to_be_still_in_the_same_attempt() -> None:
    still, going = NodeStillness(attempt=1, still=True), NodeStillness(attempt=1, still=False)
    assert is_hang([still, still])
    assert not is_hang([still, going])
    assert not is_hang([still, None])
    assert not is_hang([still, NodeStillness(attempt=0, still=True)])
    assert not is_hang([])
