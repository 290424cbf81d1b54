"""Finds gangs that hang: all ranks alive, and nothing that counts as progress for too long on any node.

What counts needs nothing of the user (ADR 0019): optimizer steps, elements of a DataLoader, ``taas.log`` and
``taas.checkpoint``. A rank that waits for elements which are not prepared yet waits for data; that is no hang.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from taas_tasks.delivery.counters import read_steps
from taas_tasks.delivery.progress import Progress, read_progress
from taas_tasks.launch.files import RankFiles
from taas_tasks.values import Value

STARTING = 4
"""How many times the timeout a gang may take before its first optimizer step: it loads and compiles."""


class NodeStillness(Value):
    """What a node tells the others of its ranks, in its heartbeat. ``still``: for so long that it may be a hang."""

    attempt: int
    still: bool
    idle_s: float = 0.0
    waits_for_data: list[int] = []


@dataclass(frozen=True)
class _Seen:
    """All that counts as progress of one rank."""

    progress: Progress | None
    passes: Mapping[str, int]


class StillnessWatch:
    """Watches the progress of one node's ranks in one attempt of the gang; ``look`` costs a few small reads a rank."""

    def __init__(self, files: RankFiles, ranks: Sequence[int], *, attempt: int, timeout_s: float, now: float) -> None:
        self._files = files
        self._ranks = ranks
        self._attempt = attempt
        self._timeout_s = timeout_s
        self._changed_at = now
        self._seen: dict[int, _Seen] = {}

    def look(self, now: float) -> NodeStillness:
        """Return how still the ranks are. ``now``: of a monotonic clock."""
        passes = steps_of_newest_passes(self._files.counters_dir)
        seen = {rank: _Seen(read_progress(self._files.progress(rank)), passes.get(rank, {})) for rank in self._ranks}
        waiting = [rank for rank, one in seen.items() if one.progress and one.progress.waits_for_data]
        if seen != self._seen or waiting:
            self._seen, self._changed_at = seen, now
        idle_s = now - self._changed_at
        has_stepped = any(one.progress and one.progress.optimizer_steps for one in seen.values())
        limit_s = self._timeout_s if has_stepped else STARTING * self._timeout_s
        # "All ranks alive": one that works on after its peers have ended hinders nobody; the job's timeout ends it.
        ended = any(self._files.end(rank).exists() or self._files.closing(rank).exists() for rank in self._ranks)
        still = idle_s > limit_s and not ended
        return NodeStillness(attempt=self._attempt, still=still, idle_s=round(idle_s, 1), waits_for_data=waiting)


def is_hang(nodes: Sequence[NodeStillness | None]) -> bool:
    """Return whether what all nodes say of the same attempt is a hang; a node that says nothing is working."""
    told = [node for node in nodes if node is not None]
    return len(told) == len(nodes) > 0 and all(node.still and node.attempt == told[0].attempt for node in told)


def steps_of_newest_passes(counters_dir: Path) -> dict[int, dict[str, int]]:
    """Return for each rank the newest pass of each loader, by its file's name, and how many steps it has made."""
    newest: dict[str, str] = {}
    with os.scandir(counters_dir) as entries:
        for entry in entries:
            if entry.name.endswith(".pass"):
                of_rank = entry.name.rsplit(".", 2)[0]  # LOADER.RANK.NUMBER.pass
                newest[of_rank] = max(newest.get(of_rank, ""), entry.name)
    found: dict[int, dict[str, int]] = {}
    for of_rank, name in newest.items():
        found.setdefault(int(of_rank.rsplit(".", 1)[1]), {})[name] = read_steps(counters_dir / name)
    return found
