"""torch's elastic agent for one node of the gang, with ends and failures that are bounded in time.

What differs from ``LocalElasticAgent``: a rank says by files that its script ended or why it failed, so ``os._exit(0)``
cannot leave the agent polling for ever; a node whose ranks have ended goes on watching until every node has, with no
300 s exit barrier; the end of another node, of the feeder, or an abort of the run stops this node's ranks; ranks that
do not go on TERM are killed after seconds.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from taas.checkpoints import FOLDER, newest
from taas_tasks.launch import forkserver, stacks
from taas_tasks.launch.files import EndReport, ErrorReport, RankFiles, RankSpec
from taas_tasks.launch.hang import NodeStillness, StillnessWatch
from taas_tasks.launch.logs import tail_of
from taas_tasks.launch.notice import explanation
from taas_tasks.launch.processes import oom_kills, peak_rss_bytes
from taas_tasks.launch.rendezvous import GangRendezvous
from taas_tasks.launch.watch import StopReason, Watch
from taas_tasks.result_values import NodeResult, RankResult, Restart
from taas_tasks.verdict import HANG, STOPPED, class_of_exit, describe_exit, restart_after

_log = logging.getLogger(__name__)

COLLECT_S = 1.0
"""How long after a failure the other ranks may still say what happened to them before they are stopped."""
STOP_GRACE_S = 4
"""From TERM to KILL. A rank in a collective of gloo runs no Python signal handler."""
EXIT_BOUND_S = 60.0
"""How long a rank's exit handlers may run after its script has ended."""
ALL_STACKS_S = 15.0
"""How long a node that has its ranks' stacks of a hang waits for those of the other nodes."""
_STACK_CHARS = 6000


class NoLogs(LogsSpecs):
    """The ranks open their logs themselves; torch's agent shall redirect nothing and make no folders."""

    def __init__(self) -> None:
        super().__init__()

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return destinations that leave everything as it is."""
        nothing = dict.fromkeys(envs, "")
        return LogsDest(dict(nothing), dict(nothing), {}, {}, dict(nothing), "", "")

    @property
    def root_log_dir(self) -> str:
        """No folder."""
        return ""


@dataclass
class _Death:
    """A rank's process that has ended: how, and when the agent saw it."""

    exit_code: int
    seen_at: float


@dataclass(frozen=True)
class _Place:
    """Where a rank stood when the gang hung, the stacks of all its threads, and when."""

    place: stacks.Place
    text: str
    at: float


@dataclass
class GangOutcome:
    """How the ranks of this node ended. ``stopped_for`` is set where something else than a rank here was the reason."""

    ok: bool
    ranks: list[RankResult]
    stopped_for: StopReason | None = None
    times: dict[str, float] = field(default_factory=dict)
    restarts: list[Restart] = field(default_factory=list)


