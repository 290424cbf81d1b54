"""Having lost segments prepared again on this host: when, how often, and by a process of its own.

A segment is lost when its object stays wrong or missing, or when its ledger record is missing although the loader is
prepared. ``taas_tasks.prep.repair_program`` makes it again; several hosts may do that at once, as the result is equal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taas.errors import DeliveryError, error_from_dict
from taas_tasks.layout import RunKeys
from taas_tasks.store.base import ObjectStore
from taas_tasks.store.files import write_then_move
from taas_tasks.values import LaunchPlan, LoaderPlan, StoreConfig, Value

_log = logging.getLogger(__name__)
_MAX_TRIES = 3
_FIRST_GENERATION = 1000
_LEAST_S = 600.0
_SLOWER = 10.0  # than when it was measured: the ranks' own work goes on beside it
_RECORD_PATIENCE_S = 30.0
_PROGRAM = "taas_tasks.prep.repair_program"


class RepairSetup(Value):
    """Where and with what a host prepares segments again. ``env`` may hold secrets: it travels in a 0600 file."""

    folder: str
    env: dict[str, str]
    record_patience_s: float = _RECORD_PATIENCE_S


@dataclass(frozen=True)
class LostSegment:
    """A segment whose object or record is lost."""

    loader: str
    epoch: int
    stream: int
    n: int

    def __str__(self) -> str:
        of_stream = f" of stream {self.stream}" if self.stream else ""
        return f"segment {self.n}{of_stream} of epoch {self.epoch} of loader '{self.loader}'"


def timeout_of(plan: LoaderPlan) -> float:
    """Return the seconds that preparing a segment again may take; a stream is read again up to it."""
    elements = plan.sizes.largest if plan.inspection.read_by == "index" else plan.units
    return _LEAST_S + _SLOWER * plan.inspection.element_seconds * elements


def generation_of_repair(place: int, generation: int) -> int:
    """Return the generation of what a host writes when it repairs; no try, and no other host, has it."""
    return _FIRST_GENERATION * (place + 1) + generation


class Repairs:
    """Prepares lost segments again, one at a time, each ``_MAX_TRIES`` times at most. Safe to use from several threads.

    Args:
        setup: where, and the environment of the user's loaders.
        store: is given to the process.
        plan: of the training.
        node_rank: this host's place in it.
        host: for messages.
        module: the program, and
        timeout_of: how long it may take, for tests.
    """

    def __init__(
        self,
        setup: RepairSetup,
        *,
        store: StoreConfig,
        plan: LaunchPlan,
        node_rank: int,
        host: str,
        module: str = _PROGRAM,
        timeout_of: Callable[[LoaderPlan], float] = timeout_of,
    ) -> None:
        self._setup, self._store, self._plan, self._node_rank, self._host = setup, store, plan, node_rank, host
        self._module, self._timeout_of = module, timeout_of
        self._turn = threading.Lock()
        self._state = threading.Lock()  # of what follows
        self._tries: Counter[LostSegment] = Counter()
        self._done: Counter[LostSegment] = Counter()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._notes: list[str] = []

    @property
    def record_patience_s(self) -> float:
        """How long the records of a prepared loader may stay away before the next one counts as lost."""
        return self._setup.record_patience_s

    @property
    def notes(self) -> list[str]:
        """Sentences about what was prepared again, for the report."""
        with self._state:
            return list(self._notes)

    def repair(self, lost: LostSegment, why: str) -> None:
        """Return when the segment was prepared again, by this call or by another one that was under way.

        Raises:
            DeliveryError: it cannot be, or was often enough; says why.
        """
        before = self._done[lost]
        with self._turn:
            if self._done[lost] != before:
                return
            self._tries[lost] += 1
            if self._tries[lost] > _MAX_TRIES:
                raise self._failed(lost, why, f"it was prepared again {_MAX_TRIES} times already")
            _log.warning("%s is lost (%s); host %s prepares it again, its ranks wait", lost, why, self._host)
            started = time.monotonic()
            try:
                self._run(lost, why)
            except OSError as error:
                raise self._failed(lost, why, str(error)) from error
            self._note(f"{lost} was lost ({why}); host {self._host} prepared it again", time.monotonic() - started)
            self._done[lost] += 1

    def close(self) -> None:
        """End a repair that is under way, and let no other begin."""
        with self._state:
            self._closed = True
            process = self._process
        if process is not None:
            end_with_session(process)

    def _note(self, text: str, seconds: float) -> None:
        _log.warning("%s in %.1f s", text, seconds)
        with self._state:
            self._notes.append(f"{text} in {seconds:.1f} s")

    def _failed(self, lost: LostSegment, why: str, problem: str) -> DeliveryError:
        return DeliveryError(
            f"{lost} is lost ({why}), and host {self._host} cannot prepare it again: {problem}. Start the run anew",
            loader=lost.loader,
            epoch=lost.epoch,
            stream=lost.stream,
            n=lost.n,
            host=self._host,
        )

    def _run(self, lost: LostSegment, why: str) -> None:
        folder = Path(self._setup.folder)
        shutil.rmtree(folder, ignore_errors=True)  # left by a feeder that was killed
        try:
            with write_then_move(folder / "input.json", mode=0o600) as file:
                file.write(json.dumps(self._input(lost)).encode())
            problem = self._ended(folder / "input.json", self._timeout_of(self._plan.loaders[lost.loader]))
            outcome = read_outcome(folder / "outcome.json")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if outcome is None:
            raise self._failed(lost, why, problem)
        if not outcome["ok"]:
            error = error_from_dict(outcome["error"])
            raise error if isinstance(error, DeliveryError) else self._failed(lost, why, error.message) from error

    def _input(self, lost: LostSegment) -> dict[str, Any]:
        plan = self._plan
        return {
            "store": self._store.model_dump(mode="json"),
            "run": plan.run,
            "run_id": plan.run_id,
            "project": plan.project,
            "snapshot": plan.snapshot,
            "generation": generation_of_repair(self._node_rank, plan.generation),
            "host": self._host,
            "host_root": "",
            "plan": RunKeys(plan.run).plan,
            "loader": lost.loader,
            "allow_pickle": plan.allow_pickle,
            "epoch": lost.epoch,
            "stream": lost.stream,
            "n": lost.n,
        }

    def _ended(self, path: Path, timeout_s: float) -> str:
        """Run the program to its end, and say how it ended."""
        command = [sys.executable, "-m", self._module, str(path)]
        with self._state:
            if self._closed:
                return "the feeder ends"
            self._process = process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=self._setup.env, start_new_session=True
            )
        try:
            code = process.wait(timeout_s)
            return f"its process ended with code {code} and left no outcome"
        except subprocess.TimeoutExpired:
            return f"it takes longer than {timeout_s:.0f} s"
        finally:
            end_with_session(process)
            with self._state:
                self._process = None


def end_with_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process and its session: loader workers too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_outcome(path: Path) -> dict[str, Any] | None:
    """Return what a program left of itself; None where it was killed."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return found


class RecordWatch:
    """Notices that records of a prepared loader do not come: they were lost after they had been counted.

    Args:
        store: where machines say that a loader is prepared.
        run: the run's key.
        plan: of the loader.
        patience_s: how long no record must have come.
        clock: for tests.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: str,
        plan: LoaderPlan,
        *,
        patience_s: float = _RECORD_PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._keys, self._plan = store, RunKeys(run), plan
        self._patience_s, self._clock = patience_s, clock
        self._since = clock()

    def lost(self, *, found: int, awaited: Iterable[LostSegment]) -> list[LostSegment]:
        """Return what is lost of ``awaited``, given that the last poll found so many records."""
        now = self._clock()
        if found:
            self._since = now
        if found or now - self._since < self._patience_s:
            return []
        self._since = now
        return list(awaited) if self._is_prepared() else []

    def _is_prepared(self) -> bool:
        machines = range(self._plan.machines)
        return all(self._store.head(self._keys.prepared(self._plan.loader, machine)) for machine in machines)
