"""Runs: submit one, take up one that is there, and follow it. A ``Run`` is a handle; its state is with Airflow."""

from __future__ import annotations

import atexit
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from taas.client import FINAL_STATES, Client, ClientConfig, FileInfo
from taas.client_config import entry_config
from taas.errors import ClientError
from taas.pickling import pickled
from taas.project_files import get_artifacts
from taas.registry import registered
from taas.request import TrainRequest, parse_request
from taas.transfer import upload_bytes

_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.~:+-]{0,199}")
_MAX_MISSED_POLLS = 10


@dataclass(frozen=True)
class RunStatus:
    """How a run is doing.

    Attributes:
        state: Airflow's word: queued, running, success or failed.
        phase: The step at work, e.g. "prepare".
        lines: One line for people per step that has begun.
        prepared: Loader -> ``{"units": prepared without a gap, "asked": of how many}``.
    """

    run_id: str
    state: str
    phase: str | None
    lines: tuple[str, ...]
    prepared: Mapping[str, Mapping[str, int]]

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.state in FINAL_STATES


def new_lines(before: RunStatus | None, now: RunStatus) -> list[str]:
    """Return what is to be told after ``before`` was told: changed lines, and each tenth of a loader prepared."""
    known = before.lines if before else ()
    lines = [line for line in now.lines if line not in known]
    for loader, progress in now.prepared.items():
        earlier = before.prepared.get(loader) if before else None
        units, asked = progress["units"], progress["asked"]
        if units and _tenths(progress) > (_tenths(earlier) if earlier else 0):
            lines.append(f"{loader}: {units} of {asked} units prepared ({100 * units // asked} %)")
    return lines


def _tenths(progress: Mapping[str, int]) -> int:
    return 10 * progress["units"] // max(1, progress["asked"])


class Run:
    """A handle of one run. Every failure is a ``ClientError`` of one sentence."""

    def __init__(self, run_id: str, *, client: Client, state: str | None = None, started_at: str | None = None) -> None:
        self.run_id = run_id
        self.client = client
        self.state_when_listed = state
        self.started_at = started_at

    def __repr__(self) -> str:
        return f"Run({self.run_id!r}, url={self.url!r})"

    @property
    def url(self) -> str:
        """The run's address in Airflow's pages."""
        return self.client.run_url(self.run_id)

    def status(self) -> RunStatus:
        """Return how the run is doing now."""
        reply = self.client.status(self.run_id)
        lines = tuple(reply.get("lines") or ())
        return RunStatus(self.run_id, reply["state"], reply.get("phase"), lines, reply.get("prepared") or {})

    def tasks(self) -> list[tuple[str, int, str | None]]:
        """Return (task id, map index, state) of each task instance; map index -1: the task is not mapped."""
        found = self.client.task_instances(self.run_id)
        return [(item["task_id"], item["map_index"], item["state"]) for item in found]

    def wait(
        self,
        *,
        on_line: Callable[[str], None] | None = None,
        poll_s: float = 2.0,
        timeout_s: float | None = None,
    ) -> str:
        """Wait until the run is over and return its state: "success" or "failed".

        Args:
            on_line: Called with each new line of progress.
            poll_s: Seconds between two looks.
            timeout_s: Seconds after which to give up waiting (the run goes on).

        Raises:
            ClientError: the time is up, or Airflow cannot be reached for long.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        told: RunStatus | None = None
        missed = 0
        while True:
            try:
                now, missed = self.status(), 0
            except ClientError as error:
                missed += 1
                if not error.fields.get("transient") or missed > _MAX_MISSED_POLLS:
                    raise
            else:
                for line in new_lines(told, now) if on_line else ():
                    on_line(line)  # type: ignore[misc]
                told = now
                if now.is_over:
                    return now.state
            if deadline is not None and time.monotonic() >= deadline:
                state = told.state if told else "not known"
                raise ClientError(f"run '{self.run_id}' is not over after {timeout_s:g} s (state: {state}); it goes on")
            self.client.sleep(poll_s)

    def logs(self, *, rank: int | None = None) -> str:
        """Return what a rank has written so far; without one, the lines of all ranks, each with its host and rank."""
        return "".join(self.follow_logs(rank=rank, until_now=True))

    def follow_logs(self, *, rank: int | None = None, until_now: bool = False, poll_s: float = 1.0) -> Iterator[str]:
        """Yield what a rank (by default every rank) writes, as it comes, until it succeeded or the run is over.

        Args:
            rank: The rank to read alone, as it wrote. Without, each line is led by its host and rank.
            until_now: End as soon as all that is there now was read.
            poll_s: Seconds between two looks.

        Raises:
            ClientError: there is no such rank, or Airflow cannot be reached (for long, while it is followed).
        """
        cursor, is_idle, is_over, missed = "", False, until_now, 0
        while True:
            try:
                is_over = is_over or (is_idle and self.status().is_over)  # before the look: it may find the last words
                texts, after, complete = self.client.logs(self.run_id, rank=rank, cursor=cursor)
            except ClientError as error:
                missed += 1
                if until_now or not error.fields.get("transient") or missed > _MAX_MISSED_POLLS:
                    raise
                self.client.sleep(poll_s)
                continue
            if text := "".join(one.text if rank is not None else one.as_lines() for one in texts):
                yield text
            cursor, is_idle, missed = after, after == cursor, 0
            if complete or (is_idle and is_over):
                return
            if is_idle:
                self.client.sleep(poll_s)

    def cancel(self) -> str:
        """Stop the run: Airflow marks it failed, and every process of it ends. Return its state before.

        A run that is over stays as it is.
        """
        return self.client.cancel(self.run_id)

    def report(self) -> dict[str, Any]:
        """Return the run's report; raises ClientError while there is none."""
        return self.client.report(self.run_id)

    def artifacts(self) -> list[FileInfo]:
        """Return what rank 0 wrote, as published: path, sha256, size, mode, and a URL that reads it for an hour."""
        return self.client.artifacts(self.run_id)

    def download_artifacts(self, folder: str | Path) -> list[FileInfo]:
        """Write what rank 0 wrote below a folder, verified; files that are there are replaced."""
        return get_artifacts(self.client, self.run_id, Path(folder))


