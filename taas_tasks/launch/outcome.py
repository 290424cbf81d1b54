"""What a node has to say at its end: collects times, ranks, passes and counts into the ``NodeResult``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from taas.checkpoints import FOLDER, newest
from taas.errors import RankFailed, TaasError
from taas_tasks.delivery import read_passes
from taas_tasks.launch.files import RankFiles, state_of_files
from taas_tasks.result_values import Measured, NodeResult, RankPass, RankResult, Restart
from taas_tasks.verdict import launch_error_of

if TYPE_CHECKING:
    from taas_tasks.launch.gang import GangOutcome


class NodeLedger:
    """Filled while the node runs; ``result`` can be asked at any time, also after a failure half way."""

    def __init__(self, node_rank: int, host: str, generation: int, files: RankFiles, project: Path) -> None:
        self._node_rank = node_rank
        self._host = host
        self._generation = generation
        self._files = files
        self._project = project
        self._times: dict[str, float] = {"agent_started": time.time()}
        self._ranks: list[RankResult] = []
        self._measured: Measured | None = None
        self._restarts: list[Restart] = []

    def note(self, name: str) -> None:
        """Note the time of a step."""
        self._times[name] = time.time()

    def take(self, outcome: GangOutcome) -> None:
        """Take over how the ranks ended."""
        self._times.update(outcome.times)
        self._ranks = outcome.ranks
        self._restarts = outcome.restarts

    def take_measured(self, measured: Measured) -> None:
        """Take over what the check before the start has measured."""
        self._measured = measured

    def ranks(self) -> list[int]:
        """Return the global ranks that this node had."""
        return [rank.rank for rank in self._ranks]

    def rank_failure(self) -> TaasError:
        """Return the verdict over this node's ranks alone."""
        verdict = launch_error_of([self._result(ok=False, error=None, passes=[])])
        return verdict or RankFailed(f"the ranks on {self._host} ended without a reason", host=self._host)

    def result(self, *, ok: bool, error: TaasError | None, loaders: list[str]) -> NodeResult:
        """Return the node's result, with what each rank consumed and what the feeder delivered."""
        passes = self._passes() if loaders else []
        return self._result(ok=ok, error=error, passes=passes)

    def _result(self, *, ok: bool, error: TaasError | None, passes: list[RankPass]) -> NodeResult:
        by_rank = {rank.rank: [found for found in passes if found.rank == rank.rank] for rank in self._ranks}
        stats = _stats(self._files.feeder_stats)
        checkpoint = newest(self._project / FOLDER)
        return NodeResult(
            node_rank=self._node_rank,
            host=self._host,
            generation=self._generation,
            ok=ok,
            ranks=[rank.model_copy(update={"passes": by_rank[rank.rank]}) for rank in self._ranks],
            delivered=stats.get("delivered", {}),
            delivered_bytes=stats.get("delivered_bytes", {}),
            times={**self._times, **({"checkpoint": checkpoint[1]} if checkpoint else {})},
            measured=self._measured,
            other_rank_writes=self._other_rank_writes(),
            restarts=self._restarts,
            checkpoint_step=checkpoint[0].step if checkpoint else None,
            repairs=stats.get("repairs", []),
            error=error.to_dict() if error is not None else None,
        )

    def _passes(self) -> list[RankPass]:
        return read_passes(self._files.counters_dir)

    def _other_rank_writes(self) -> list[str]:
        """Return what other ranks wrote in their private copies: it is not kept."""
        found = []
        for rank in self.ranks():
            private = self._files.private_project(rank)
            if private.is_dir():
                found += [f"rank {rank}: {path}" for path in changed_files(private)]
        return found


def changed_files(private: Path) -> list[str]:
    """Return the files of a private copy that are new or differ from what was copied."""
    before = json.loads(private.with_suffix(".json").read_text())
    return [path for path, state in state_of_files(private).items() if before.get(path) != state]


def _stats(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return found
