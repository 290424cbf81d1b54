from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import taas
from taas import context
from taas.errors import ArtifactError
from tests.taas.test_context import FakeRun


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(tmp_path)
    yield
    os.chdir(before)
    context.uninstall()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_without_a_checkpoint_there_is_none() -> None:
    assert taas.checkpoint.latest() is None


def test_the_newest_step_comes_back(tmp_path: Path) -> None:
    for step in (1, 20, 3):
        taas.checkpoint({"w": torch.full((3,), float(step)), "note": ("any", "object")}, step=step)
    found = taas.checkpoint.latest()
    assert found is not None
    step, state = found
    assert step == 20
    assert state["w"].tolist() == [20.0] * 3
    assert state["note"] == ("any", "object")


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(5):
        taas.checkpoint({}, step=step)
    steps = [
        json.loads((tmp_path / "checkpoints" / n).read_text())["step"] for n in names(tmp_path) if n.endswith("json")
    ]
    assert steps == [3, 4]
    assert len(names(tmp_path)) == 4
    taas.checkpoint({}, step=9, keep=1)
    assert len(names(tmp_path)) == 2


def test_files_of_the_users_beside_them_stay(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for name in ("step-1.pt", "step-000000000001-best.pt", "notes.json", ".step-1.tmp"):
        (tmp_path / "checkpoints" / name).write_text("{}")
    for step in range(4):
        taas.checkpoint({}, step=step, keep=1)
    assert len(names(tmp_path)) == 4 + 2
    assert taas.checkpoint.latest() == (3, {})


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    taas.checkpoint("old", step=1)
    taas.checkpoint("new", step=1)
    assert taas.checkpoint.latest() == (1, "new")
    assert len(names(tmp_path)) == 2


@pytest.mark.parametrize("numbers", [{"step": -1}, {"step": 1.0}, {"step": True}, {"step": 1, "keep": 0}])
def test_impossible_numbers_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match=r"of a checkpoint: got .*; allowed: an integer of at least"):
        taas.checkpoint({}, **numbers)


def test_a_state_that_cannot_be_saved_leaves_the_older_one(tmp_path: Path) -> None:
    taas.checkpoint("good", step=1)
    with pytest.raises((AttributeError, TypeError, RuntimeError)):
        taas.checkpoint({"x": (n for n in "a")}, step=2)
    assert taas.checkpoint.latest() == (1, "good")
    assert len(names(tmp_path)) == 2


def test_data_that_is_cut_short_or_gone_does_not_count(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        taas.checkpoint(f"state {step}", step=step, keep=3)
    data = sorted((tmp_path / "checkpoints").glob("*.pt"))
    data[2].write_bytes(data[2].read_bytes()[:-1])
    data[1].unlink()
    assert taas.checkpoint.latest() == (1, "state 1")


def test_data_that_is_spoiled_is_a_sentence(tmp_path: Path) -> None:
    taas.checkpoint("state", step=1)
    (data,) = (tmp_path / "checkpoints").glob("*.pt")
    data.write_bytes(b"x" * data.stat().st_size)
    with pytest.raises(ArtifactError, match=r"cannot read the checkpoint .*; remove it to go on from an older"):
        taas.checkpoint.latest()


def test_a_disk_that_refuses_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(ArtifactError, match=r"cannot save a checkpoint in .*checkpoints: File exists"):
        taas.checkpoint({}, step=1)


def test_inside_a_run_rank_0_writes_to_the_project_and_others_pass(tmp_path: Path) -> None:
    run = FakeRun(rank=1)
    run.project_dir = tmp_path / "project"
    context.install(run)
    taas.checkpoint("state", step=1)
    assert not run.project_dir.exists()
    run.is_rank0 = True
    taas.checkpoint("state", step=1)
    assert len(names(run.project_dir)) == 2


def test_inside_a_run_of_several_ranks_a_process_group_is_needed_to_load() -> None:
    context.install(FakeRun())
    with pytest.raises(ArtifactError, match=r"rank 0's answer, sent to all ranks; call .*init_process_group"):
        taas.checkpoint.latest()


KILLS = """
import json, os, signal, sys
from pathlib import Path
import torch, taas

def kill_at(number):
    seen = 0
    def hook(event, args):
        nonlocal seen
        if event in ("open", "os.rename", "os.remove", "os.listdir", "os.scandir") and "checkpoints" in str(args[0]):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

told = []
killed = True
while killed:
    step = 2 * len(told)
    taas.checkpoint("old", step=step)
    child = os.fork()
    if child == 0:
        kill_at(len(told) + 1)
        taas.checkpoint("new", step=step + 1)
        os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    found = taas.checkpoint.latest()
    told.append([killed, found[0] - step, found[1]])
taas.checkpoint("last", step=1000, keep=1)
print(json.dumps({"told": told, "left": sorted(os.listdir("checkpoints"))}))
"""


def test_a_save_that_is_killed_at_any_point_leaves_the_old_or_the_new_state_whole(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLS], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    result = json.loads(done.stdout)
    told = [(killed, step, state) for killed, step, state in result["told"]]
    assert set(told[:-1]) == {(True, 0, "old"), (True, 1, "new")}  # kills before the marker, and behind it
    assert told[-1] == (False, 1, "new")
    assert told == sorted(told, key=lambda one: one[1])
    assert len(told) > 10
    assert len(result["left"]) == 2


RANK = """
import os, sys, json
import torch.distributed as dist
import taas
rank = int(os.environ["RANK"])
os.makedirs(f"host-{rank}")
os.chdir(f"host-{rank}")
dist.init_process_group("gloo", init_method="env://")
assert taas.checkpoint.latest() is None
taas.checkpoint({"from": rank}, step=7)
found = taas.checkpoint.latest()
print(json.dumps([found, os.path.exists("checkpoints")]), flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)
"""


def test_every_rank_gets_rank_0s_checkpoint_on_another_host_too(tmp_path: Path, free_port: int) -> None:
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port), "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(command, cwd=tmp_path, env={**environ, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [json.loads(output) for output in outputs] == [[[7, {"from": 0}], True], [[7, {"from": 0}], False]]


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Counting:
    """As a delivered loader: its state says what the loop took."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[int]:
        while self.taken < 2500:
            self.taken += 1
            yield self.taken - 1

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


def test_the_script_of_the_documentation_goes_on_at_the_element_behind_its_checkpoint(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "exactness.md").read_text()
    (script,) = [part.split("```")[0] for part in text.split("```python\n")[1:] if "taas.checkpoint.latest()" in part]
    tries: list[list[int]] = []
    for fails_at in (2200, None):
        run = FakeRun()
        run.project_dir, run.world_size = tmp_path, 1
        run.loaders["data_loader"] = Counting()  # type: ignore[assignment]
        context.install(run)
        seen: list[int] = []
        tries.append(seen)

        def train(element: int, *, seen: list[int] = seen, fails_at: int | None = fails_at) -> None:
            if element == fails_at:
                raise RuntimeError("the rank fails")
            seen.append(element)

        names = {"taas": taas, "model": torch.nn.Linear(1, 1), "train": train}
        if fails_at is None:
            exec(script, names)
        else:
            with pytest.raises(RuntimeError, match="the rank fails"):
                exec(script, names)
        context.uninstall()
    assert tries == [list(range(2200)), list(range(2000, 2500))]
    assert names["step"] == 2500