def submit(
    request: TrainRequest | Mapping[str, Any], run_id: str | None = None, *, client: Client | None = None
) -> Run:
    """Start a run and return its handle. Doing it twice with the same ``run_id`` and request starts one run.

    Where the request names no ``loaders``, those that are registered here go with it, pickled; ``"loaders": {}`` says
    that none do.

    Raises:
        RequestError: with every fault of the request.
        RegisterError: a registered loader cannot be pickled any more.
        ClientError: Airflow or the store refused, or cannot be reached.
    """
    client = client or default_client()
    conf = request.to_conf() if isinstance(request, TrainRequest) else request
    payloads = _payloads(conf)
    draft = {**conf, "loaders": _refs(payloads, keys={})} if payloads else conf
    checked = parse_request(draft, flavors=client.flavors)
    chosen = new_run_id(checked.project) if run_id is None else _checked_run_id(run_id)
    if payloads:
        keys = {name: _upload(client, checked.project, name, data) for name, data in payloads.items()}
        checked = parse_request({**conf, "loaders": _refs(payloads, keys=keys)}, flavors=client.flavors)
    client.trigger(checked.to_conf(), run_id=chosen)
    return Run(chosen, client=client)


def attach(run_id: str, *, client: Client | None = None) -> Run:
    """Return the handle of a run that is there; raises ClientError when it is not."""
    client = client or default_client()
    found = client.run(_checked_run_id(run_id))
    return Run(run_id, client=client, state=found["state"], started_at=found.get("start_date"))


def runs(*, limit: int = 50, client: Client | None = None) -> list[Run]:
    """Return handles of the latest runs, the newest first, with the state that each had when listed."""
    client = client or default_client()
    return [
        Run(item["dag_run_id"], client=client, state=item["state"], started_at=item.get("start_date"))
        for item in client.runs(limit=limit)
    ]


def new_run_id(project: str) -> str:
    """Return a fresh id for a run: time, project, and a random part."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{project}-{secrets.token_hex(3)}"


def default_client() -> Client:
    """Return this process's client of the Airflow that its environment or files name."""
    return _client_of(entry_config())


@lru_cache(maxsize=4)
def _client_of(config: ClientConfig) -> Client:
    client = Client(config)
    atexit.register(client.close)
    return client


def _checked_run_id(run_id: str) -> str:
    if not isinstance(run_id, str) or not _RUN_ID.fullmatch(run_id):
        raise ClientError(
            f"got the run id {run_id!r}; allowed: 1 to 200 letters, digits and _ . ~ : + -, beginning with a letter,"
            " a digit or _"
        )
    return run_id


def _payloads(conf: Mapping[str, Any]) -> dict[str, tuple[bytes, int | None]]:
    """Return the pickles of the registered loaders that go with a request, with their own units."""
    if not isinstance(conf, Mapping) or conf.get("loaders") is not None:
        return {}
    return {name: (pickled(item.loader, name=name), item.units) for name, item in registered().items()}


def _refs(payloads: Mapping[str, tuple[bytes, int | None]], *, keys: Mapping[str, str]) -> dict[str, Any]:
    refs = {}
    for name, (data, units) in payloads.items():
        ref = {"payload": keys.get(name, "not-uploaded-yet"), "sha256": hashlib.sha256(data).hexdigest()}
        refs[name] = ref if units is None else {**ref, "units": units}
    return refs


def _upload(client: Client, project: str, name: str, payload: tuple[bytes, int | None]) -> str:
    data = payload[0]
    key, url = client.payload_target(project, sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data))
    if url is not None:
        upload_bytes(client, data, url=url, what=f"loader {name}")
    return key
