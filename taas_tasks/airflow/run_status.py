"""How a run is doing, for the client: Airflow's own rows for state, the store for progress."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from sqlalchemy import select
from sqlalchemy.orm import Session

from taas.errors import ObjectCorrupt, ObjectMissing
from taas_tasks.airflow.conf_check import DAG_ID
from taas_tasks.layout import RunKeys, run_key
from taas_tasks.ledger_reader import LedgerReader
from taas_tasks.store import ObjectStore
from taas_tasks.values import LoaderPlan, Plan

_ORDER = ("validate", "inspect", "plan", "prepare", "gate", "train", "upload", "release", "report")
_BUSY = ("running", "deferred", "queued", "scheduled", "up_for_retry", "up_for_reschedule", "restarting")


@dataclass(frozen=True)
class TaskRow:
    """What is shown of one task instance."""

    task_id: str
    map_index: int
    label: str | None
    state: str | None
    start: datetime | None
    end: datetime | None

    @property
    def seconds(self) -> float | None:
        """How long it took, or None while it is not over."""
        return (self.end - self.start).total_seconds() if self.start and self.end else None


def phase_of(rows: Sequence[TaskRow]) -> str | None:
    """Return the furthest step that is at work, else the furthest that has ended; None before the first."""
    for states in (_BUSY, ("success", "failed")):
        for task_id in reversed(_ORDER):
            if any(row.task_id == task_id and row.state in states for row in rows):
                return task_id
    return None


def status_lines(rows: Iterable[TaskRow]) -> list[str]:
    """Return one line per task that has begun, in the order of the steps."""
    begun = [row for row in rows if row.state not in (None, "skipped") and row.task_id in _ORDER]
    begun.sort(key=lambda row: (_ORDER.index(row.task_id), row.map_index))
    return [_line(row) for row in begun]


def _line(row: TaskRow) -> str:
    name = f"{row.task_id} [{row.label or row.map_index}]" if row.map_index >= 0 else row.task_id
    seconds = f" after {row.seconds:.1f} s" if row.seconds is not None and row.state not in _BUSY else ""
    return f"{name}: {'waiting' if row.state == 'deferred' else row.state}{seconds}"


def _rows(session: Session, run_id: str) -> list[TaskRow]:
    found = session.scalars(select(TaskInstance).where(TaskInstance.dag_id == DAG_ID, TaskInstance.run_id == run_id))
    return [
        TaskRow(
            task_id=ti.task_id,
            map_index=ti.map_index,
            label=ti.rendered_map_index,
            state=str(ti.state) if ti.state else None,
            start=ti.start_date,
            end=ti.end_date,
        )
        for ti in found
    ]


class Followed:
    """The ledgers of the runs that were asked about lately: each question costs what is new since the one before.

    Safe to use from several threads. Forgets what was not asked about for longest.
    """

    def __init__(self, *, max_runs: int = 32) -> None:
        self._max_runs = max_runs
        self._lock = threading.Lock()
        self._readers: OrderedDict[tuple[int, bytes], tuple[threading.Lock, dict[str, LedgerReader]]] = OrderedDict()

    def prepared(self, store: ObjectStore, run: str) -> tuple[dict[str, dict[str, int]], list[str]]:
        """Return how many units of each loader are there without a gap, of how many; and what people must be told.

        That are the plan's warnings, before the training is paid for, and what is wrong with a ledger.

        Empty before the plan is made.
        """
        try:
            data = store.get(RunKeys(run).plan)
        except ObjectMissing:
            return {}, []
        plan = Plan.model_validate_json(data)
        lock, readers = self._of((id(store), hashlib.sha256(data).digest()))  # planned again: another run
        told = [f"plan: warning: {text}" for text in plan.warnings]
        with lock:
            for name, loader in plan.loaders.items():
                try:
                    _advance(readers, store, run, loader)
                except ObjectCorrupt as error:
                    told.append(f"{name}: {error.message}")
            marks = {name: reader.watermark for name, reader in readers.items()}
        return {name: {"units": mark.units, "asked": mark.asked} for name, mark in marks.items()}, told

    def _of(self, key: tuple[int, bytes]) -> tuple[threading.Lock, dict[str, LedgerReader]]:
        with self._lock:
            found = self._readers.setdefault(key, (threading.Lock(), {}))
            self._readers.move_to_end(key)
            if len(self._readers) > self._max_runs:
                self._readers.popitem(last=False)
            return found


def _advance(readers: dict[str, LedgerReader], store: ObjectStore, run: str, loader: LoaderPlan) -> None:
    if loader.loader not in readers:
        reader = LedgerReader(store, run, loader)
        reader.catch_up()
        readers[loader.loader] = reader
    readers[loader.loader].poll()


_followed = Followed()
"""Of this process: the API server's."""


def run_status(session: Session, store: ObjectStore, run_id: str) -> dict[str, Any] | None:
    """Return the status of a run, or None when there is no such run."""
    state = session.scalar(select(DagRun.state).where(DagRun.dag_id == DAG_ID, DagRun.run_id == run_id))
    if state is None:
        return None
    rows = _rows(session, run_id)
    prepared, told = _followed.prepared(store, run_key(run_id))
    return {
        "run_id": run_id,
        "state": str(state),
        "phase": phase_of(rows),
        "lines": status_lines(rows) + told,
        "prepared": prepared,
    }
