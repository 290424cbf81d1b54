"""Following jobs on hosts: one look after another, by whoever waits for them. No Airflow in here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from taas.errors import HostUnreachable
from taas_tasks.compute import jobs as on_host
from taas_tasks.compute.job import JobState
from taas_tasks.compute.transport import Transport
from taas_tasks.values import PlacedJob

T = TypeVar("T")
R = TypeVar("R")

LEASE_S = 900.0
GIVE_UP_S = LEASE_S + 60.0
"""A host that has been silent for so long has ended its jobs by itself."""

_LOST_PEER_S = 30.0
_PEERS_END_S = 4.0
_RENEW_EVERY_S = 60.0
_LOG_PIECE_BYTES = 256 * 1024
_LOG_LOOK_BYTES = 1024 * 1024
_MAX_PIECES_BEHIND = 4

Step = Literal["wait", "cancel", "ended", "timeout", "unreachable"]


def went_well(state: JobState) -> bool:
    """Return whether a job is over and its program says that all is well."""
    return not state.lives and on_host.failure(state, host="") is None


@dataclass(frozen=True)
class Look:
    """What one look saw.

    Attributes:
        states: one per job, None where the host did not answer.
        unreachable_s: for how long the quietest host has not answered.
        failed_s: for how long it has been known that a job failed; None while none did.
    """

    states: Sequence[JobState | None]
    unreachable_s: float = 0.0
    failed_s: float | None = None

    @property
    def any_lives(self) -> bool:
        """Whether a host tells that its job lives."""
        return any(state is not None and state.lives for state in self.states)


def next_step(look: Look, *, now: float, deadline: float) -> Step:
    """Return what whoever follows the jobs does next. ``now`` and ``deadline`` are unix seconds.

    Peers of a failed job have a moment to end by themselves (they know more than we do), then they are cancelled; they
    are waited for, unless only silent hosts are left.
    """
    if None not in look.states and not look.any_lives:
        return "ended"
    if look.unreachable_s > GIVE_UP_S:
        return "unreachable"
    if now > deadline:
        return "timeout"
    if look.failed_s is None or look.failed_s < _PEERS_END_S:
        return "wait"
    return "cancel" if look.any_lives or look.unreachable_s <= _LOST_PEER_S else "ended"


@dataclass
class _ShownLog:
    """How far the log of one job was read; ``pending``: the part of a line that was read and has no end yet."""

    job: PlacedJob
    is_alone: bool
    offset: int = 0
    pending: str = ""

    @property
    def shown_offset(self) -> int:
        """Where the first line starts that has not been returned."""
        return self.offset - len(self.pending.encode())

    def read(self, transport: Transport, *, limit: int) -> list[str]:
        """Return the lines that are new; the middle is left out of a flood."""
        piece = on_host.log(transport, self.job.job_id, offset=self.offset, limit=limit)
        lines = self._lines(piece.text)
        self.offset = piece.next_offset
        behind = piece.size - piece.next_offset
        if behind > _MAX_PIECES_BEHIND * limit:
            lines += self._lines(f"\n[{behind - limit} bytes of the log are left out here]\n")
            self.offset = piece.size - limit
        return lines

    def rest(self) -> list[str]:
        """Return what is left of a last line without an end."""
        rest, self.pending = self.pending, ""
        return [self._told(rest)] if rest else []

    def _lines(self, text: str) -> list[str]:
        *lines, self.pending = (self.pending + text).split("\n")
        return [self._told(line.rstrip("\r")) for line in lines]

    def _told(self, line: str) -> str:
        """Return the line with the host that wrote it, where there are several; ranks say theirs themselves."""
        host = self.job.host
        return line if self.is_alone or line.startswith((f"[{host} ", f"[{host}] ")) else f"[{host}] {line}"


@dataclass
class JobWatch:
    """Looks at jobs, keeps their leases, reads their logs, and cancels them while they are ours.

    Attributes:
        transports: by host name.
        jobs: node 0's first.
        owner: who we are; a job of another owner is looked at, never touched.
        fresh_files: gives input files of the jobs as they are now, each time that the leases are renewed.
    """

    transports: Mapping[str, Transport]
    jobs: Sequence[PlacedJob]
    owner: str
    clock: Callable[[], float] = time.monotonic
    fresh_files: Callable[[], Mapping[str, str]] = dict
    _renewed_at: float | None = None
    _failed_at: float | None = None
    _answered_at: dict[str, float] = field(default_factory=dict)
    _states: Sequence[JobState | None] = ()
    _logs: list[_ShownLog] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._logs = [_ShownLog(job, is_alone=len(self.jobs) == 1) for job in self.jobs]

    def look(self) -> Look:
        """Return the states of all jobs now; renews the leases when that is due."""
        now = self.clock()
        due = self._renewed_at is None or now - self._renewed_at >= _RENEW_EVERY_S
        states = self._on_each(self._renewal() if due else on_host.state)
        self._states = states
        if due and None not in states:
            self._renewed_at = now
        for job, state in zip(self.jobs, states, strict=True):
            if state is not None or job.host not in self._answered_at:
                self._answered_at[job.host] = now
        if self._failed_at is None and any(s is not None and not s.lives and not went_well(s) for s in states):
            self._failed_at = now
        failed_s = None if self._failed_at is None else now - self._failed_at
        return Look(states, now - min(self._answered_at.values(), default=now), failed_s)

    def new_lines(self) -> list[str]:
        """Return the lines that the jobs wrote until the last look and that were not returned yet, job by job.

        However much one job writes, each has its share of what one call reads; a host that did not answer the last
        look is not asked.
        """
        limit = min(_LOG_PIECE_BYTES, _LOG_LOOK_BYTES // len(self.jobs))
        new = [
            log
            for log, state in zip(self._logs, self._states, strict=False)
            if state is not None and state.log_bytes > log.offset
        ]

        def read(log: _ShownLog) -> list[str]:
            try:
                return log.read(self.transports[log.job.host], limit=limit)
            except HostUnreachable:
                return []

        return [line for lines in _side_by_side(read, new) for line in lines]

    def start_logs_at(self, *offsets: Sequence[int]) -> None:
        """Go on with the logs where they were shown before: for each job, at the furthest of the offsets."""
        for known in offsets:
            for log, offset in zip(self._logs, known, strict=False):
                log.offset = max(log.offset, offset)

    @property
    def shown_offsets(self) -> list[int]:
        """Where, in each job's log, the first line starts that has not been returned."""
        return [log.shown_offset for log in self._logs]

    def last_lines(self) -> list[str]:
        """Return all that was there at the last look and was not returned yet, last lines without an end, too."""
        lines: list[str] = []
        before: list[int] = []
        while before != (before := [log.offset for log in self._logs]):
            lines += self.new_lines()
        return lines + [line for log in self._logs for line in log.rest()]

    def adopt(self) -> list[JobState | None]:
        """Become the owner of the jobs that live."""
        return self._on_each(
            lambda transport, job_id: on_host.renew(transport, job_id, lease_s=LEASE_S, owner=self.owner, adopt=True)
        )

    def cancel(self) -> list[JobState | None]:
        """Ask every job that is still ours to end; does not wait."""
        return self._on_each(lambda transport, job_id: on_host.cancel(transport, job_id, owner=self.owner))

    def bury(self) -> list[JobState | None]:
        """Reap what jobs without a supervisor left; the others are only looked at."""
        return self._on_each(on_host.declare_lost)

    def _renewal(self) -> Callable[[Transport, str], JobState]:
        files = self.fresh_files()

        def renew(transport: Transport, job_id: str) -> JobState:
            return on_host.renew(transport, job_id, lease_s=LEASE_S, owner=self.owner, files=files)

        return renew

    def _on_each(self, do: Callable[[Transport, str], JobState]) -> list[JobState | None]:
        def one(job: PlacedJob) -> JobState | None:
            try:
                return do(self.transports[job.host], job.job_id)
            except HostUnreachable:
                return None

        return _side_by_side(one, self.jobs)


def _side_by_side(do: Callable[[T], R], items: Sequence[T]) -> list[R]:
    if len(items) <= 1:
        return [do(item) for item in items]
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(do, items))
