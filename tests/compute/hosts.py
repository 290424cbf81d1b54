"""A host below a temporary folder, and what tests do with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taas_tasks.compute import jobs
from taas_tasks.compute.job import JobSpec, JobState
from taas_tasks.compute.processes import job_processes, read_json, read_process
from taas_tasks.compute.transport import Transport


def until(condition: Callable[[], Any], *, wait_s: float = 60) -> Any:
    """Return the condition's first true value."""
    give_up = time.monotonic() + wait_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < give_up, "it did not come true in time"
        time.sleep(0.02)


class EmulatedHost:
    """A transport with its folder."""

    def __init__(self, transport: Transport, root: Path) -> None:
        self.transport = transport
        self.root = root

    def folder(self, job_id: str = "job") -> Path:
        return self.root / "jobs" / job_id

    def sh(self, script: str, *, job_id: str = "job", owner: str = "try-1", **fields: Any) -> JobState:
        """Submit a job that runs a shell script."""
        return self.submit(["/bin/sh", "-c", script], job_id=job_id, owner=owner, **fields)

    def submit(self, argv: list[str], *, job_id: str = "job", owner: str = "try-1", **fields: Any) -> JobState:
        return jobs.submit(self.transport, JobSpec(job_id=job_id, owner=owner, argv=argv, **fields))

    def state(self, job_id: str = "job") -> JobState:
        return jobs.state(self.transport, job_id)

    def ended(self, job_id: str = "job", *, wait_s: float = 60) -> JobState:
        """Wait for the job's end."""
        until(lambda: self.state(job_id).phase == "ended", wait_s=wait_s)
        return self.state(job_id)

    def text(self, name: str, *, job_id: str = "job") -> str:
        """Wait for a file of the job and return what is in it."""
        path = self.folder(job_id) / name
        until(lambda: path.exists() and path.stat().st_size)
        return path.read_text()

    def pids(self, job_id: str = "job") -> list[int]:
        """Return the marked processes of a job."""
        return [process.pid for process in job_processes(job_id, self.folder(job_id))]

    def supervisor(self, job_id: str = "job") -> int:
        pid: int = read_json(self.folder(job_id) / "state.json")["supervisor"][0]
        return pid

    def stop_all(self) -> None:
        """Leave no process."""
        if (self.root / "jobs").exists():
            for folder in (self.root / "jobs").iterdir():
                jobs.stop(self.transport, folder.name, wait_s=30)


def is_alive(pid: int) -> bool:
    found = read_process(pid)
    return found is not None and found.lives
