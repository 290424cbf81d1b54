"""The report, as the task ``report`` writes it: what Airflow knows of the tasks, what the store knows of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from taas.errors import ObjectMissing
from taas.flavors import Flavor
from taas_tasks.airflow.scope import STARTED_AT, Scope, task_states
from taas_tasks.report import as_text, build_report, collect
from taas_tasks.store import ObjectStore
from taas_tasks.values import Report, TaskTime

_STEPS = ("validate", "inspect", "plan", "prepare", "gate", "train", "upload", "release")


def task_times(context: Mapping[str, Any], scope: Scope) -> Iterator[TaskTime]:
    """Yield when the tasks that have ended began and ended."""
    ti = context["ti"]
    for row in ti.get_task_breadcrumbs(dag_id=scope.dag_id, run_id=scope.run_id):
        if row["task_id"] not in _STEPS:
            continue
        map_index = int(row["map_index"])
        started = ti.xcom_pull(task_ids=row["task_id"], map_indexes=map_index, key=STARTED_AT)
        seconds = row.get("duration")
        ended = started + seconds if started is not None and seconds is not None else None
        yield TaskTime(
            task_id=row["task_id"],
            map_index=map_index,
            state=row.get("state"),
            started_at=started,
            ended_at=ended,
        )


def failed_tasks(states: Mapping[str, str | None]) -> list[str]:
    """Return the names of the tasks that made the run fail: those that failed, else those that never got to run.

    A run that a user marked failed between two tasks has no failed task: then ``upload`` not having run is the failure.
    """
    steps = {name: state for name, state in states.items() if _step_of(name) in _STEPS[:-1]}
    in_order = sorted(steps, key=lambda name: (_STEPS.index(_step_of(name)), name))
    failed = [name for name in in_order if steps[name] == "failed"]
    blocked = [name for name in in_order if steps[name] == "upstream_failed"]
    return failed or blocked or ([] if steps.get("upload") == "success" else ["upload"])


def _step_of(name: str) -> str:
    return name.rpartition("_")[0] or name


def write_report(
    context: Mapping[str, Any], scope: Scope, store: ObjectStore, flavors: Mapping[str, Flavor]
) -> tuple[Report, str]:
    """Write the report as JSON and as text, and return both."""
    failed = failed_tasks(task_states(scope))
    facts = collect(store, scope.run, run_id=scope.run_id, tasks=task_times(context, scope))
    verdict = _verdict(store, scope, failed) if failed else None
    report = build_report(facts, flavors=flavors, failed_tasks=failed, verdict=verdict)
    text = as_text(report)
    store.put(scope.keys.report, report.to_bytes())
    store.put(scope.keys.report_text, text.encode())
    return report, text


def _verdict(store: ObjectStore, scope: Scope, failed: list[str]) -> str:
    """Return what failed and why: the tasks' own words, which they left in the store, the culprit's first."""
    culprit = _culprit(store, scope)
    in_order = sorted(failed, key=lambda name: name != culprit)
    words = [f"{name}: {said}" for name in in_order if (said := _last_words(store, scope, name))]
    return "\n".join(words) or f"{', '.join(failed)}: ended by a user, or killed before it could say why"


def _culprit(store: ObjectStore, scope: Scope) -> str | None:
    """Return the task that told the hosts to stop: the first one that failed for good while others ran."""
    try:
        return store.get(scope.keys.abort).decode().partition(":")[0]
    except ObjectMissing:
        return None


def _last_words(store: ObjectStore, scope: Scope, name: str) -> str | None:
    key = scope.keys.last_words(name)
    return store.get(key).decode() if store.head(key) is not None else None
