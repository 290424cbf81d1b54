"""What a job is, what is known of it, and its name."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Literal

from pydantic import Field

from taas_tasks.values import Value

Phase = Literal["absent", "starting", "running", "ended", "lost", "tombstone"]
EndedBy = Literal["exit", "timeout", "lease", "cancel", "shutdown"]

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


class JobSpec(Value):
    """One job: a command, its environment and its input files.

    In ``argv`` and ``cwd`` the text ``{job}`` stands for the job's folder. Everything else is plain
    data: no shell ever sees it. ``env`` and ``files`` may be secret: they travel in 0600 files, never in argv, are not
    in ``repr``, and are wiped from the host when the job has ended. The process gets ``env`` exactly, besides PATH
    (behind that of ``env``), HOME, LANG and TMPDIR of the host, ``TAAS_JOB_ID`` and ``TAAS_JOB_DIR``.

    Attributes:
        owner: Who may cancel the job and renew its lease, for instance the id of the Airflow try that waits for it.
        files: Name to text, written into the job's folder before the start.
        timeout_s: The job is ended when it has run that long; None: never.
        lease_s: The host ends the job when nobody renewed for that long; None: never.
        cwd: Working directory; the job's folder when None.
        slots_owner: Refuse to launch unless this name holds a slot of the host (see ``jobs.take_gang``).
        kill_grace_s: Time between TERM and KILL.
    """

    job_id: str
    owner: str
    argv: list[str] = Field(min_length=1)
    env: dict[str, str] = Field(default={}, repr=False)
    files: dict[str, str] = Field(default={}, repr=False)
    timeout_s: float | None = None
    lease_s: float | None = 900
    cwd: str | None = None
    slots_owner: str | None = None
    kill_grace_s: float = 10


class JobState(Value):
    """What a host knows of a job.

    Attributes:
        phase: ``absent``: never started; ``starting``, ``running``: its supervisor lives; ``ended``: no process of it
            is left; ``lost``: its supervisor died, processes of it may live; ``tombstone``: it is dead and no start
            of this id will ever launch again.
        exit_code: Of the main command; None when a signal ended it. 127 or 126: it could not be started (``error``).
        signal: The signal that ended the main command.
        ended_by: Why it ended; already set while the job is being ended. ``shutdown``: the supervisor was told to stop.
        cancelled_by: The owner named in the cancel; None when a cancel named none, or nobody cancelled.
        oom_killed: The kernel's out-of-memory counter rose while the job ran, and the job failed.
        killed_by_kernel_suspected: The command was killed by SIGKILL (or exited 137) and not by the supervisor.
        started_at: Unix seconds.
        ended_at: Unix seconds.
        owner: The current owner.
        lease_left_s: Until the host ends the job by itself; None when it has no lease or does not live.
        outcome: What the program left in ``outcome.json``; None when there is none, or it is no JSON object.
        log_bytes: Size of the log.
        error: Why the command could not be started, or why the tombstone stands.
    """

    job_id: str
    phase: Phase
    exit_code: int | None = None
    signal: int | None = None
    ended_by: EndedBy | None = None
    cancelled_by: str | None = None
    oom_killed: bool = False
    killed_by_kernel_suspected: bool = False
    started_at: float | None = None
    ended_at: float | None = None
    owner: str | None = None
    lease_left_s: float | None = None
    pid: int | None = None
    outcome: dict[str, Any] | None = None
    log_bytes: int = 0
    error: str | None = None

    @property
    def lives(self) -> bool:
        """Whether a supervisor runs it now."""
        return self.phase in ("starting", "running")

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.phase == "ended" and self.ended_by == "exit" and self.exit_code == 0


class LogChunk(Value):
    """A piece of a job's log: ``next_offset`` is where to read on, ``size`` the bytes that are there now."""

    text: str
    next_offset: int
    size: int


def job_id(dag_id: str, run_id: str, task_id: str, map_index: int, generation: int) -> str:
    """Return the name of one try of a job: a readable part and a hash of all parts; safe as the name of a folder."""
    parts = [dag_id, run_id, task_id, map_index, generation]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]
    readable = _UNSAFE.sub("-", task_id).strip("-._")[:40] or "job"
    place = f"-{map_index}" if map_index >= 0 else ""
    return f"{readable}{place}-g{generation}-{digest}"
