"""What is said of a chaos run: of each request, and of what is left on the hosts. Pure, but for what it is given."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.cluster.chaos.faults import Hit
from tests.cluster.chaos.schedule import FaultKind, Wanted

_LOST = r"lost|does not answer|no answer|gives no sign of life|left no result|no connection|unreachable|silent"
_KILLED = r"SIGKILL|killed"
_COLLECTIVE = r"NCCL/timeout|Connection|nodes lost each other|rendezvous"
TRUE_WORDS: Mapping[FaultKind, str] = {
    "prep process": rf"{_KILLED}|{_LOST}",
    "rank": _KILLED,
    "node agent": rf"{_KILLED}|{_LOST}|{_COLLECTIVE}",
    "supervisor": rf"{_LOST}|supervisor",
    "ssh connections": _LOST,
    "host killed": rf"{_LOST}|{_COLLECTIVE}",
    "host paused": rf"{_LOST}|{_COLLECTIVE}",
    "network cut": rf"{_LOST}|{_COLLECTIVE}|store",
    "task process": r"heartbeat|killed|lost",
    "triggerer": r"triggerer|heartbeat",
    "scheduler": r"scheduler|heartbeat",
    "S3 server": r"store|does not answer",
}
"""What the verdict of a run that failed for a fault of a kind may say."""


@dataclass(frozen=True)
class Ended:
    """How a request ended: all that is looked at."""

    wanted: Wanted
    state: str | None
    began_s: float
    ended_s: float
    report: Mapping[str, Any] | None
    result: Any
    expected: Any
    hashes_agree: bool


def faults_of(ended: Ended, hits: Sequence[Hit]) -> list[Hit]:
    """Return the faults that struck while the request ran."""
    return [hit for hit in hits if hit.at_s <= ended.ended_s and hit.until_s >= ended.began_s]


def faults_found(ended: Ended, hits: Sequence[Hit]) -> list[str]:
    """Return what is wrong with how a request ended; nothing when it is right, or failed with a true verdict."""
    if ended.state not in ("success", "failed"):
        return [f"it has not ended: {ended.state}"]
    if ended.report is None:
        return ["it has no report"]
    return _wrong_success(ended) if ended.state == "success" else _wrong_failure(ended, hits)


def _wrong_success(ended: Ended) -> list[str]:
    found = []
    if ended.report is not None and ended.report["state"] != "success":
        found.append(f"its report says {ended.report['state']}: {ended.report['verdict']}")
    if ended.result != ended.expected:
        found.append(f"wrong result: got {str(ended.result)[:300]}, right is {str(ended.expected)[:300]}")
    if not ended.hashes_agree:
        found.append("an artifact's content has not the sha256 of its record")
    for name, account in ((ended.report or {}).get("loaders") or {}).items():
        if (
            not account["explained"]
            or account["asked"] != ended.wanted.units
            or account["committed"] != account["asked"]
        ):
            found.append(f"the account of {name} does not close: { {**account, 'per_rank': '...'} }")
    return found


def _wrong_failure(ended: Ended, hits: Sequence[Hit]) -> list[str]:
    assert ended.report is not None
    verdict = str(ended.report["verdict"] or "")
    struck = faults_of(ended, hits)
    if not struck:
        return [f"it failed though nothing struck it: {verdict}"]
    first = verdict.strip().splitlines()[0] if verdict.strip() else ""
    if not first or first.startswith("Traceback") or "ChildFailedError" in first:
        return [f"its verdict does not begin with a cause: {verdict[:500]!r}"]
    allowed = "|".join(TRUE_WORDS[kind] for kind in {hit.kind for hit in struck})
    if not re.search(allowed, verdict):
        kinds = ", ".join(sorted({hit.kind for hit in struck}))
        return [f"its verdict names none of what struck it ({kinds}): {verdict[:500]!r}"]
    return []


def started_twice(started: Mapping[str, Sequence[str]]) -> list[str]:
    """Return what was launched more than once, given the ids of the jobs that each host has started."""
    hosts = defaultdict(list)
    for host, jobs in started.items():
        for job in jobs:
            hosts[job].append(host)
    return [f"job {job} was started on {', '.join(names)}" for job, names in sorted(hosts.items()) if len(names) > 1]
