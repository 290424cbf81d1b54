from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from taas.errors import DeliveryError
from taas_tasks.delivery.repair import LostSegment, RecordWatch, Repairs, RepairSetup, timeout_of
from taas_tasks.layout import RunKeys
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import StoreConfig
from tests.delivery.processes import ROOT, wait_until
from tests.delivery.support import RUN, Prepared, launch_plan

LOST = LostSegment("data", 1, 0, 2)


@dataclass
class Repairing:
    folder: Path
    does: str
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        env = {**os.environ, "DOES": self.does, "SEEN": str(self.seen), "PYTHONPATH": str(ROOT), "A_SECRET": "s"}
        plan = launch_plan(Prepared(MemoryStore(), units=64, length=32))
        self.repairs = Repairs(
            RepairSetup(folder=str(self.folder / "repair"), env=env),
            store=StoreConfig(bucket="b"),
            plan=plan,
            node_rank=1,
            host="h1",
            module="tests.delivery.repairing_program",
            timeout_of=timeout_of if self.timeout_s is None else lambda _: self.timeout_s or 0.0,
        )

    @property
    def seen(self) -> Path:
        return self.folder / "seen"

    def runs(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.seen.read_text().splitlines()] if self.seen.exists() else []

    def pids(self) -> list[int]:
        return [*(run["pid"] for run in self.runs()), int(Path(f"{self.seen}.child").read_text())]


def is_gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "\nState:\tZ" in status.read_text()


def test_the_program_is_told_which_segment_in_a_file_that_only_its_user_reads(tmp_path: Path) -> None:
    repairing = Repairing(tmp_path, "well")
    repairing.repairs.repair(LOST, "it is gone")
    (run,) = repairing.runs()
    given = run["given"]
    assert run["mode"] == 0o600
    assert (given["loader"], given["epoch"], given["stream"], given["n"]) == ("data", 1, 0, 2)
    assert (given["run"], given["plan"], given["generation"]) == (RUN, RunKeys(RUN).plan, 2001)
    assert not (tmp_path / "repair").exists()
    (note,) = repairing.repairs.notes
    assert note.startswith("segment 2 of epoch 1 of loader 'data' was lost (it is gone); host h1 prepared it again in")


def test_those_who_lack_a_segment_at_once_have_it_prepared_once(tmp_path: Path) -> None:
    repairing = Repairing(tmp_path, "well")
    start = threading.Barrier(4)

    def lack(_: int) -> None:
        start.wait()
        repairing.repairs.repair(LOST, "it is gone")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lack, range(4)))
    assert len(repairing.runs()) == 1


def test_a_segment_that_is_lost_again_and_again_is_given_up(tmp_path: Path) -> None:
    repairing = Repairing(tmp_path, "well")
    for _ in range(3):
        repairing.repairs.repair(LOST, "it is gone")
    with pytest.raises(DeliveryError, match=r"is lost \(it is gone\), and host h1 cannot .*again 3 times already"):
        repairing.repairs.repair(LOST, "it is gone")
    assert len(repairing.runs()) == 3


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("die", r"segment 2 of epoch 1 .* is lost .* host h1 cannot prepare it again: its process ended with code 7"),
        ("raise LoaderError", r"host h1 cannot prepare it again: what went wrong\. Start the run anew"),
        ("raise DeliveryError", r"^what went wrong$"),
    ],
)
def test_a_program_that_fails_is_an_error_that_says_why(tmp_path: Path, does: str, message: str) -> None:
    repairing = Repairing(tmp_path, does)
    with pytest.raises(DeliveryError, match=message):
        repairing.repairs.repair(LOST, "it is gone")
    assert repairing.repairs.notes == []
    assert not (tmp_path / "repair").exists()


def test_a_program_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    repairing = Repairing(tmp_path, "hang", timeout_s=2.0)
    with pytest.raises(DeliveryError, match="it takes longer than 2 s"):
        repairing.repairs.repair(LOST, "it is gone")
    wait_until(lambda: all(is_gone(pid) for pid in repairing.pids()))


def test_closing_ends_what_is_under_way_and_lets_nothing_begin(tmp_path: Path) -> None:
    repairing = Repairing(tmp_path, "hang")
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(repairing.repairs.repair, LOST, "it is gone")
        wait_until(lambda: Path(f"{repairing.seen}.child").exists())
        repairing.repairs.close()
        assert isinstance(failing.exception(20), DeliveryError)
    wait_until(lambda: all(is_gone(pid) for pid in repairing.pids()))
    with pytest.raises(DeliveryError, match="the feeder ends"):
        repairing.repairs.repair(LOST, "it is gone")
    assert len(repairing.runs()) == 1
    assert not (tmp_path / "repair").exists()


def test_a_stream_has_the_time_to_be_read_again_up_to_the_segment() -> None:
    by_index = Prepared(MemoryStore(), units=10_000, length=1000).plan
    in_sequence = Prepared(MemoryStore(), units=10_000, length=1000, known_length=False).plan
    assert timeout_of(by_index) == pytest.approx(600 + 10 * 0.01 * 32)
    assert timeout_of(in_sequence) == pytest.approx(600 + 10 * 0.01 * 10_000)


# --- records ---------------------------------------------------------------------------------------------------------


class Watched:
    def __init__(self) -> None:
        self.store, self.now = MemoryStore(), 0.0
        plan = Prepared(self.store, units=64, length=32).plan
        self._watch = RecordWatch(self.store, RUN, plan, patience_s=30, clock=lambda: self.now)

    def prepared(self) -> None:
        self.store.put(RunKeys(RUN).prepared("data", 0), b"")

    def at(self, seconds: float, found: int = 0) -> list[LostSegment]:
        self.now = seconds
        return self._watch.lost(found=found, awaited=[LOST])


def test_a_record_that_does_not_come_is_lost_only_when_the_loader_is_prepared() -> None:
    watched = Watched()
    assert watched.at(31) == []
    watched.prepared()
    assert watched.at(62) == [LOST]
    assert watched.at(63) == []  # it is told again only when it is still missing long after
    assert watched.at(93) == [LOST]


def test_records_that_come_are_waited_for() -> None:
    watched = Watched()
    watched.prepared()
    assert watched.at(29) == []
    assert watched.at(40, found=3) == []
    assert watched.at(69) == []
    assert watched.at(71) == [LOST]
