from __future__ import annotations

import io
import time
from pathlib import Path

from taas_tasks.launch.logs import LogMerger, tail_of


def test_every_line_has_host_and_rank_and_nothing_is_lost(tmp_path: Path) -> None:
    logs = {rank: tmp_path / f"{rank}.log" for rank in (3, 0)}
    out = io.BytesIO()
    merger = LogMerger(logs, host="h1", out=out, period_s=0.01)
    merger.start()
    with logs[0].open("a") as zero, logs[3].open("a") as three:
        for number in range(100):
            zero.write(f"zero {number}\n")
            three.write(f"three {number}\nlast without end" if number == 99 else f"three {number}\n")
            zero.flush()
    merger.stop()
    lines = out.getvalue().decode().splitlines()
    assert [line for line in lines if " r0] " in line] == [f"[h1 r0] zero {number}" for number in range(100)]
    assert [line for line in lines if " r3] " in line][-2:] == ["[h1 r3] three 99", "[h1 r3] last without end"]
    assert len(lines) == 201


def test_the_log_of_another_process_is_shown_by_its_name(tmp_path: Path) -> None:
    out = io.BytesIO()
    for name in ("rank", "feeder"):
        (tmp_path / name).write_text(f"{name} says\n")
    merger = LogMerger({4: tmp_path / "rank"}, host="h", out=out, others={"feeder": tmp_path / "feeder"})
    merger.stop()
    assert out.getvalue() == b"[h r4] rank says\n[h feeder] feeder says\n"


def test_lines_are_shown_while_the_rank_still_writes(tmp_path: Path) -> None:
    log, out = tmp_path / "0.log", io.BytesIO()
    merger = LogMerger({0: log}, host="h", out=out, period_s=0.01)
    merger.start()
    log.write_text("first\nsecond unfini")
    deadline = time.monotonic() + 5
    while b"second" not in out.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    merger.stop()
    assert out.getvalue() == b"[h r0] first\n[h r0] second unfini\n"


def test_progress_bar_is_one_line_as_a_terminal_shows_it(tmp_path: Path) -> None:
    log, out = tmp_path / "0.log", io.BytesIO()
    log.write_bytes(b"\r10%\r50%\r100%\nnext\n")
    merger = LogMerger({0: log}, host="h", out=out)
    merger.stop()
    assert out.getvalue() == b"[h r0] 100%\n[h r0] next\n"


def test_tail_is_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    log.write_text("x" * 5000 + "end")
    assert tail_of(log, num_bytes=4) == "xend"
    assert tail_of(tmp_path / "none") == ""
