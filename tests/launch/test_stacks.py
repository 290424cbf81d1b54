from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from taas_tasks.launch.stacks import Frame, main_thread, place_of, take

PROJECT = Path("/run/project")
TORCH = "/venv/site-packages/torch"
OUTER = [Frame("/engine/rank_main.py", "60", "main"), Frame(f"{TORCH}/distributed/elastic/api.py", "1", "_wrap")]
COLLECTIVES = f"{TORCH}/distributed/distributed_c10d.py"


def user(line: str = "17", name: str = "data.py") -> Frame:
    return Frame(f"{PROJECT}/{name}", line, "read")


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ([], "sat in user code at data.py:17 (read)"),
        (
            [Frame("/usr/lib/python3.11/ssl.py", "5", "recv")],
            "sat in user code at data.py:17 (read), inside recv of ssl.py",
        ),
        (
            [Frame(COLLECTIVES, "3", "all_reduce"), Frame(f"{TORCH}/distributed/c10d_logger.py", "1", "wrapper")],
            "waited in all_reduce at data.py:17 (read)",
        ),
        (
            [Frame(COLLECTIVES, "3", "broadcast"), Frame(COLLECTIVES, "9", "broadcast_object_list")],
            "waited in broadcast_object_list at data.py:17 (read)",
        ),
        (
            [Frame(f"{TORCH}/autograd/graph.py", "3", "_engine_run_backward"), Frame(f"{TORCH}/_tensor.py", "1", "b")],
            "waited in backward (DDP's all_reduce) at data.py:17 (read)",
        ),
    ],
)
def test_a_place_is_the_users_line_and_the_collective_below_it(inner: list[Frame], expected: str) -> None:
    assert place_of([*inner, user(), user("3", "train.py"), *OUTER], PROJECT).sentence() == expected


def test_a_captured_cells_lines_are_the_users() -> None:
    assert place_of([Frame("<taas cell>", "4", "<module>"), *OUTER], PROJECT).where == "<taas cell>:4 (<module>)"


def test_a_rank_that_does_not_answer_is_at_an_unknown_place() -> None:
    assert "did not answer" in place_of([], PROJECT).sentence()


SCRIPT = """
import pathlib, sys, threading, time
from taas_tasks.launch import stacks
stacks.answer(pathlib.Path(sys.argv[1]))
threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
def read():
    print("ready", flush=True)
    time.sleep(300)
read()
"""


def test_a_living_process_gives_the_stacks_of_all_its_threads_and_the_main_one_is_known(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        found = take({5: process.pid}, {5: path}, within_s=20)
        process.poll()
        assert process.returncode is None
    finally:
        process.kill()
        process.communicate()
    assert found[5].count("most recent call first") == 2
    assert [frame.function for frame in main_thread(found[5])] == ["read", "<module>"]


def test_a_process_that_is_gone_gives_nothing(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert take({0: ended.pid}, {0: tmp_path / "stacks"}, within_s=0.1) == {}
