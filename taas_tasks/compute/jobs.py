"""What the tasks of a run do with jobs and hosts. Synchronous: callers that must not block use threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from taas.errors import HostUnreachable, JobFailed, JobLost, JobTimeout, RunCancelled, TaasError, error_from_dict
from taas_tasks.compute.inventory import Host
from taas_tasks.compute.job import JobSpec, JobState, LogChunk
from taas_tasks.compute.transport import Transport
from taas_tasks.values import Value

_log = logging.getLogger(__name__)


def submit(transport: Transport, spec: JobSpec) -> JobState:
    """Launch the job, once: a job that lives is adopted (its owner and lease become those of ``spec``).

    Returns:
        Its state. ``ended``: it ran before, this is how it ended. ``lost``: see ``declare_lost``. ``tombstone``: this
        id must not run; take the next generation.

    Raises:
        LaunchError: The host refuses the specification; retrying does not help.
    """
    return JobState.model_validate(transport.call("start", spec.model_dump(mode="json")))


def state(transport: Transport, job_id: str) -> JobState:
    """Return what the host knows of the job."""
    return JobState.model_validate(transport.call("state", {"job_id": job_id}))


def log(transport: Transport, job_id: str, *, offset: int = 0, limit: int = 65536, name: str = "log") -> LogChunk:
    """Return up to ``limit`` bytes of a log of the job from ``offset`` on; never cuts a character."""
    payload = {"job_id": job_id, "name": name, "offset": offset, "limit": limit}
    return LogChunk.model_validate(transport.call("log", payload))


def renew(
    transport: Transport,
    job_id: str,
    *,
    lease_s: float,
    owner: str | None = None,
    adopt: bool = False,
    files: Mapping[str, str] | None = None,
) -> JobState:
    """Move the end of the lease to ``lease_s`` from now, and replace ``files`` that the job was started with.

    Another than the owner moves nothing (the state names the owner), unless he adopts the job.
    """
    payload = {"job_id": job_id, "lease_s": lease_s, "owner": owner, "adopt": adopt, "files": dict(files or {})}
    return JobState.model_validate(transport.call("renew", payload))


def cancel(transport: Transport, job_id: str, *, owner: str | None = None) -> JobState:
    """Ask for the job's end; returns at once: it has ended when ``phase`` says so.

    With an owner: only if he still owns it (a new try of the task that adopted the job is left alone). Without: in any
    case, and a job that was never started never will be.
    """
    return JobState.model_validate(transport.call("cancel", {"job_id": job_id, "owner": owner}))


def declare_lost(transport: Transport, job_id: str, *, force: bool = False) -> JobState:
    """Reap what a job without a supervisor left, and bury it: no start of this id launches any more.

    A job that lives or has ended is only reported; ``force`` kills a supervisor that hangs.
    """
    return JobState.model_validate(transport.call("reap", {"job_id": job_id, "force": force}))


def forget(transport: Transport, job_id: str) -> JobState:
    """Remove all files of a job that does not live."""
    return JobState.model_validate(transport.call("forget", {"job_id": job_id}))


def stop(transport: Transport, job_id: str, *, wait_s: float) -> JobState:
    """End the job whoever owns it; when this returns, no process of it is left and it never starts again.

    After ``wait_s`` (more than the job's ``kill_grace_s``) by force: the supervisor and all the rest are killed.

    Raises:
        HostUnreachable: The host does not answer, or a process does not die even so.
    """
    give_up = time.monotonic() + wait_s
    current = cancel(transport, job_id)
    while current.lives and time.monotonic() < give_up:
        time.sleep(0.1)
        current = state(transport, job_id)
    return current if current.phase in ("ended", "tombstone") else declare_lost(transport, job_id, force=True)


def failure(current: JobState, *, host: str, log_tail: str = "") -> TaasError | None:
    """Return why a job that is over is no success, as the error to raise; None when it succeeded.

    The program's own verdict (``outcome.json``) goes first, unless someone else ended the job.
    """
    if current.lives:
        raise ValueError(f"job {current.job_id} is {current.phase}; its failure is known when it is over")
    fields: dict[str, Any] = {"job_id": current.job_id, "host": host, "phase": current.phase}
    job = f"job {current.job_id} on {host}"
    if current.phase in ("lost", "tombstone", "absent") or current.ended_by == "shutdown":
        reason = current.error or "its supervisor died" if current.phase != "ended" else "the host stopped it"
        return JobLost(f"{job} is lost: {reason}", **fields)
    if current.ended_by == "cancel":
        by = f" by {current.cancelled_by}" if current.cancelled_by else ""
        return RunCancelled(f"{job} was cancelled{by}", **fields)
    if current.ended_by in ("timeout", "lease"):
        reason = "ran longer than allowed" if current.ended_by == "timeout" else "was ended as nobody renewed its lease"
        return JobTimeout(f"{job} {reason}", ended_by=current.ended_by, **fields)
    outcome = current.outcome or {}
    if outcome.get("ok") is False and isinstance(outcome.get("error"), dict):
        return error_from_dict(outcome["error"])
    if current.succeeded:
        return None
    tail = f"; its log ends with: {log_tail.strip()[-1000:]}" if log_tail.strip() else ""
    facts = {"exit_code": current.exit_code, "signal": current.signal, "oom_killed": current.oom_killed}
    return JobFailed(f"{job} {_ending(current)}{tail}", **fields, **facts)


def _ending(current: JobState) -> str:
    if current.error and current.exit_code in (126, 127):
        return f"could not start: {current.error}"
    if current.oom_killed:
        return "was killed by the kernel: out of memory"
    if current.killed_by_kernel_suspected:
        return "was killed by SIGKILL, not by us: by the kernel (out of memory?)"
    if current.signal is not None:
        return f"was ended by signal {current.signal}"
    return f"ended with exit code {current.exit_code}"


class GangHold(Value):
    """Slots that are held: the hosts in their order (node 0 first) and the job that each is for."""

    hosts: list[str]
    owners: dict[str, str]  # host name -> job id
    slots: dict[str, int]


class Waiting(Value):
    """Nothing is held; why, in a sentence. Ask again within the ticket's time to keep the place in the queue."""

    reason: str
    missing: int
    unreachable: list[str] = []


@dataclass
class _Answers:
    """What the hosts said, by name."""

    taken: dict[str, int] = field(default_factory=dict)
    refused: dict[str, dict[str, Any]] = field(default_factory=dict)
    unreachable: list[str] = field(default_factory=list)


def take_gang(
    hosts: Sequence[Host],
    transports: Mapping[str, Transport],
    owner_by_host: Mapping[str, str],
    *,
    hold_s: float,
    asked_at: float,
    num_hosts: int | None = None,
    ticket_s: float = 60,
    label: str | None = None,
) -> GangHold | Waiting:
    """Hold ``num_hosts`` (default: all) of ``hosts``, the first free ones in their order, or none.

    Idempotent: who holds already holds on for another ``hold_s``. Once a gang has its hosts, ask again with these only.

    Args:
        transports: By host name.
        owner_by_host: The id of the job that will run on each host.
        hold_s: For how long the slot is kept when no job of that id lives.
        asked_at: When this gang asked first (unix seconds), the same at every try: it orders gangs alike on all hosts.
        ticket_s: For how long a place in the queue is kept; ask again sooner.
        label: What others are told who holds the host ("run manual__..."); the job's id when None.
    """
    wanted = len(hosts) if num_hosts is None else num_hosts
    if not 1 <= wanted <= len(hosts):
        raise ValueError(f"num_hosts must be 1 to {len(hosts)} (the hosts given), got {wanted}")
    place = {"asked_at": asked_at, "ticket_s": ticket_s, "label": label}
    answers = _ask(hosts, transports, owner_by_host, wanted=wanted, hold_s=hold_s, **place)
    taken, refused = answers.taken, answers.refused
    if len(taken) == wanted:
        # Places in the other queues, and holds of an earlier call there, would keep free hosts from everybody else.
        _give_up([host.name for host in hosts if host.name not in taken], transports, owner_by_host)
        return GangHold(hosts=list(taken), owners={name: owner_by_host[name] for name in taken}, slots=taken)
    _give_up(taken, transports, owner_by_host, **place)
    missing = wanted - len(taken)
    reason = waiting_reason(hosts[0].flavor, wanted, missing, refused=refused, unreachable=answers.unreachable)
    return Waiting(reason=reason, missing=missing, unreachable=answers.unreachable)


def _ask(
    hosts: Sequence[Host],
    transports: Mapping[str, Transport],
    owner_by_host: Mapping[str, str],
    *,
    wanted: int,
    hold_s: float,
    **place: Any,
) -> _Answers:
    """Ask the hosts in their order until enough are taken."""
    answers = _Answers()
    for host in hosts:
        if len(answers.taken) == wanted:
            break
        payload = {"num_slots": host.slots, "owner": owner_by_host[host.name], "hold_s": hold_s, **place}
        try:
            answer = transports[host.name].call("slot_take", payload)
        except HostUnreachable as error:
            _log.warning("host %s: %s", host.name, error)
            answers.unreachable.append(host.name)
            continue
        if answer["taken"]:
            answers.taken[host.name] = answer["slot"]
        else:
            answers.refused[host.name] = answer
    return answers


def waiting_reason(
    flavor: str, wanted: int, missing: int, *, refused: Mapping[str, Mapping[str, Any]], unreachable: Sequence[str]
) -> str:
    """Return the sentence that says what a gang waits for: ``waits for 2 of 4 g2.8; held by ...``."""
    holders = sorted({owner for answer in refused.values() for owner in answer["held_by"]})
    ahead = sorted({owner for answer in refused.values() for owner in answer["ahead"]})
    parts = [f"waits for {missing} of {wanted} {flavor}"]
    if holders:
        parts.append(f"held by {', '.join(holders)}")
    if ahead:
        parts.append(f"before it: {', '.join(ahead)}")
    if unreachable:
        parts.append(f"no answer from {', '.join(unreachable)}")
    return "; ".join(parts)


def release_gang(hold: GangHold, transports: Mapping[str, Transport]) -> list[str]:
    """Give the gang's slots up; a slot whose job lives is freed when the job has ended.

    Returns:
        The hosts that could not be reached: their holds run out by themselves.
    """
    return _give_up(hold.hosts, transports, hold.owners)


def withdraw(transports: Mapping[str, Transport], owner_by_host: Mapping[str, str]) -> list[str]:
    """Give up all slots and places in the queue of a gang, whether it waits or holds; returns who did not answer."""
    return _give_up(list(owner_by_host), transports, owner_by_host)


def _give_up(
    names: Sequence[str] | Mapping[str, Any],
    transports: Mapping[str, Transport],
    owner_by_host: Mapping[str, str],
    **ticket: Any,
) -> list[str]:
    unreachable = []
    for name in names:
        try:
            transports[name].call("slot_release", {"owner": owner_by_host[name], **ticket})
        except HostUnreachable as error:
            _log.warning("host %s keeps its slot until the hold runs out: %s", name, error)
            unreachable.append(name)
    return unreachable
