"""Pieces of logs in the store while ranks write, and what their readers get."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from taas.errors import RequestError, StoreUnavailable
from taas_tasks.launch import live_logs
from taas_tasks.launch.live_logs import LiveLogs, interval_s, piece_bytes
from taas_tasks.layout import RunKeys
from taas_tasks.rank_logs import LogPart, read_logs
from taas_tasks.result_values import NodeResult
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import PlacedJob, Placement, Plan

RUN, KEYS = "run", RunKeys("run")


class Scene:
    """Two nodes of two ranks, whose logs are files, on a clock of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.store = CountingStore()
        self.folder = folder
        self.now = 100.0
        given: dict[str, Any] = {"run": RUN, "run_id": "r", "project": "p", "snapshot": "s", "loaders": {}, "seed": 0}
        given |= {"randomness": "element", "remainder": "pad", "flavor": "g2.8", "nnodes": 2, "nproc_per_node": 2}
        self.store.put(KEYS.plan, Plan(**given, cpus=4).to_bytes())
        self.try_to_train(1)

    def try_to_train(self, generation: int) -> None:
        self.generation = generation
        jobs = [PlacedJob(host=host, job_id=host) for host in ("h0", "h1")]
        placed = Placement(task_id="train", generation=generation, flavor="g2.8", jobs=jobs, asked_at=0)
        self.store.put(KEYS.placement("train", -1), placed.to_bytes())
        self.nodes = [self.live(0, 0, 1), self.live(1, 2, 3)]

    def live(self, node_rank: int, *ranks: int) -> LiveLogs:
        return LiveLogs(
            self.store,
            run=RUN,
            generation=self.generation,
            node_rank=node_rank,
            host=f"h{node_rank}",
            logs={rank: self.log(rank) for rank in ranks},
            clock=lambda: self.now,
        )

    def log(self, rank: int) -> Path:
        return self.folder / f"g{self.generation}-{rank}.log"

    def write(self, rank: int, data: bytes) -> None:
        with self.log(rank).open("ab") as log:
            log.write(data)

    def look(self, *, after_s: float = 100.0, final: bool = False) -> list[bool]:
        self.now += after_s
        return [node.put_new(final=final) for node in self.nodes]

    def end(self, rank: int, *, ok: bool = True) -> None:
        """What the node of a rank does at its end."""
        self.nodes[rank // 2].stop()
        self.store.put_file(KEYS.rank_log(self.generation, rank), self.log(rank))
        self.put_results(ok=ok)

    def put_results(self, *, ok: bool) -> None:
        for node_rank in (0, 1):
            result = NodeResult(node_rank=node_rank, host="h", generation=self.generation, ok=ok, ranks=[])
            self.store.put(KEYS.node_result(self.generation, node_rank), result.to_bytes())

    def read(self, rank: int | None = None, cursor: str = "") -> LogPart:
        return read_logs(self.store, RUN, rank=rank, cursor=cursor)

    def read_all(self, rank: int | None = None, cursor: str = "") -> tuple[str, LogPart]:
        """Read as a follower does, to the present end."""
        text = ""
        while True:
            part = self.read(rank, cursor)
            text += "".join(one.text for one in part.texts)
            if part.cursor == cursor:
                return text, part
            cursor = part.cursor


class CountingStore(MemoryStore):
    """Counts what is put, and is down when it is told so; a reply is lost when it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.num_puts = 0
        self.trouble: str | None = None

    def put(self, key: str, data: Any) -> None:
        self.num_puts += 1
        if self.trouble != "down":
            super().put(key, data)
        if self.trouble is not None:
            raise StoreUnavailable(f"the store is {self.trouble}")


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_piece_has_the_new_lines_of_all_ranks_and_nothing_new_costs_nothing(scene: Scene) -> None:
    scene.write(0, b"zero\nunfini")
    scene.write(1, "eins ü\n".encode())
    assert scene.look() == [True, False]
    before = scene.store.num_puts
    assert scene.look(after_s=1) == [False, False]
    scene.write(1, b"more\n")
    assert scene.look(after_s=0.5) == [False, False]  # not due yet
    assert scene.look() == [True, False]
    assert scene.store.num_puts == before + 1
    assert scene.read_all(0)[0] == "zero\nunfini"  # it has waited for its end
    assert scene.read_all(1)[0] == "eins ü\nmore\n"


def test_all_ranks_are_read_together_each_with_its_host(scene: Scene) -> None:
    for rank in range(4):
        scene.write(rank, f"I am {rank}\n".encode())
    scene.look()
    part = scene.read()
    assert [(one.host, one.rank, one.text) for one in part.texts] == [
        ("h0", 0, "I am 0\n"), ("h0", 1, "I am 1\n"), ("h1", 2, "I am 2\n"), ("h1", 3, "I am 3\n"),
    ]  # fmt: skip
    scene.write(2, b"more\n")
    scene.look()
    assert [(one.rank, one.text) for one in scene.read(cursor=part.cursor).texts] == [(2, "more\n")]


def test_a_last_line_without_an_end_is_shown_after_seconds_and_no_character_is_cut(scene: Scene) -> None:
    scene.write(0, "lösch".encode()[:2])
    assert scene.look() == [False, False]
    assert scene.look(after_s=2) == [False, False]
    assert scene.look(after_s=2) == [True, False]
    assert scene.read_all(0)[0] == "l"
    scene.write(0, "lösch".encode()[2:])
    scene.look()
    scene.look()
    assert scene.read_all(0)[0] == "lösch"


@pytest.mark.parametrize("trouble", ["down", "answering too late"])
def test_a_store_in_trouble_delays_and_loses_nothing(scene: Scene, trouble: str) -> None:
    scene.write(0, b"one\n")
    scene.store.trouble = trouble
    with pytest.raises(StoreUnavailable):
        scene.look()
    early = scene.read_all(0)
    scene.write(0, b"two\n")
    with pytest.raises(StoreUnavailable):
        scene.look()
    scene.store.trouble = None
    scene.look()
    scene.look()
    assert scene.read_all(0)[0] == "one\ntwo\n"
    assert early[0] + scene.read_all(0, early[1].cursor)[0] == "one\ntwo\n"


def test_the_thread_goes_on_when_the_store_is_back_and_stops_soon_when_it_is_not(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    live = LiveLogs(scene.store, run=RUN, generation=1, node_rank=0, host="h0", logs={0: scene.log(0)}, period_s=0.01)
    scene.store.trouble = "down"
    live.start()
    scene.write(0, b"one\n")
    deadline = time.monotonic() + 5
    while scene.store.num_puts < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert scene.read_all(0)[0] == ""
    scene.store.trouble = None
    while not scene.read_all(0)[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert scene.read_all(0)[0] == "one\n"
    assert len(caplog.records) == 1 and "for now" in caplog.text
    scene.write(0, b"two")
    scene.store.trouble = "down"
    began = time.monotonic()
    live.stop()
    assert time.monotonic() - began < 2


def test_a_follower_goes_on_in_the_whole_log_where_the_last_pieces_are_missing(scene: Scene) -> None:
    scene.write(0, b"one\n")
    scene.look()
    text, part = scene.read_all(0)
    scene.write(0, b"two\nend")
    scene.store.put_file(KEYS.rank_log(1, 0), scene.log(0))
    scene.put_results(ok=True)
    more, last = scene.read_all(0, part.cursor)
    assert (text + more, last.complete) == ("one\ntwo\nend", True)


def test_a_training_that_ended_well_is_complete_and_one_that_failed_may_be_tried_again(scene: Scene) -> None:
    for rank in range(4):
        scene.write(rank, f"{rank} begins\n".encode())
    scene.look()
    early = scene.read_all()[1].cursor
    scene.write(2, b"last without end")
    scene.end(2, ok=False)
    text, part = scene.read_all(cursor=early)
    assert (text, part.complete) == ("last without end", False)
    alone = scene.read_all(2)
    assert (alone[0], alone[1].complete) == ("2 begins\nlast without end", False)
    scene.try_to_train(2)
    scene.write(2, b"again\n")
    scene.look()
    scene.end(2)
    for rank, cursor in ((None, part.cursor), (2, alone[1].cursor)):
        text, last = scene.read_all(rank, cursor)
        assert (text, last.complete) == ("[taas] try 2 of the training\nagain\n", True)
    assert scene.read_all(2)[0] == "again\n"


def test_a_flood_is_bounded_hides_no_other_rank_and_says_what_is_left_out(scene: Scene) -> None:
    line = b"x" * 999 + b"\n"
    scene.write(0, line * 20_000)
    scene.write(1, b"not hidden\n")
    scene.look()
    assert scene.read_all(1)[0] == "not hidden\n"
    text = scene.read_all(0)[0]
    _, told, shown = text.split("\n", 2)
    left_out = int(told.split()[1])
    assert "left out" in told and left_out + len(shown) == 20_000_000
    assert set(shown.splitlines()) == {"x" * 999}
    assert len(shown) <= live_logs._PIECE_BYTES // 2
    scene.end(0)
    whole = scene.read_all(0)[0]
    assert len(whole) == 20_000_000


def test_what_is_left_at_the_end_is_put_whole(scene: Scene) -> None:
    text = "".join(f"{number} ünfinished; " for number in range(80_000))
    scene.write(3, text.encode())
    scene.nodes[1].stop()
    assert scene.read_all(3)[0] == text


def test_bytes_that_are_no_text_are_shown_somehow(scene: Scene) -> None:
    scene.write(0, b"\xff\xfe\x80\n\xe2\x82")
    scene.nodes[0].stop()
    assert scene.read_all(0)[0] == "\ufffd\ufffd\ufffd\n\ufffd"


def test_pieces_are_few_and_bounded_however_long_a_training_runs() -> None:
    age_s, num_pieces, total_bytes = 0.0, 0, 0
    while age_s < 86_400:
        age_s += interval_s(age_s)
        total_bytes += piece_bytes(total_bytes)
        num_pieces += 1
    assert interval_s(0) == 2 and interval_s(1e6) == 15
    assert num_pieces < 6000 and total_bytes < 600 << 20


def test_a_rank_that_there_is_not_is_refused(scene: Scene) -> None:
    with pytest.raises(RequestError, match="there is no rank 4; the ranks of run 'r': 0 to 3"):
        scene.read(4)


def test_a_run_that_has_not_begun_to_train_has_no_logs() -> None:
    assert read_logs(MemoryStore(), RUN, rank=None, cursor="") == LogPart((), "", complete=False)
