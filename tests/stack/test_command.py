from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from taas_tasks.stack import Stack, airflow_processes


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "taas_tasks.stack", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def test_the_status_of_a_stack_that_was_never_started_says_so(tmp_path: Path) -> None:
    done = run("status", "--root", str(tmp_path / "root"), "--json")
    assert done.returncode == 1
    assert {part["problem"] for part in json.loads(done.stdout)} == {"it was not started"}
    assert not (tmp_path / "root").exists()


def test_down_of_a_stack_that_was_never_started_is_fine(tmp_path: Path) -> None:
    done = run("down", "--root", str(tmp_path / "root"))
    assert (done.returncode, done.stdout) == (0, "stopped\n")


def test_a_state_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    done = run("status", "--root", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path}/state.json cannot be read")
    assert "Traceback" not in done.stderr


def answer(beat: str | None, *, status: str = "healthy") -> dict[str, object]:
    return {
        "metadatabase": {"status": "healthy"},
        "dag_processor": {"status": status, "latest_dag_processor_heartbeat": beat},
    }


def test_only_a_heartbeat_behind_the_start_counts() -> None:
    reason = airflow_processes.unhealthy_reason
    beat = "2026-01-01T00:00:10+00:00"  # unix 1767225610
    assert reason("dag-processor", answer(beat), since=1767225609.0) is None
    assert reason("dag-processor", answer(beat), since=1767225611.0) == "no heartbeat since its start"
    assert reason("dag-processor", answer(None), since=0.0) == "no heartbeat yet"
    assert "last heartbeat" in str(reason("dag-processor", answer(beat, status="unhealthy"), since=0.0))
    assert reason("api-server", None, since=0.0) == "the api-server does not answer"


def test_an_inventory_that_is_wrong_is_one_clear_line_and_nothing_starts(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    for text, fault in (
        (None, f"error: the inventory {hosts} cannot be read: No such file or directory"),
        ('[{"name": "a"}]', "error: the inventory is wrong: host 'a' flavor: Field required"),
    ):
        if text is not None:
            hosts.write_text(text)
        done = run("up", "--root", str(tmp_path / "root"), "--inventory", str(hosts))
        assert done.returncode == 1
        assert done.stderr.startswith(fault)
    assert not (tmp_path / "root").exists()


def test_only_the_connections_that_the_inventory_names_come_from_the_environment(tmp_path: Path) -> None:
    root = tmp_path / "root"
    hosts = tmp_path / "hosts.json"
    host = {"name": "a", "flavor": "c1.4", "transport": "ssh", "root": "/srv", "python": "/p", "connection_id": "far"}
    hosts.write_text(json.dumps([host]))
    Stack(root).up(parts=())
    env = {**os.environ, "AIRFLOW_CONN_FAR": "ssh://u@h", "AIRFLOW_CONN_OTHER": "ssh://u@i"}
    argv = [sys.executable, "-m", "taas_tasks.stack", "env", "--root", str(root), "--inventory", str(hosts)]
    printed = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env).stdout
    assert "export AIRFLOW_CONN_FAR=ssh://u@h\n" in printed
    assert "AIRFLOW_CONN_OTHER" not in printed
    assert '"name": "a"' in printed
