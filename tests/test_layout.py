"""Keys and paths: their exact form is a contract with what is stored already."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taas_tasks.layout import HostPaths, ProjectKeys, RunKeys, payload_key, run_key
from taas_tasks.store.keys import check_key

HOSTILE = ["../../etc", "a/b", "manual__2026-01-01T00:00:00+00:00", "; rm -rf ~", "\n", "日本", "", ".", "-", "x" * 500]


def test_the_exact_keys_of_a_run() -> None:
    keys = RunKeys("r")
    assert keys.request == "runs/r/request.json"
    assert keys.plan == "runs/r/plan.json"
    assert keys.abort == "runs/r/abort"
    assert keys.gate == "runs/r/gate.json"
    assert keys.report == "runs/r/report.json"
    assert keys.inspection("data") == "runs/r/inspect/data.json"
    assert keys.order_chunk("data", 1, 2) == "runs/r/order/data/000001/000002.arrow"
    shard = keys.shard("data", 1, 2, 3, generation=4, machine=5)
    assert shard == "runs/r/shards/data/000001/0002/00000003-m5-g4.arrow"
    assert keys.ledger_record("data", 1, 2, 3) == "runs/r/ledger/data/000001/0002/00000003.json"
    assert keys.node_info(1, 0) == "runs/r/train/g0001/node-0.json"
    assert keys.node_result(1, 0) == "runs/r/train/g0001/result-0.json"
    assert keys.rank_log(1, 7) == "runs/r/train/g0001/logs/rank-7.log"
    assert keys.staged(1) == "runs/r/train/g0001/staged.json"
    assert keys.metrics(1) == "runs/r/train/g0001/metrics.jsonl"


def test_the_exact_keys_of_a_project() -> None:
    keys = ProjectKeys("p")
    assert keys.record(7) == "projects/p/history/0000000007.json"
    assert keys.blob("abcd") == "projects/p/blobs/ab/abcd"
    assert keys.snapshot("abcd") == "projects/p/snapshots/abcd.json"
    assert payload_key("p", "abcd") == "projects/p/payloads/abcd"


def test_the_exact_folders_of_a_host() -> None:
    paths = HostPaths(Path("/h"))
    assert paths.job("j") == Path("/h/jobs/j")
    assert paths.slots == Path("/h/slots")
    assert paths.cache == Path("/h/cache")
    assert paths.project("r", 2) == Path("/h/runs/r/g0002/project")
    assert paths.scratch("r", 2) == Path("/h/runs/r/g0002/scratch")


def test_all_that_a_try_writes_is_below_its_own_prefix() -> None:
    keys = RunKeys("r")
    for of in (keys.staged, keys.metrics, lambda g: keys.node_result(g, 0), lambda g: keys.rank_log(g, 0)):
        assert of(1).startswith(keys.train(1))
        assert of(1) != of(2)
    assert not keys.train(11).startswith(keys.train(1))


def test_keys_sort_as_their_numbers_do() -> None:
    keys, project = RunKeys("r"), ProjectKeys("p")
    numbers = [0, 1, 9, 10, 99, 100, 12345]
    assert sorted(keys.ledger_record("d", 0, 0, n) for n in numbers) == [
        keys.ledger_record("d", 0, 0, n) for n in numbers
    ]
    assert sorted(project.record(n) for n in numbers) == [project.record(n) for n in numbers]


@pytest.mark.parametrize("run_id", HOSTILE)
def test_a_hostile_run_id_becomes_one_safe_part_of_a_key(run_id: str) -> None:
    key = run_key(run_id)
    assert check_key(RunKeys(key).request)
    assert "/" not in key
    assert len(key) <= 59
    assert not key.startswith((".", "-"))


def test_run_ids_that_read_alike_have_keys_of_their_own() -> None:
    assert len({run_key(each) for each in ("a b", "a/b", "a-b", "a:b", "a--b")}) == 5
    assert run_key("scheduled__1").startswith("scheduled__1-")


@settings(deadline=None)
@given(st.text(), st.text())
def test_different_run_ids_never_share_a_key(one: str, other: str) -> None:
    try:
        keys = run_key(one), run_key(other)
    except UnicodeEncodeError:
        return
    assert (keys[0] == keys[1]) == (one == other)
