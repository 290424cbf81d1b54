"""What the ranks of several hosts wrote, read while they run: together and alone; what of a request reaches them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from taas_tasks.layout import RunKeys
from taas_tasks.rank_logs import LogPart, read_logs
from taas_tasks.values import PlacedJob, Placement, Plan
from tests.launch.conftest import MakeGang
from tests.launch.gang import Gang

SCRIPT = """
    import json, os, pathlib, time
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0:
        names = ("USERS_OWN", "PATH", "LD_LIBRARY_PATH", "THE_SECRET")
        print(json.dumps({name: os.environ[name] for name in names}), flush=True)
        print("läuft", end="", flush=True)
        while not pathlib.Path(os.environ["GO"]).exists():
            time.sleep(0.05)
        if rank == 3:
            raise ValueError("not yet")
        time.sleep(300)
    print("ends well")
"""


def put_where_it_runs(gang: Gang) -> None:
    """Put what ``plan`` and the task ``train`` tell of a run."""
    keys, given = RunKeys(gang.run), gang.launch_plan(0)
    common: dict[str, Any] = {"loaders": {}, "seed": 0, "randomness": "element", "remainder": "pad", "cpus": 4}
    same = {name: getattr(given, name) for name in ("run", "run_id", "project", "snapshot", "flavor")}
    plan = Plan(**common, **same, nnodes=given.nnodes, nproc_per_node=given.nproc_per_node)
    gang.store.put(keys.plan, plan.to_bytes())
    jobs = [PlacedJob(host=f"host-{node}", job_id=f"job-{node}") for node in range(given.nnodes)]
    placed = Placement(task_id="train", generation=1, flavor=given.flavor, jobs=jobs, asked_at=0)
    gang.store.put(keys.placement("train", -1), placed.to_bytes())


def read_until(
    gang: Gang, *words: str, rank: int | None, cursor: str = ""
) -> tuple[dict[tuple[Any, Any], str], LogPart]:
    """Follow until each rank that is read has written the words; return what each wrote behind the cursor."""
    texts: dict[tuple[Any, Any], str] = {}
    wanted = range(4) if rank is None else [rank]
    deadline = time.monotonic() + 60
    while True:
        part = read_logs(gang.store, gang.run, rank=rank, cursor=cursor)
        cursor = part.cursor
        for one in part.texts:
            texts[one.host, one.rank] = texts.get((one.host, one.rank), "") + one.text
        found = {number for (_, number), text in texts.items() if all(word in text for word in words)}
        if found >= set(wanted):
            return texts, part
        assert time.monotonic() < deadline, f"{texts}\n{gang.all_output()}"
        time.sleep(0.1)


def test_logs_of_all_hosts_are_read_while_they_run_and_what_the_request_sets_reaches_every_rank(
    make_gang: MakeGang, tmp_path: Path
) -> None:
    env = {
        "USERS_OWN": "a;$(b) 'c'\nü",
        "PATH": "/users/bin",
        "LD_LIBRARY_PATH": "/users/lib",
        "GO": str(tmp_path / "go"),
    }
    gang = make_gang(SCRIPT, nnodes=2, nproc=2, env=env, plan={"max_restarts": 1}, before=put_where_it_runs)
    texts, together = read_until(gang, "läuft", rank=None)
    assert set(texts) == {("host-0", 0), ("host-0", 1), ("host-1", 2), ("host-1", 3)}
    for text in texts.values():
        told = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
        assert told["PATH"] == f"/users/bin:{os.environ['PATH']}"
        assert told["LD_LIBRARY_PATH"].split(":")[0] == "/users/lib"
        assert (told["USERS_OWN"], told["THE_SECRET"]) == (env["USERS_OWN"], "s3cret")
    alone, at = read_until(gang, "läuft", rank=2)
    assert set(alone) == {("host-1", 2)}
    assert not together.complete and gang.agents[1].poll() is None  # all of this while it runs
    (tmp_path / "go").touch()
    rest, _ = read_until(gang, "ends well\n", rank=2, cursor=at.cursor)
    gang.wait()
    assert rest[("host-1", 2)] == "\n[taas] restart 1: rank 2 starts again\nends well\n"
    whole = gang.store.get(RunKeys(gang.run).rank_log(1, 2)).decode()
    assert alone["host-1", 2] + rest["host-1", 2] == whole
    assert set(read_until(gang, "ends well\n", rank=None, cursor=together.cursor)[0]) == set(texts)
    lines = gang.out(1).splitlines()
    assert [line for line in lines if "starts again" in line] == [
        f"[host-1 r{rank}] [taas] restart 1: rank {rank} starts again" for rank in (2, 3)
    ]
