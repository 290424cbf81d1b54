"""Following jobs on hosts: one look after another, by whoever waits for them. No Airflow in here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from taas.errors import HostUnreachable
from taas_tasks.compute import jobs as on_host
from taas_tasks.compute.job import JobState
from taas_tasks.compute.transport import Transport
from taas_tasks.values import PlacedJob

LEASE_S = 900.0
GIVE_UP_S = LEASE_S + 60.0
"""A host that has been silent for so long has ended its jobs by itself."""

_LOST_PEER_S = 30.0
_PEERS_END_S = 4.0
_RENEW_EVERY_S = 60.0
_LOG_PIECE_BYTES = 256 * 1024
_MAX_BEHIND_BYTES = 1024 * 1024

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
class JobWatch:
    """Looks at jobs, keeps their leases, reads the first one's log, and cancels them while they are ours.

    Attributes:
        transports: by host name.
        jobs: the log is the first one's.
        owner: who we are; a job of another owner is looked at, never touched.
        log_offset: where to read on in the log.
        fresh_files: gives input files of the jobs as they are now, each time that the leases are renewed.
    """

    transports: Mapping[str, Transport]
    jobs: Sequence[PlacedJob]
    owner: str
    log_offset: int = 0
    clock: Callable[[], float] = time.monotonic
    fresh_files: Callable[[], Mapping[str, str]] = dict
    _renewed_at: float | None = None
    _failed_at: float | None = None
    _answered_at: dict[str, float] = field(default_factory=dict)
    _pending: str = ""

    def look(self) -> Look:
        """Return the states of all jobs now; renews the leases when that is due."""
        now = self.clock()
        due = self._renewed_at is None or now - self._renewed_at >= _RENEW_EVERY_S
        states = self._on_each(self._renewal() if due else on_host.state)
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
        """Return the lines that the first job wrote since the last call; the middle is left out of a flood."""
        job = self.jobs[0]
        transport = self.transports[job.host]
        try:
            piece = on_host.log(transport, job.job_id, offset=self.log_offset, limit=_LOG_PIECE_BYTES)
        except HostUnreachable:
            return []
        lines = self._lines(piece.text)
        self.log_offset = piece.next_offset
        behind = piece.size - piece.next_offset
        if behind > _MAX_BEHIND_BYTES:
            lines += self._lines(f"\n[{behind - _LOG_PIECE_BYTES} bytes of the log are left out here]\n")
            self.log_offset = piece.size - _LOG_PIECE_BYTES
        return lines

    @property
    def shown_offset(self) -> int:
        """Where the first line starts that has not been returned."""
        return self.log_offset - len(self._pending.encode())

    def rest(self) -> list[str]:
        """Return what is left of a last line without an end."""
        rest, self._pending = self._pending, ""
        return [rest] if rest else []

    def _lines(self, text: str) -> list[str]:
        *lines, self._pending = (self._pending + text).split("\n")
        return [line.rstrip("\r") for line in lines]

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

        if len(self.jobs) == 1:
            return [one(self.jobs[0])]
        with ThreadPoolExecutor(len(self.jobs)) as pool:
            return list(pool.map(one, self.jobs))
