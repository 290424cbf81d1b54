"""Who a task is and what it may know of the other tasks of its run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from taas_tasks.layout import RunKeys, run_key

STARTED_AT = "started_at"
_LOG_OFFSET = "log_offset"
_FAILED = ("failed", "upstream_failed")


@dataclass(frozen=True)
class Scope:
    """One try of one task of one run. ``owner`` is new in every try and survives deferrals."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    owner: str

    @property
    def run(self) -> str:
        """The run's name in keys and paths."""
        return run_key(self.run_id)

    @property
    def keys(self) -> RunKeys:
        """The run's keys in the store."""
        return RunKeys(self.run)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the scope as the kwargs of a trigger."""
        return asdict(self)

    @property
    def state_name(self) -> str:
        """How Airflow names the task in its map of states."""
        return self.task_id if self.map_index < 0 else f"{self.task_id}_{self.map_index}"


def scope_of(context: Mapping[str, Any]) -> Scope:
    """Return the scope of the task that runs."""
    ti = context["ti"]
    map_index = -1 if ti.map_index is None else int(ti.map_index)
    return Scope(dag_id=ti.dag_id, run_id=ti.run_id, task_id=ti.task_id, map_index=map_index, owner=str(ti.id))


def note_start(context: Mapping[str, Any]) -> None:
    """Keep when this try began: Airflow tells a task nothing of when the others did, and the report wants to know."""
    context["ti"].xcom_push(STARTED_AT, time.time())


def task_states(scope: Scope, task_ids: Sequence[str] = ()) -> dict[str, str | None]:
    """Return the states of the run's tasks by name (``prepare_0`` for a mapped one); all tasks when none are named."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    found = RuntimeTaskInstance.get_task_states(
        dag_id=scope.dag_id, task_ids=list(task_ids) or None, run_ids=[scope.run_id]
    )
    return dict(found.get(scope.run_id, {}))


def num_stopped(scope: Scope, task_ids: Sequence[str], *, states: Sequence[str] = _FAILED) -> int:
    """Return how many instances of other tasks of the run are in one of the states (failed for good, by default)."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    return int(
        RuntimeTaskInstance.get_ti_count(
            dag_id=scope.dag_id, task_ids=list(task_ids), run_ids=[scope.run_id], states=list(states)
        )
    )


def offsets_of(kept: Any) -> list[int]:
    """Return the offsets that were kept; it was one number when only the first job's log was shown."""
    return [int(offset) for offset in (kept if isinstance(kept, list) else [kept or 0])]


def read_offsets(scope: Scope) -> list[int]:
    """Return how far the log of each job was shown in this try (node 0's first; empty: of none).

    An XCom: a trigger has no other place that outlives it.
    """
    from airflow.sdk.execution_time.xcom import XCom

    kept = XCom.get_one(
        key=_LOG_OFFSET,
        dag_id=scope.dag_id,
        task_id=scope.task_id,
        run_id=scope.run_id,
        map_index=scope.map_index,
    )
    return offsets_of(kept)


def write_offsets(scope: Scope, offsets: Sequence[int]) -> None:
    """Keep how far the jobs' logs were shown, so that a restarted triggerer does not show it again."""
    from airflow.sdk.execution_time.xcom import XCom

    XCom.set(
        key=_LOG_OFFSET,
        value=list(offsets),
        dag_id=scope.dag_id,
        task_id=scope.task_id,
        run_id=scope.run_id,
        map_index=scope.map_index,
    )
