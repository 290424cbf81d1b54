"""How a run is doing, for the client: Airflow's own rows for state, the store for progress."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from sqlalchemy import select
from sqlalchemy.orm import Session

from taas.errors import ObjectMissing
from taas_tasks.airflow.conf_check import DAG_ID
from taas_tasks.layout import RunKeys, run_key
from taas_tasks.ledger_reader import LedgerReader
from taas_tasks.store import ObjectStore
from taas_tasks.values import Placement, Plan

_ORDER = ("validate", "inspect", "plan", "prepare", "gate", "train", "upload", "release", "report")
_LOG_PIECE_BYTES = 1 << 20
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


def prepared(store: ObjectStore, run: str) -> dict[str, dict[str, int]]:
    """Return how many units of each loader are there without a gap, of how many; empty before the plan is made."""
    try:
        plan = Plan.model_validate_json(store.get(RunKeys(run).plan))
    except ObjectMissing:
        return {}
    return {name: _progress(LedgerReader(store, run, loader)) for name, loader in plan.loaders.items()}


def _progress(reader: LedgerReader) -> dict[str, int]:
    reader.poll()
    mark = reader.watermark
    return {"units": mark.units, "asked": mark.asked}


def run_status(session: Session, store: ObjectStore, run_id: str) -> dict[str, Any] | None:
    """Return the status of a run, or None when there is no such run."""
    state = session.scalar(select(DagRun.state).where(DagRun.dag_id == DAG_ID, DagRun.run_id == run_id))
    if state is None:
        return None
    rows = _rows(session, run_id)
    return {
        "run_id": run_id,
        "state": str(state),
        "phase": phase_of(rows),
        "lines": status_lines(rows),
        "prepared": prepared(store, run_key(run_id)),
    }


@dataclass(frozen=True)
class LogPiece:
    """A piece of a log: ``next_offset`` is where to read on; ``complete``: there will be no more."""

    text: str
    next_offset: int
    complete: bool


def read_rank_log(store: ObjectStore, run: str, *, rank: int, offset: int) -> LogPiece:
    """Return a piece of a rank's log in the newest try of the training; nothing until the node agent has put it."""
    keys = RunKeys(run)
    try:
        generation = Placement.model_validate_json(store.get(keys.placement("train", -1))).generation
    except ObjectMissing:
        return LogPiece("", offset, complete=False)
    key = keys.rank_log(generation, rank)
    info = store.head(key)
    if info is None or offset >= info.num_bytes:
        return LogPiece("", offset, complete=info is not None)
    stop = min(info.num_bytes, offset + _LOG_PIECE_BYTES)
    raw = store.get_range(key, offset, stop)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(raw, stop == info.num_bytes)
    pending = len(decoder.getstate()[0])
    return LogPiece(text, stop - pending, complete=stop == info.num_bytes)
