"""The files by which a node agent and its ranks speak to each other, all in the scratch folder of one try."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from taas_tasks.values import Value


class RankSpec(Value):
    """What every rank of a node must know to start; one file per node."""

    host: str
    project_dir: str
    scratch: str
    script: str | None
    args: list[str]
    cell_path: str | None
    cell_sha256: str | None
    flavor: str
    emulate_gpus: bool
    other_ranks: Literal["refuse", "scratch"]
    guard: Literal["mount", "userns", "landlock"] | None


class EndReport(Value):
    """A rank's script ended without an error."""

    rank: int
    ended_at: float


class ErrorReport(Value):
    """A rank's script raised, or called ``sys.exit`` with a failure; written by the rank itself."""

    rank: int
    exit_code: int
    error_class: str
    message: str
    traceback_tail: str
    failed_at: float


def write_json(path: Path, text: str) -> None:
    """Write a small 0600 file whole or not at all: a temporary beside it, then moved."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
        handle.write(text)
    temporary.replace(path)


def state_of_files(folder: Path) -> dict[str, list[int]]:
    """Return size and time of change in ns of each file below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            status = path.stat()
            found[str(path.relative_to(folder))] = [status.st_size, status.st_mtime_ns]
    return found


@dataclass(frozen=True)
class RankFiles:
    """Paths below the scratch folder of one try on one host."""

    scratch: Path

    @property
    def spec(self) -> Path:
        """The ``RankSpec``."""
        return self.scratch / "rank-spec.json"

    @property
    def launch_plan(self) -> Path:
        """The ``LaunchPlan``, for the feeder and the ranks."""
        return self.scratch / "launch-plan.json"

    @property
    def cell(self) -> Path:
        """The captured cell's payload, as downloaded."""
        return self.scratch / "cell.payload"

    def payload(self, sha256: str) -> Path:
        """A plain loader's payload, as downloaded."""
        return self.scratch / "payloads" / sha256

    @property
    def release(self) -> Path:
        """Made by the agent when every rank of every node has ended: ranks leave when it is there."""
        return self.scratch / "ranks" / "release"

    @property
    def counters_dir(self) -> Path:
        """The counters of what the ranks consumed (one small file per pass)."""
        return self.scratch / "counters"

    @property
    def metrics(self) -> Path:
        """What ``taas.log`` wrote on rank 0."""
        return self.scratch / "metrics.jsonl"

    @property
    def feeder_input(self) -> Path:
        """The feeder's input; the feeder removes it."""
        return self.scratch / "feeder.json"

    @property
    def feeder_stats(self) -> Path:
        """What the feeder says it delivered."""
        return self.scratch / "feeder-stats.json"

    @property
    def feeder_socket(self) -> Path:
        """Where ranks connect to the feeder."""
        return self.scratch / "feeder"

    @property
    def repair(self) -> Path:
        """Where a lost segment is prepared again; there only meanwhile."""
        return self.scratch / "repair"

    @property
    def feeder_log(self) -> Path:
        """The feeder's own output."""
        return self.scratch / "logs" / "feeder.log"

    def log(self, rank: int) -> Path:
        """Standard output and error of one rank."""
        return self.scratch / "logs" / f"rank-{rank}.log"

    def context(self, rank: int) -> Path:
        """The context file of one rank (``TAAS_CONTEXT``)."""
        return self.scratch / "ranks" / f"context-{rank}.json"

    def end(self, rank: int) -> Path:
        """The ``EndReport`` of a rank."""
        return self.scratch / "ranks" / f"end-{rank}.json"

    def error(self, rank: int) -> Path:
        """The ``ErrorReport`` of a rank."""
        return self.scratch / "ranks" / f"error-{rank}.json"

    def closing(self, rank: int) -> Path:
        """Made by a rank whose script has ended and which now runs its exit handlers."""
        return self.scratch / "ranks" / f"closing-{rank}"

    def first_step(self, rank: int) -> Path:
        """Unix seconds of the rank's first optimizer step."""
        return self.scratch / "ranks" / f"first-step-{rank}"

    def progress(self, rank: int) -> Path:
        """What the rank has done so far in this attempt (``delivery.progress``)."""
        return self.scratch / "ranks" / f"progress-{rank}"

    def stacks(self, rank: int) -> Path:
        """Where the rank writes the stacks of its threads when it is asked."""
        return self.scratch / "ranks" / f"stacks-{rank}.txt"

    def private_project(self, rank: int) -> Path:
        """The private copy of the project in which another rank works with ``other_ranks: "scratch"``."""
        return self.scratch / "private" / f"rank-{rank}"

    def make_folders(self) -> None:
        """Make the folders of the try (0700)."""
        for name in ("logs", "ranks", "counters", "payloads", "private", "tmp"):
            (self.scratch / name).mkdir(mode=0o700, parents=True, exist_ok=True)

    def forget_attempt(self, ranks: list[int]) -> None:
        """Remove the reports of an earlier attempt of the same try (a restart of the gang)."""
        self.release.unlink(missing_ok=True)
        for rank in ranks:
            said = (self.end(rank), self.error(rank), self.closing(rank), self.progress(rank), self.stacks(rank))
            for path in said:
                path.unlink(missing_ok=True)

    def copy_project(self, project: Path, rank: int) -> Path:
        """Give a rank its private copy, before any rank runs; one that an earlier attempt had is kept."""
        private = self.private_project(rank)
        if not private.exists():
            shutil.copytree(project, private, symlinks=True)
            write_json(private.with_suffix(".json"), json.dumps(state_of_files(private)))
        return private

    def write_context(self, *, rank: int, local_rank: int, world_size: int, socket: str | None, project: Path) -> None:
        """Write the context file that ``taas_tasks.delivery.install`` reads in the rank."""
        context: dict[str, Any] = {
            "rank": rank,
            "local_rank": local_rank,
            "world_size": world_size,
            "feeder_socket": socket,
            "launch_plan_path": str(self.launch_plan),
            "counters_dir": str(self.counters_dir),
            "metrics_path": str(self.metrics),
            "project_dir": str(project),
        }
        write_json(self.context(rank), json.dumps(context))
