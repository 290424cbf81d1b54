"""Every object key and every path on a host, and nowhere else.

Object keys are relative to the store's prefix. ``RunKeys`` and ``ProjectKeys`` own those of one run and one project;
``HostPaths`` owns the folders of one host. All results of a job carry its generation.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


def run_key(run_id: str) -> str:
    """Return a name for a DAG run that is safe as one part of a key or path: a readable part and a hash of the id."""
    readable = _UNSAFE.sub("-", run_id).strip("-.")[:48] or "run"
    return f"{readable}-{hashlib.sha256(run_id.encode()).hexdigest()[:10]}"


def payload_key(project: str, sha256: str) -> str:
    """Return the key of an uploaded payload (a pickled loader, or a captured cell) of a project."""
    return f"projects/{project}/payloads/{sha256}"


@dataclass(frozen=True)
class ProjectKeys:
    """Keys of one project: content-addressed blobs, snapshots, and the numbered history of heads."""

    project: str

    @property
    def root(self) -> str:
        """The prefix of everything of the project."""
        return f"projects/{self.project}/"

    @property
    def history(self) -> str:
        """The prefix of the numbered records; the highest number is the head."""
        return f"{self.root}history/"

    def record(self, number: int) -> str:
        """The key of history record ``number`` (from 1)."""
        return f"{self.history}{number:010d}.json"

    def blob(self, sha256: str) -> str:
        """The key of a file's content."""
        return f"{self.root}blobs/{sha256[:2]}/{sha256}"

    def snapshot(self, snapshot_id: str) -> str:
        """The key of a snapshot: the hashes of all files of one version."""
        return f"{self.root}snapshots/{snapshot_id}.json"


