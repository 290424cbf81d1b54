"""The report of a run: what was asked, extracted, delivered and consumed, how long each phase took and what it cost.

``collect`` reads the facts from the store, ``build_report`` (pure) turns them into a ``Report``, ``as_text`` prints it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from taas.errors import ObjectCorrupt, ObjectMissing
from taas.flavors import Flavor
from taas.report_text import report_text
from taas_tasks.accounting import account_loader
from taas_tasks.layout import RunKeys
from taas_tasks.ledger import read_record
from taas_tasks.result_values import LaunchResult, NodeResult, RankPass
from taas_tasks.store.base import ObjectStore
from taas_tasks.values import (
    ArtifactRecord,
    GateDecision,
    JobRecord,
    LoaderAccount,
    Phase,
    PinnedRequest,
    Plan,
    Report,
    ShardRecord,
    TaskTime,
    Value,
)
from taas_tasks.verdict import restarts_of

_V = TypeVar("_V", bound=Value)
_READ_THREADS = 16
_MAX_METRICS = 2000
_MAX_FAULTS = 10


@dataclass(frozen=True)
class RunFacts:
    """What the store knows of a run. Much may be missing: a report is written for a failed run too."""

    run: str
    run_id: str
    pinned: PinnedRequest | None = None
    plan: Plan | None = None
    records: Mapping[str, list[ShardRecord]] = field(default_factory=dict)
    gate: GateDecision | None = None
    launch: LaunchResult | None = None
    artifacts: ArtifactRecord | None = None
    jobs: list[JobRecord] = field(default_factory=list)
    tasks: list[TaskTime] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # what of the run cannot be read


class _Facts:
    """Reads values of one run; what is garbage is left out and told in ``faults``, so that there is a report."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.faults: list[str] = []

    def read(self, key: str, kind: type[_V]) -> _V | None:
        try:
            return kind.model_validate_json(self.store.get(key))
        except ObjectMissing:
            return None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]["msg"]
            self.faults.append(f"{key!r} is no {kind.__name__} and is left out of this report: {first}")
            return None

    def read_all(self, prefix: str, kind: type[_V]) -> list[_V]:
        keys = [info.key for info in self.store.list(prefix)]
        with ThreadPoolExecutor(_READ_THREADS) as pool:
            return [one for one in pool.map(lambda key: self.read(key, kind), keys) if one is not None]


def _read_ledger(facts: _Facts, keys: RunKeys, loader: str) -> list[ShardRecord]:
    """Return a loader's records, without the lanes that no account needs."""

    def read(key: str) -> ShardRecord | str:
        try:
            return read_record(facts.store.get(key), key).model_copy(update={"lanes": []})
        except ObjectCorrupt as error:
            return error.message

    listed = [info.key for info in facts.store.list(keys.ledger(loader))]
    with ThreadPoolExecutor(_READ_THREADS) as pool:
        found = list(pool.map(read, listed))
    faults = [one for one in found if isinstance(one, str)]
    facts.faults += faults[:_MAX_FAULTS]
    if len(faults) > _MAX_FAULTS:
        facts.faults.append(f"{len(faults) - _MAX_FAULTS} more records of loader {loader!r} are like that")
    return [one for one in found if isinstance(one, ShardRecord)]


def _read_launch(facts: _Facts, keys: RunKeys, jobs: Iterable[JobRecord]) -> LaunchResult | None:
    generation = max((job.generation for job in jobs if job.task_id == "train"), default=None)
    if generation is None:
        return None
    nodes = facts.read_all(keys.train(generation) + "result-", NodeResult)
    return LaunchResult(generation=generation, ok=bool(nodes) and all(node.ok for node in nodes), nodes=nodes)