class GangAgent(LocalElasticAgent):
    """One node's agent. ``before_start(local rank -> rank)`` writes the ranks' files; ``stop_reason`` is polled;
    ``watch`` tells and asks the other nodes."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        rendezvous: GangRendezvous,
        files: RankFiles,
        before_start: Callable[[Mapping[int, int]], None],
        stop_reason: Callable[[], StopReason | None],
        watch: Watch,
        hang_timeout_s: float | None,
    ) -> None:
        super().__init__(spec, NoLogs(), start_method="forkserver", shutdown_timeout=STOP_GRACE_S)
        self._rendezvous_of_gang = rendezvous
        self._files = files
        self._before_start = before_start
        self._stop_reason = stop_reason
        self._watch = watch
        self._hang_timeout_s = hang_timeout_s
        self._stillness: StillnessWatch | None = None
        self._places: dict[int, _Place] = {}
        self._has_semaphores = False
        self._ranks: dict[int, int] = {}
        self._deaths: dict[int, _Death] = {}
        self._peak_rss: dict[int, int] = {}
        self._told_done = False
        self._oom_kills_before = oom_kills()
        self._next_sample = 0.0
        self.stopped_for: StopReason | None = None
        self.times: dict[str, float] = {}
        self.restarts: list[Restart] = []

    def stillness(self) -> NodeStillness | None:
        """Return how still the ranks are; None while there are none, or nobody wants to know."""
        found = self._stillness
        return found.look(time.monotonic()) if found is not None else None

    def outcome(self, *, ok: bool) -> GangOutcome:
        """Return how the ranks ended, from their files and from what the agent saw."""
        return GangOutcome(
            ok=ok, ranks=self._results(), stopped_for=self.stopped_for, times=self.times, restarts=self.restarts
        )

    def _results(self) -> list[RankResult]:
        return [self._rank_result(local_rank) for local_rank in sorted(self._ranks)]

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Leave for the other nodes how the ranks here ended, then meet them again."""
        self._stillness = None
        self._rendezvous_of_gang.tell(self._rendezvous_of_gang.attempt, self._told_of_attempt())
        super()._restart_workers(worker_group)

    def _told_of_attempt(self) -> NodeResult:
        spec = RankSpec.model_validate_json(self._files.spec.read_bytes())
        ranks = [rank.model_copy(update={"traceback_tail": None}) for rank in self._results()]
        found = newest(Path(spec.project_dir) / FOLDER)
        return NodeResult(
            node_rank=self._worker_group.group_rank,
            host=spec.host,
            generation=0,
            ok=False,
            ranks=ranks,
            checkpoint_step=found[0].step if found else None,
        )

    def _note_restart(self, attempt: int) -> None:
        """Say why the gang starts again; every node comes to the same sentence."""
        told = self._rendezvous_of_gang.told(attempt - 1)
        max_restarts = self._worker_group.spec.max_restarts
        restart = restart_after(told, number=attempt, max_restarts=max_restarts, at=time.time())
        self.restarts.append(restart)
        _log.warning("%s", restart.told)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        attempt = self._rendezvous_of_gang.attempt
        if attempt > 0:
            self._note_restart(attempt)
        # All nodes count alike, whichever of them saw a failure: torch counts each node's own.
        self._remaining_restarts = worker_group.spec.max_restarts - attempt
        self._ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        self._deaths.clear()
        self._places.clear()
        self._told_done = False
        self._files.forget_attempt(list(self._ranks.values()))
        self._before_start(self._ranks)
        self.times.setdefault("ranks_started", time.time())
        started: dict[int, Any] = super()._start_workers(worker_group)
        self._has_semaphores = True
        self._stillness = self._watch_stillness(attempt)
        return started

    def _watch_stillness(self, attempt: int) -> StillnessWatch | None:
        if not self._hang_timeout_s:
            return None
        ranks, now = list(self._ranks.values()), time.monotonic()
        return StillnessWatch(self._files, ranks, attempt=attempt, timeout_s=self._hang_timeout_s, now=now)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._see()
        self._forget_semaphores()
        if self._watch.has_hung(self._rendezvous_of_gang.attempt):
            self._note_hang()
            return RunResult(state=WorkerState.FAILED)
        self.stopped_for = self._stop_reason()
        if self.stopped_for is not None:
            self._remaining_restarts = 0
            return RunResult(state=WorkerState.FAILED)
        if failed := self._failed_ranks():
            if self._remaining_restarts == 0:
                # Before the ranks here are stopped: the other nodes stop theirs meanwhile.
                self._watch.mark_failed(f"rank {self._ranks[failed[0]]} failed")
            self._collect()
            return RunResult(state=WorkerState.FAILED)
        if not all(self._has_ended(rank) for rank in self._ranks.values()):
            return RunResult(state=WorkerState.HEALTHY)
        return self._wait_for_gang()

    def _wait_for_gang(self) -> RunResult:
        """Stay healthy until all nodes have ended, so that a restart of the gang still finds this one."""
        attempt = self._rendezvous_of_gang.attempt
        if not self._told_done:
            self._watch.mark_done(attempt)
            self._told_done = True
        if not self._watch.all_done(attempt):
            return RunResult(state=WorkerState.HEALTHY)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._ranks.values()))

    def _exit_barrier(self) -> None:
        """Let the ranks leave; every node knows that all have ended."""
        self.times["ranks_ended"] = time.time()
        self._files.release.touch()
        deadline = time.monotonic() + STOP_GRACE_S
        while time.monotonic() < deadline and any(process.is_alive() for process in self._processes().values()):
            time.sleep(0.01)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        super()._shutdown(death_sig, min(timeout, STOP_GRACE_S))
        self.times.setdefault("ranks_ended", time.time())

    def _forget_semaphores(self) -> None:
        """Take away the names of the ranks' semaphores as soon as every rank has them open: a hard kill leaves none."""
        if self._has_semaphores and all(self._files.progress(rank).exists() for rank in self._ranks.values()):
            forkserver.unlink_semaphores()
            self._has_semaphores = False

    def _note_hang(self) -> None:
        """Have every living rank say where it stands, in its own log too."""
        at = time.time()
        living = {
            self._ranks[local_rank]: process.pid
            for local_rank, process in self._processes().items()
            if process.exitcode is None
        }
        project = Path(RankSpec.model_validate_json(self._files.spec.read_bytes()).project_dir)
        found = stacks.take(living, {rank: self._files.stacks(rank) for rank in living})
        for rank in living:
            text = found.get(rank, "")
            place = stacks.place_of(stacks.main_thread(text), project)
            self._places[rank] = _Place(place, text, at)
            with self._files.log(rank).open("a") as log:
                log.write(f"\n[taas] the training hangs; rank {rank} {place.sentence()}\n{text}\n")
        self._wait_for_stacks()

    def _wait_for_stacks(self) -> None:
        """Stop no rank before every node has its stacks: those that wait for it would fail and stand nowhere."""
        attempt = self._rendezvous_of_gang.attempt
        self._watch.mark_stacks(attempt)
        deadline = time.monotonic() + ALL_STACKS_S
        while not self._watch.all_have_stacks(attempt) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _processes(self) -> dict[int, Any]:
        """Return the ranks' processes by local rank. Private to torch 2.13's MultiprocessContext; pinned by a test."""
        context = getattr(self._pcontext, "_pc", None)
        return dict(enumerate(context.processes)) if context is not None else {}

    def _see(self) -> None:
        """Note which processes have ended since the last look, and now and then how much memory the others use."""
        sample = time.monotonic() >= self._next_sample
        self._next_sample = time.monotonic() + 1 if sample else self._next_sample
        for local_rank, process in self._processes().items():
            if sample and (peak := peak_rss_bytes(process.pid)):
                self._peak_rss[local_rank] = peak
            if local_rank not in self._deaths and process.exitcode is not None:
                self._deaths[local_rank] = _Death(process.exitcode, time.time())

    def _failed_ranks(self) -> list[int]:
        """Return the local ranks that have failed: they said so, or ended without having said that they were done."""
        return [
            local_rank
            for local_rank, rank in self._ranks.items()
            if not self._files.end(rank).exists() and (local_rank in self._deaths or self._files.error(rank).exists())
        ]

    def _has_ended(self, rank: int) -> bool:
        if self._files.end(rank).exists():
            return True
        closing = self._files.closing(rank)
        try:
            return time.time() - closing.stat().st_mtime > EXIT_BOUND_S
        except FileNotFoundError:
            return False

    def _collect(self) -> None:
        """Give ranks that fail at the same time for their own reasons a moment to say so."""
        deadline = time.monotonic() + COLLECT_S
        while time.monotonic() < deadline and len(self._deaths) < len(self._ranks):
            time.sleep(0.05)
            self._see()

    def _rank_result(self, local_rank: int) -> RankResult:
        rank = self._ranks[local_rank]
        common: dict[str, Any] = {
            "rank": rank,
            "local_rank": local_rank,
            "first_step_at": _read_time(self._files.first_step(rank)),
            "max_rss_bytes": self._peak_rss.get(local_rank),
        }
        if self._files.end(rank).exists():
            EndReport.model_validate_json(self._files.end(rank).read_bytes())
            return RankResult(exit_code=0, **common)
        if rank in self._places:
            return self._from_hang(rank, common)
        if self._files.error(rank).exists():
            return self._from_error_report(rank, common)
        return self._from_exit(local_rank, common)

    def _from_hang(self, rank: int, common: dict[str, Any]) -> RankResult:
        stood = self._places[rank]
        return RankResult(
            exit_code=None,
            error_class=HANG,
            message=stood.place.sentence(),
            traceback_tail=stood.text[-_STACK_CHARS:],
            failed_at=stood.at,
            place=stood.place.where,
            collective=stood.place.collective,
            **common,
        )

    def _from_error_report(self, rank: int, common: dict[str, Any]) -> RankResult:
        report = ErrorReport.model_validate_json(self._files.error(rank).read_bytes())
        return RankResult(
            exit_code=report.exit_code,
            error_class=report.error_class,
            message=report.message,
            traceback_tail=report.traceback_tail,
            failed_at=report.failed_at,
            **common,
        )

    def _from_exit(self, local_rank: int, common: dict[str, Any]) -> RankResult:
        rank = self._ranks[local_rank]
        if self._has_ended(rank):
            return RankResult(exit_code=0, message="its exit handlers did not end; it was killed", **common)
        death = self._deaths.get(local_rank)
        if death is None:
            return RankResult(exit_code=None, error_class=STOPPED, message="stopped by the node agent", **common)
        number = -death.exit_code if death.exit_code < 0 else None
        exit_code = death.exit_code if number is None else None
        message = describe_exit(exit_code=exit_code, signal_number=number, oom_kills=self._new_oom_kills())
        tail = tail_of(self._files.log(rank))
        if rank != 0 and "Read-only file system" in tail:
            message = f"{message}. {explanation(rank, 'a file of the project')}"
        return RankResult(
            exit_code=exit_code,
            signal=number,
            error_class=class_of_exit(exit_code=exit_code, signal_number=number),
            message=message,
            traceback_tail=tail,
            failed_at=death.seen_at,
            **common,
        )

    def _new_oom_kills(self) -> int:
        now = oom_kills()
        return now - self._oom_kills_before if now is not None and self._oom_kills_before is not None else 0


def _read_time(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