@dataclass(frozen=True)
class RunKeys:
    """Keys of one run. ``run`` is the value of ``run_key``."""

    run: str

    @property
    def root(self) -> str:
        """The prefix of everything of the run."""
        return f"runs/{self.run}/"

    @property
    def request(self) -> str:
        """The validated request with its snapshot (a ``PinnedRequest``)."""
        return f"{self.root}request.json"

    @property
    def abort(self) -> str:
        """Put if absent by whoever fails for good: prepare, gate and train stop when it is there."""
        return f"{self.root}abort"

    @property
    def plan(self) -> str:
        """The ``Plan``."""
        return f"{self.root}plan.json"

    @property
    def report(self) -> str:
        """The ``Report``."""
        return f"{self.root}report.json"

    @property
    def report_text(self) -> str:
        """The report for people."""
        return f"{self.root}report.txt"

    @property
    def gate(self) -> str:
        """The ``GateDecision`` that opened the gate."""
        return f"{self.root}gate.json"

    @property
    def jobs(self) -> str:
        """The prefix of the ``JobRecord``s."""
        return f"{self.root}jobs/"

    def job_record(self, job_id: str) -> str:
        """The ``JobRecord`` of a job that has ended, written by the Airflow task that saw it end."""
        return f"{self.jobs}{job_id}.json"

    @property
    def placements(self) -> str:
        """The prefix of what tells ``release`` and the logs where jobs are."""
        return f"{self.root}placed/"

    def placement(self, task_id: str, map_index: int) -> str:
        """Where the current try of a task has its jobs (a ``Placement``); put before they are started."""
        place = f"-{map_index}" if map_index >= 0 else ""
        return f"{self.placements}{task_id}{place}.json"

    def last_words(self, task: str) -> str:
        """Why a task failed for good, in its own words (``task`` as in ``prepare_0``)."""
        return f"{self.root}failed/{task}.txt"

    @property
    def tasks(self) -> str:
        """The ``TaskTimes`` of the run's Airflow tasks, written by ``report``."""
        return f"{self.root}tasks.json"

    @property
    def artifacts(self) -> str:
        """The ``ArtifactRecord`` that ``upload`` published."""
        return f"{self.root}artifacts.json"

    def inspection(self, loader: str) -> str:
        """The ``Inspection`` of a loader."""
        return f"{self.root}inspect/{loader}.json"

    def order_chunk(self, loader: str, epoch: int, chunk: int) -> str:
        """A chunk of a custom sampler's order (Arrow; one row an element: the indices it is collated from)."""
        return f"{self.root}order/{loader}/{epoch:06d}/{chunk:06d}.arrow"

    def shard(self, loader: str, epoch: int, stream: int, n: int, *, generation: int, machine: int) -> str:
        """The object of one segment, as one try of one machine wrote it."""
        return f"{self.root}shards/{loader}/{epoch:06d}/{stream:04d}/{n:08d}-m{machine}-g{generation}.arrow"

    def stream_position(self, loader: str, epoch: int, stream: int, n: int, *, generation: int, machine: int) -> str:
        """How a loader worker reads on behind segment ``n`` of its stream."""
        return f"{self.root}positions/{loader}/{epoch:06d}/{stream:04d}/{n:08d}-m{machine}-g{generation}"

    def ledger(self, loader: str) -> str:
        """The prefix of a loader's ledger."""
        return f"{self.root}ledger/{loader}/"

    def ledger_record(self, loader: str, epoch: int, stream: int, n: int) -> str:
        """The ``ShardRecord`` of a committed segment."""
        return f"{self.ledger(loader)}{epoch:06d}/{stream:04d}/{n:08d}.json"

    def prepared(self, loader: str, machine: int) -> str:
        """Put by a machine that saw all of a loader committed: from then on a missing record is a lost one."""
        return f"{self.root}prepared/{loader}/{machine:04d}"

    def train(self, generation: int) -> str:
        """The prefix of all that one try of the training writes."""
        return f"{self.root}train/g{generation:04d}/"

    def node_info(self, generation: int, node_rank: int) -> str:
        """What a node says of itself before the start (preflight)."""
        return f"{self.train(generation)}node-{node_rank}.json"

    def node_reach(self, generation: int, node_rank: int) -> str:
        """What a node says once it has tried to reach node 0 (preflight's second round)."""
        return f"{self.train(generation)}reach-{node_rank}.json"

    def node_clock(self, generation: int, node_rank: int) -> str:
        """An empty object; the store dates it, and the node compares its own clock with that."""
        return f"{self.train(generation)}clock-{node_rank}"

    def node_result(self, generation: int, node_rank: int) -> str:
        """The ``NodeResult`` of one node."""
        return f"{self.train(generation)}result-{node_rank}.json"

    def watch(self, generation: int) -> str:
        """The prefix by which the node agents of one try watch each other: one listing tells all."""
        return f"{self.train(generation)}watch/"

    def watch_beat(self, generation: int, node_rank: int) -> str:
        """Rewritten every few seconds by a node agent that lives."""
        return f"{self.watch(generation)}beat-{node_rank}"

    def watch_failed(self, generation: int, node_rank: int) -> str:
        """Put by a node agent whose part has failed for good (JSON: host, reason): the others stop."""
        return f"{self.watch(generation)}failed-{node_rank}"

    def watch_done(self, generation: int, node_rank: int, attempt: int) -> str:
        """Put by a node agent all of whose ranks have ended well, in the given attempt (restart) of the gang."""
        return f"{self.watch(generation)}done-{node_rank}-{attempt}"

    def watch_hang(self, generation: int, attempt: int) -> str:
        """Put if absent when the gang hangs in the given attempt: every node then takes its ranks' stacks."""
        return f"{self.watch(generation)}hang-{attempt}"

    def watch_stacks(self, generation: int, node_rank: int, attempt: int) -> str:
        """Put by a node agent that has taken its ranks' stacks of a hang: nobody stops ranks before all have."""
        return f"{self.watch(generation)}stacks-{node_rank}-{attempt}"

    def checkpoints(self, generation: int) -> str:
        """The prefix of one try's newest checkpoints, for the next try on whichever hosts."""
        return f"{self.train(generation)}checkpoints/"

    def rank_log(self, generation: int, rank: int) -> str:
        """The whole log of one rank, put when the node agent ends."""
        return f"{self.train(generation)}logs/rank-{rank}.log"

    def log_piece(self, generation: int, node_rank: int, number: int) -> str:
        """What a node's ranks wrote since the piece before, put while they run (``taas_tasks.rank_logs``; from 1)."""
        return f"{self.train(generation)}logs/live/node-{node_rank}/{number:08d}"

    def staged(self, generation: int) -> str:
        """The ``StagedArtifacts`` of one try; the contents are blobs of the project."""
        return f"{self.train(generation)}staged.json"

    def metrics(self, generation: int) -> str:
        """What ``taas.log`` wrote on rank 0 (JSON lines)."""
        return f"{self.train(generation)}metrics.jsonl"


@dataclass(frozen=True)
class HostPaths:
    """Folders of one host below its root; jobs, slots, runs and caches."""

    root: Path

    @property
    def jobs(self) -> Path:
        """One folder per job."""
        return self.root / "jobs"

    def job(self, job_id: str) -> Path:
        """The folder of one job."""
        return self.jobs / job_id

    @property
    def slots(self) -> Path:
        """One file per slot."""
        return self.root / "slots"

    def engine(self, digest: str) -> Path:
        """Our own code on a host that has nothing of ours; one folder per version."""
        return self.root / "engines" / digest

    @property
    def envs(self) -> Path:
        """One Python environment per set of a request's requirements."""
        return self.root / "envs"

    @property
    def cache(self) -> Path:
        """Where the feeder makes its (unlinked) cache files."""
        return self.root / "cache"

    def project(self, run: str, generation: int) -> Path:
        """The project folder that the ranks of one try share on this host."""
        return self.root / "runs" / run / f"g{generation:04d}" / "project"

    def scratch(self, run: str, generation: int) -> Path:
        """Working files of one try that are not the project: contexts, logs, counters, sockets."""
        return self.root / "runs" / run / f"g{generation:04d}" / "scratch"
