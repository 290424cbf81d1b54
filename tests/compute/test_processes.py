from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from taas_tasks.compute.processes import (
    Process,
    descendants,
    end_processes,
    oom_kills,
    read_json,
    read_process,
    send_signal,
    try_lock,
    unlock,
    write_json,
)


def process(pid: int, ppid: int) -> Process:
    return Process(pid, ppid=ppid, group=pid, start=0, lives=True)


def test_descendants_are_found_at_any_depth():
    table = {pid: process(pid, ppid) for pid, ppid in [(2, 1), (3, 2), (4, 3), (5, 1), (6, 5), (7, 4)]}
    assert descendants(table, [2]) == {3, 4, 7}
    assert descendants(table, [3, 5]) == {4, 6, 7}
    assert descendants(table, [99]) == set()


def test_a_process_with_a_hostile_name_is_read(tmp_path: Path):
    program = tmp_path / "a) Z 1 (b"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "1000"])
    try:
        found = read_process(child.pid)
        assert found is not None
        assert (found.pid, found.ppid, found.lives) == (child.pid, os.getpid(), True)
    finally:
        child.kill()
        child.wait()
    assert read_process(child.pid) is None


def test_a_zombie_does_not_live():
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    found = read_process(child.pid)
    child.wait()
    assert found is not None and not found.lives


def test_a_pid_that_was_reused_is_not_signalled():
    child = subprocess.Popen(["sleep", "1000"])
    try:
        found = read_process(child.pid)
        assert found is not None
        assert send_signal(found._replace(start=found.start - 1), 9)
        assert child.poll() is None
        assert send_signal(found, 9)
        assert child.wait(timeout=10) == -9
    finally:
        child.kill()
        child.wait()


def test_what_does_not_die_in_time_is_returned():
    immortal = process(2**22 + 1, 1)  # there is no such process: signals reach nobody
    assert end_processes(lambda: [immortal], grace_s=0, limit_s=0.1) == [immortal]


def test_a_lock_is_held_by_one_only_and_shared_by_probers(tmp_path: Path):
    path = tmp_path / "lock"
    first = try_lock(path, wait_s=0)
    assert first is not None
    assert try_lock(path, wait_s=0) is None
    threading.Timer(0.2, unlock, [first]).start()
    second = try_lock(path, wait_s=10, shared=True)
    third = try_lock(path, wait_s=0, shared=True)
    assert second is not None and third is not None
    assert try_lock(path, wait_s=0) is None
    unlock(second)
    unlock(third)


def test_a_json_file_is_closed_to_others_and_leaves_no_temporary(tmp_path: Path):
    path = tmp_path / "a.json"
    write_json(path, {"a": "ö"})
    write_json(path, {"a": 2})
    assert read_json(path) == {"a": 2}
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TypeError):
        write_json(path, object())
    with pytest.raises(OSError):
        write_json(tmp_path / "missing" / "a.json", {})


def test_a_json_file_that_is_none_is_empty(tmp_path: Path):
    (tmp_path / "half").write_text('{"a":')
    (tmp_path / "list").write_text("[1]")
    assert [read_json(tmp_path / name) for name in ("half", "list", "missing")] == [{}, {}, {}]


def test_counters_of_kills_for_memory_are_read_from_either_kind_of_cgroup(tmp_path: Path):
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert oom_kills(tmp_path) == {}
    write("proc/vmstat", "pgfault 1\noom_kill 7\n")
    write("proc/self/cgroup", "0::/jobs/a\n")
    assert oom_kills(tmp_path) == {"machine": 7}
    write("sys/fs/cgroup/jobs/a/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills(tmp_path) == {"machine": 7, "cgroup": 2}
    write("proc/self/cgroup", "5:memory:/jobs/b\n4:cpu,cpuacct:/\n0::/\n")
    write("sys/fs/cgroup/memory/jobs/b/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert oom_kills(tmp_path) == {"machine": 7, "cgroup": 4}
