from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from taas_tasks.stack import processes
from taas_tasks.stack.ports import free_port, is_free, is_listening
from taas_tasks.stack.processes import ProcessId

IGNORES_TERM = (
    "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[ProcessId]]:
    """What a test starts; killed when it ends."""
    found: list[ProcessId] = []
    yield found
    for process in found:
        processes.stop(process, grace_s=0)


def start(folder: Path, *argv: str, **env: str) -> ProcessId:
    return processes.start(list(argv), env={"PATH": "/usr/bin:/bin", **env}, log=folder / "log", cwd=folder)


def test_a_process_is_known_by_its_start_time_too(tmp_path: Path, started: list[ProcessId]) -> None:
    started.append(start(tmp_path, "sleep", "600"))
    assert started[0].is_alive()
    other = ProcessId(started[0].pid, started[0].started_ticks + 1)
    assert not other.is_alive()
    other.send(signal.SIGKILL)
    assert started[0].is_alive()


def test_a_zombie_is_not_alive_and_is_reaped(tmp_path: Path) -> None:
    process = start(tmp_path, "true")
    assert processes.wait_until(lambda: not process.is_alive(), timeout_s=30)
    assert Path(f"/proc/{process.pid}").exists()
    processes.reap(process.pid)
    assert not Path(f"/proc/{process.pid}").exists()


def test_a_process_that_ignores_term_is_killed_after_the_grace(tmp_path: Path, started: list[ProcessId]) -> None:
    process = start(tmp_path, sys.executable, "-c", IGNORES_TERM)
    started.append(process)
    assert processes.wait_until(lambda: "ready" in processes.tail(tmp_path / "log"), timeout_s=30)
    begun = time.monotonic()
    processes.stop(process, grace_s=0.3)
    assert time.monotonic() - begun >= 0.3
    assert not process.is_alive()


def test_a_process_is_found_by_its_mark_also_when_orphaned(tmp_path: Path, started: list[ProcessId]) -> None:
    shell = start(tmp_path, "sh", "-c", "sleep 600 & sleep 600 & exit 0", TAAS_STACK="m1")
    started.append(shell)
    assert processes.wait_until(lambda: not shell.is_alive(), timeout_s=30)
    started.append(start(tmp_path, "sleep", "600", TAAS_STACK="m12"))
    found = processes.marked({b"TAAS_STACK=m1"})
    started.extend(found)
    assert len(found) == 2
    assert processes.kill_all(lambda: processes.marked({b"TAAS_STACK=m1"})) == 2
    assert processes.marked({b"TAAS_STACK=m1"}) == []
    assert processes.marked({b"TAAS_STACK=m12"}) == [started[1]]


def test_the_guard_ends_its_command_when_the_parent_is_killed(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "argv = [sys.executable, '-I', '-m', 'taas_tasks.stack.guard', '/bin/sleep', '600']\n"
        "print(subprocess.Popen(argv).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        guarded = ProcessId.of(int(parent.stdout.readline()))
        assert guarded is not None
        assert processes.wait_until(lambda: processes.arguments(guarded.pid)[:1] == [b"/bin/sleep"], timeout_s=30)
    finally:
        parent.kill()
        parent.communicate()
    assert processes.wait_until(lambda: not guarded.is_alive(), timeout_s=30)


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {n}\n" for n in range(5000)))
    assert processes.tail(tmp_path / "log", num_lines=2) == "line 4998\nline 4999"
    assert processes.tail(tmp_path / "none") == "(no log)"


def test_a_port_in_use_is_not_given_out() -> None:
    taken: set[int] = set()
    port = free_port(taken=taken)
    assert port in taken
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        assert not is_free(port)
        assert not is_listening(port)
        server.listen()
        assert is_listening(port)
    assert free_port(taken=taken, companion=10_000) + 10_000 in taken


def test_this_process_is_never_among_those_found() -> None:
    assert ProcessId.of(os.getpid()) not in processes.matching(lambda _: True)
