"""What the client is told about preparing: cheap to ask often, and right in spite of a garbage record."""

from __future__ import annotations

from taas_tasks.airflow.run_status import Followed
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import Plan
from tests.airflow.test_gate_watch import SCOPE, commit, planned
from tests.test_ledger import CountingStore


def counting() -> CountingStore:
    store, made = CountingStore(), planned()
    for key in (SCOPE.keys.plan, SCOPE.keys.request):
        store.put(key, made.get(key))
    return store


def test_before_the_plan_nothing_is_told():
    assert Followed().prepared(MemoryStore(), SCOPE.run) == ({}, [])


def test_asking_again_costs_the_plan_and_what_is_new():
    store, followed = counting(), Followed()
    for n in range(3):
        commit(store, n)
    assert followed.prepared(store, SCOPE.run) == ({"x": {"units": 96, "asked": 128}}, [])
    store.asked.clear()
    assert followed.prepared(store, SCOPE.run)[0] == {"x": {"units": 96, "asked": 128}}
    assert store.asked == [SCOPE.keys.plan, SCOPE.keys.ledger_record("x", 0, 0, 3)]
    commit(store, 3)
    assert followed.prepared(store, SCOPE.run)[0] == {"x": {"units": 128, "asked": 128}}


def test_a_run_that_is_planned_again_is_followed_anew():
    store, followed = counting(), Followed()
    commit(store, 0)
    followed.prepared(store, SCOPE.run)
    plan = Plan.model_validate_json(store.get(SCOPE.keys.plan))
    loader = plan.loaders["x"].model_copy(update={"units": 256})
    store.put(SCOPE.keys.plan, plan.model_copy(update={"loaders": {"x": loader}}).to_bytes())
    assert followed.prepared(store, SCOPE.run)[0] == {"x": {"units": 32, "asked": 256}}


def test_what_was_not_asked_about_for_long_is_forgotten_and_found_again():
    followed = Followed(max_runs=1)
    stores = [counting(), counting()]
    for store in stores:
        commit(store, 0)
    for _ in range(2):
        for store in stores:
            assert followed.prepared(store, SCOPE.run)[0]["x"]["units"] == 32


def test_a_garbage_record_is_told_beside_the_progress_before_it():
    store, followed = counting(), Followed()
    commit(store, 0)
    followed.prepared(store, SCOPE.run)
    store.put(SCOPE.keys.ledger_record("x", 0, 0, 1), b"garbage")
    prepared, [fault] = followed.prepared(store, SCOPE.run)
    assert prepared == {"x": {"units": 32, "asked": 128}}
    assert fault.startswith("x: the ledger's record")
    commit(store, 1)
    assert followed.prepared(store, SCOPE.run) == ({"x": {"units": 64, "asked": 128}}, [])
