"""Ledger records that are gone while machines wait for them: how they are told from late ones, and made again.

A stream's records are committed in their order, and a machine says when it saw its loader complete. So a record is lost
when a later one of its stream is there, or when the stream's owner has said that all is; nothing else is taken for it.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from taas.errors import PrepareError, error_from_dict
from taas_tasks.delivery.repair import end_with_session, generation_of_repair, read_outcome
from taas_tasks.layout import RunKeys
from taas_tasks.ledger import SegmentId
from taas_tasks.plan import stream_owner
from taas_tasks.program_values import PrepareInput
from taas_tasks.store.base import ObjectStore
from taas_tasks.store.files import write_then_move
from taas_tasks.values import LoaderPlan, ShardRecord

_log = logging.getLogger(__name__)
_CHECK_S = 0.5
_FIRST_MACHINE = 100  # behind the hosts that train: no two of them write the same keys
_PROGRAM = "taas_tasks.prep.repair_program"


@dataclass(frozen=True)
class LostRecord:
    """A committed segment without its record. ``why``: how that is known."""

    loader: str
    epoch: int
    stream: int
    n: int
    why: str

    def __str__(self) -> str:
        return f"segment {self.n} of stream {self.stream} in epoch {self.epoch} of loader {self.loader!r}"


MakeAgain = Callable[[LostRecord], None]
"""Has a lost record's segment prepared and committed again; raises a TaasError that says why it cannot be."""


def find_lost(awaited: Iterable[SegmentId], *, store: ObjectStore, run: str, plan: LoaderPlan) -> list[LostRecord]:
    """Return those of the awaited segments of streams that were committed. One listing."""
    keys = RunKeys(run)
    last: dict[int, tuple[int, int]] = {}
    prefix = keys.ledger(plan.loader)
    for info in store.list(prefix):
        epoch, stream, n = map(int, info.key.removeprefix(prefix).removesuffix(".json").split("/"))
        last[stream] = max(last.get(stream, (0, 0)), (epoch, n))
    found = []
    for epoch, stream, n in awaited:
        owner = stream_owner(stream, machines=plan.machines)
        if last.get(stream, (0, 0)) > (epoch, n):
            why = "later ones of its stream are there"
        elif store.head(keys.prepared(plan.loader, owner)) is not None:
            why = f"machine {owner}, which prepared it, saw the loader complete"
        else:
            continue
        if store.head(keys.ledger_record(plan.loader, epoch, stream, n)) is None:  # it may have come meanwhile
            found.append(LostRecord(plan.loader, epoch, stream, n, why))
    return found


def put_again(record: ShardRecord, *, store: ObjectStore, run: str) -> None:
    """Put a record that this machine knows to be committed, if it is gone."""
    key = RunKeys(run).ledger_record(record.loader, record.epoch, record.stream, record.n)
    if store.head(key) is None and store.put_if_absent(key, record.to_bytes()):
        _log.warning("the ledger's record %s was gone; it is put again", key)


def cannot_go_on(lost: LostRecord, *, machine: int, waited_s: float, problem: str) -> PrepareError:
    """Return the error of a machine that needs a lost record."""
    return PrepareError(
        f"{lost} is committed, but its ledger record is gone ({lost.why}); machine {machine} needs it, has waited"
        f" {waited_s:.0f} s for it and cannot go on: {problem}. Clear this task: it has the segment prepared again",
        loader=lost.loader,
        epoch=lost.epoch,
        stream=lost.stream,
        n=lost.n,
        machine=machine,
        waited_s=waited_s,
    )


def prepare_again(lost: LostRecord, given: PrepareInput, *, check: Callable[[], None]) -> None:
    """Have a segment prepared and committed again by a process of its own, with this one's environment.

    Args:
        lost: the segment.
        given: this machine's input.
        check: called while the process runs; what it raises ends the process.

    Raises:
        PrepareError: It could not be prepared; says why.
    """
    _log.warning("%s is lost (%s); it is prepared again", lost, lost.why)
    with tempfile.TemporaryDirectory(prefix="taas-repair-") as made:
        folder = Path(made)
        with write_then_move(folder / "input.json", mode=0o600) as file:
            file.write(json.dumps(_input(lost, given)).encode())
        code = _run(folder / "input.json", check)
        outcome = read_outcome(folder / "outcome.json")
    if outcome is None:
        raise PrepareError(f"the process that prepares it again ended with code {code} and left no outcome")
    if not outcome["ok"]:
        raise error_from_dict(outcome["error"])


def _input(lost: LostRecord, given: PrepareInput) -> dict[str, object]:
    generation = generation_of_repair(_FIRST_MACHINE + given.machine, given.generation)
    place = {"epoch": lost.epoch, "stream": lost.stream, "n": lost.n}
    return {**given.model_dump(mode="json"), **place, "generation": generation}


def _run(path: Path, check: Callable[[], None]) -> int:
    command = [sys.executable, "-m", _PROGRAM, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while process.poll() is None:
            check()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_CHECK_S)
        return process.returncode
    finally:
        end_with_session(process)
