"""The report: facts in, phases, prices, stall and verdict out."""

import json

import pytest

from taas.flavors import FLAVORS
from taas.request import parse_request
from taas_tasks.layout import RunKeys
from taas_tasks.report import as_text, build_report, collect
from taas_tasks.result_values import NodeResult, RankPass, RankResult
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import Artifact, ArtifactRecord, JobRecord, PinnedRequest, Plan, TaskTime
from tests.test_accounting import loader_plan, record

KEYS = RunKeys("run-1")
REQUEST = {
    "project": "p",
    "script": "train.py",
    "gpus": 8,
    "cpus": 1,
    "units": 16,
    "loaders": {"data_loader": "data.py:make_loader"},
}


def job(task: str, *, seconds: float, flavor: str, generation: int = 1, host: str = "h") -> JobRecord:
    return JobRecord(
        job_id=f"{task}-{host}-{generation}",
        task_id=task,
        generation=generation,
        host=host,
        flavor=flavor,
        ok=True,
        started_at=100.0,
        ended_at=100.0 + seconds,
    )


def node(generation: int, *, steps: int) -> NodeResult:
    passes = [
        RankPass(
            loader="data_loader",
            rank=rank,
            number=0,
            epoch=0,
            offset=0,
            num_steps=steps,
            complete=True,
            replay=False,
            wait_s=0.5 * rank,
            num_bytes=8,
        )
        for rank in range(8)
    ]
    ranks = [RankResult(rank=one.rank, local_rank=one.rank, exit_code=0, passes=[one]) for one in passes]
    return NodeResult(
        node_rank=0,
        host="g2-0",
        generation=generation,
        ok=True,
        ranks=ranks,
        delivered={"data_loader": 16},
        times={"ranks_started": 100.0, "ranks_ended": 110.0},
    )


def store_of_a_run() -> MemoryStore:
    store = MemoryStore()
    plan = Plan(
        run="run-1",
        run_id="r",
        project="p",
        snapshot="s",
        loaders={"data_loader": loader_plan(16)},
        seed=0,
        randomness="element",
        remainder="pad",
        flavor="g2.8",
        nnodes=1,
        nproc_per_node=8,
        cpus=1,
        warnings=["a warning of the plan"],
    )
    pinned = PinnedRequest(run_id="r", run="run-1", request=parse_request(REQUEST), snapshot="s", base_record=1)
    store.put(KEYS.plan, plan.to_bytes())
    store.put(KEYS.request, pinned.to_bytes())
    store.put(KEYS.ledger_record("data_loader", 0, 0, 0), record(0, 16).to_bytes())
    for one in [job("prepare", seconds=10, flavor="c1.4"), job("train", seconds=20, flavor="g2.8", generation=2)]:
        store.put(KEYS.job_record(one.job_id), one.to_bytes())
    store.put(KEYS.node_result(1, 0), node(1, steps=1).to_bytes())
    store.put(KEYS.node_result(2, 0), node(2, steps=2).to_bytes())
    metrics = [{"step": step, "loss": 1.0 / (step + 1)} for step in range(3)]
    store.put(KEYS.metrics(2), "\n".join(map(json.dumps, metrics)).encode())
    artifact = Artifact(path="m.pt", sha256="ab" * 32, bytes=3, mode=0o644)
    store.put(KEYS.artifacts, ArtifactRecord(project="p", record=2, snapshot="t", files=[artifact]).to_bytes())
    return store


def report_of(store: MemoryStore, **more):
    tasks = [TaskTime(task_id="train", state="success", started_at=90.0, ended_at=125.0)]
    return build_report(collect(store, "run-1", run_id="r", tasks=tasks), flavors=FLAVORS, **more)


def test_a_report_of_a_success_closes_the_books_and_prices_machine_seconds():
    report = report_of(store_of_a_run())
    assert report.state == "success"
    assert report.cost == {"prepare": 40.0, "train": 20 * 928.0, "total": 40.0 + 20 * 928.0}
    account = report.loaders["data_loader"]
    assert (account.asked, account.extracted, account.delivered, account.consumed) == (16, 16, 16, 16)
    assert account.explained
    assert [one.path for one in report.artifacts] == ["m.pt"]
    assert [entry["loss"] for entry in report.metrics] == [1.0, 0.5, 1.0 / 3]
    assert report.warnings == ["a warning of the plan"]


def test_only_the_latest_generation_of_the_training_counts():
    assert report_of(store_of_a_run()).loaders["data_loader"].consumed == 16  # generation 1 consumed 8


def test_waiting_is_told_as_a_share_of_the_ranks_time():
    stall = report_of(store_of_a_run()).gpu_stall
    assert stall["worst_rank"] == 7
    assert stall["worst_wait_s"] == 3.5
    assert stall["stall_fraction"] == round(sum(0.5 * rank for rank in range(8)) / (8 * 10.0), 4)


def test_books_that_do_not_close_become_a_warning_of_a_success():
    store = store_of_a_run()
    store.put(KEYS.ledger_record("data_loader", 0, 0, 0), record(0, 8).to_bytes())
    warnings = report_of(store).warnings
    assert any("asked for 16 units, the ledger holds 8" in one for one in warnings)


def test_what_hosts_had_to_prepare_again_is_a_warning():
    store = store_of_a_run()
    mended = node(2, steps=2).model_copy(update={"repairs": ["segment 3 was lost; prepared again"]})
    store.put(KEYS.node_result(2, 0), mended.to_bytes())
    assert report_of(store).warnings == ["a warning of the plan", "segment 3 was lost; prepared again"]


def test_a_garbage_record_is_a_warning_that_says_the_way_out_and_the_report_is_written():
    store = store_of_a_run()
    key = KEYS.ledger_record("data_loader", 0, 0, 1)
    store.put(key, b"not a record")
    report = report_of(store)
    [warning] = [one for one in report.warnings if key in one]
    assert "Remove that object, then clear prepare and train" in warning
    assert report.loaders["data_loader"].extracted == 16
    assert key in as_text(report)


def test_very_many_garbage_records_are_told_by_their_number():
    store = store_of_a_run()
    for n in range(1, 31):
        store.put(KEYS.ledger_record("data_loader", 0, 0, n), b"{}")
    warnings = [one for one in report_of(store).warnings if "record" in one]
    assert len(warnings) == 11
    assert warnings[-1] == "20 more records of loader 'data_loader' are like that"


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (KEYS.plan, "Plan"),
        (KEYS.request, "PinnedRequest"),
        (KEYS.job_record("more"), "JobRecord"),
        (KEYS.node_result(2, 1), "NodeResult"),
        (KEYS.artifacts, "ArtifactRecord"),
        (KEYS.gate, "GateDecision"),
    ],
)
def test_any_garbage_object_of_a_run_is_left_out_and_told(key: str, kind: str):
    store = store_of_a_run()
    store.put(key, b'{"version": 9}')
    report = report_of(store)
    assert [one for one in report.warnings if one.startswith(f"{key!r} is no {kind} and is left out")]
    assert report.cost["total"] > 0


def test_metrics_that_are_cut_off_are_left_out_and_told():
    store = store_of_a_run()
    store.put(KEYS.metrics(2), b'{"loss": 1}\n{"lo')
    report = report_of(store)
    assert report.metrics == []
    assert any("does not hold metrics" in one for one in report.warnings)


def test_a_failed_run_that_wrote_nothing_has_a_report_with_its_verdict():
    report = report_of(MemoryStore(), failed_tasks=["validate"], verdict="unknown flavor")
    assert (report.state, report.verdict, report.loaders) == ("failed", "unknown flavor", {})
    assert "unknown flavor" in as_text(report)