def _read_metrics(facts: _Facts, keys: RunKeys, launch: LaunchResult | None) -> list[dict[str, Any]]:
    if launch is None:
        return []
    key = keys.metrics(launch.generation)
    try:
        lines = facts.store.get(key).decode().splitlines()
        return [json.loads(line) for line in lines[:: max(1, -(-len(lines) // _MAX_METRICS))]]
    except ObjectMissing:
        return []
    except ValueError as error:
        facts.faults.append(f"{key!r} does not hold metrics and is left out of this report: {error}")
        return []


def collect(store: ObjectStore, run: str, *, run_id: str, tasks: Iterable[TaskTime] = ()) -> RunFacts:
    """Read the facts of a run. An object that is garbage is left out, and told in the facts' ``faults``.

    Args:
        store: the object store.
        run: the run's key (``layout.run_key``).
        run_id: the DAG run's id.
        tasks: when Airflow's tasks started and ended, and their states.
    """
    keys = RunKeys(run)
    facts = _Facts(store)
    plan = facts.read(keys.plan, Plan)
    jobs = facts.read_all(keys.jobs, JobRecord)
    launch = _read_launch(facts, keys, jobs)
    return RunFacts(
        run=run,
        run_id=run_id,
        pinned=facts.read(keys.request, PinnedRequest),
        plan=plan,
        records={name: _read_ledger(facts, keys, name) for name in (plan.loaders if plan else {})},
        gate=facts.read(keys.gate, GateDecision),
        launch=launch,
        artifacts=facts.read(keys.artifacts, ArtifactRecord),
        jobs=jobs,
        tasks=list(tasks),
        metrics=_read_metrics(facts, keys, launch),
        faults=facts.faults,
    )


def _span(times: Iterable[tuple[float | None, float | None]]) -> tuple[float | None, float | None]:
    pairs = list(times)
    starts = [start for start, _ in pairs if start is not None]
    ends = [end for _, end in pairs if end is not None]
    return (min(starts) if starts else None, max(ends) if ends else None)


def _phase(name: str, facts: RunFacts, flavors: Mapping[str, Flavor]) -> Phase:
    jobs = [job for job in facts.jobs if job.task_id == name]
    tasks = [task for task in facts.tasks if task.task_id == name]
    started_at, ended_at = _span((task.started_at, task.ended_at) for task in tasks)
    seconds_of = {id(job): max(0.0, (job.ended_at or 0.0) - (job.started_at or 0.0)) for job in jobs if job.ended_at}
    cost = sum(seconds * flavors[job.flavor].price for job in jobs if (seconds := seconds_of.get(id(job), 0.0)))
    return Phase(
        name=name,
        started_at=started_at,
        ended_at=ended_at,
        seconds=round((ended_at or 0.0) - (started_at or 0.0), 3) if started_at and ended_at else 0.0,
        machine_seconds=round(sum(seconds_of.values()), 3),
        flavor=jobs[0].flavor if jobs else None,
        cost_units=round(cost, 3),
    )


_PHASES = ("validate", "inspect", "plan", "prepare", "gate", "train", "upload")


def _passes(launch: LaunchResult | None) -> list[RankPass]:
    return [one for node in (launch.nodes if launch else []) for rank in node.ranks for one in rank.passes]


def _accounts(facts: RunFacts) -> dict[str, LoaderAccount]:
    if facts.plan is None:
        return {}
    delivered: dict[str, int] = {}
    for node in facts.launch.nodes if facts.launch else []:
        for name, count in node.delivered.items():
            delivered[name] = delivered.get(name, 0) + count
    passes = _passes(facts.launch)
    return {
        name: account_loader(
            loader,
            records=facts.records.get(name, []),
            passes=[one for one in passes if one.loader == name],
            world_size=facts.plan.world_size,
            remainder=facts.plan.remainder,
            delivered=delivered.get(name, 0),
        )
        for name, loader in facts.plan.loaders.items()
    }


def _gpu_stall(launch: LaunchResult | None) -> dict[str, float]:
    waits: dict[int, float] = {}
    for one in _passes(launch):
        waits[one.rank] = waits.get(one.rank, 0.0) + one.wait_s
    if launch is None or not waits:
        return {}
    starts = [node.times["ranks_started"] for node in launch.nodes if "ranks_started" in node.times]
    ends = [node.times["ranks_ended"] for node in launch.nodes if "ranks_ended" in node.times]
    seconds = max(ends) - min(starts) if starts and ends else 0.0
    worst = max(waits, key=lambda rank: waits[rank])
    return {
        "mean_wait_s": round(sum(waits.values()) / len(waits), 3),
        "worst_wait_s": round(waits[worst], 3),
        "worst_rank": float(worst),
        "stall_fraction": round(sum(waits.values()) / (len(waits) * seconds), 4) if seconds else 0.0,
    }


def build_report(
    facts: RunFacts, *, flavors: Mapping[str, Flavor], failed_tasks: Iterable[str] = (), verdict: str | None = None
) -> Report:
    """Turn a run's facts into its report.

    Args:
        facts: what ``collect`` read.
        flavors: the site's flavors, for prices.
        failed_tasks: names of the run's tasks that failed; none means success.
        verdict: what failed and why, for people.
    """
    failed = sorted(failed_tasks)
    phases = [_phase(name, facts, flavors) for name in _PHASES]
    cost = {phase.name: phase.cost_units for phase in phases if phase.cost_units}
    accounts = _accounts(facts)
    warnings = [*(facts.plan.warnings if facts.plan else []), *facts.faults]
    warnings += [one.told for one in restarts_of(facts.launch.nodes if facts.launch else [])]
    warnings += [told for node in (facts.launch.nodes if facts.launch else []) for told in node.repairs]
    if not failed:
        warnings += [
            f"{name}: the accounting does not close: {'; '.join(account.notes)}"
            for name, account in accounts.items()
            if not account.explained
        ]
    return Report(
        run_id=facts.run_id,
        run=facts.run,
        state="failed" if failed else "success",
        verdict=verdict if failed else None,
        request=facts.pinned.request.model_dump(mode="json") if facts.pinned else {},
        snapshot=facts.pinned.snapshot if facts.pinned else None,
        loaders=accounts,
        artifacts=facts.artifacts.files if facts.artifacts else [],
        artifact_record=facts.artifacts.record if facts.artifacts else None,
        phases=phases,
        cost={**cost, "total": round(sum(cost.values()), 3)},
        gpu_stall=_gpu_stall(facts.launch),
        metrics=facts.metrics,
        warnings=warnings,
    )


def as_text(report: Report) -> str:
    """Return the report for people."""
    return report_text(report.model_dump(mode="json")) + "\n"
