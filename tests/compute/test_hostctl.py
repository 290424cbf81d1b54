"""The verbs where they need more than one look: crashes between steps, queues, what a bare host needs."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from taas.errors import HostUnreachable, LaunchError
from taas_tasks.compute import hostctl, jobs
from taas_tasks.compute.local import LocalTransport
from taas_tasks.compute.piped import ProcessTransport
from taas_tasks.compute.transport import HOST_FILES
from taas_tasks.layout import HostPaths
from tests.compute.hosts import EmulatedHost, is_alive, until

FOREVER = "sleep 1000"
HOSTCTL = [sys.executable, "-I", "-S", hostctl.__file__]


def test_the_next_taker_reaps_an_unclean_predecessor(host: EmulatedHost):
    host.transport.call("slot_take", {"num_slots": 1, "owner": "job", "hold_s": 0})
    host.sh(f"setsid sh -c 'echo $$ > daemon; {FOREVER}; true' & {FOREVER}")
    daemon = int(host.text("daemon"))
    os.kill(host.supervisor(), signal.SIGKILL)
    until(lambda: host.state().phase == "lost")
    assert host.transport.call("slot_take", {"num_slots": 1, "owner": "next", "hold_s": 60})["taken"]
    assert not is_alive(daemon)
    assert host.state().phase == "tombstone"


def test_a_hold_outlives_a_lost_job(host: EmulatedHost):
    host.transport.call("slot_take", {"num_slots": 1, "owner": "job", "hold_s": 60})
    host.sh(FOREVER)
    os.kill(host.supervisor(), signal.SIGKILL)
    until(lambda: host.state().phase == "lost")
    assert not host.transport.call("slot_take", {"num_slots": 1, "owner": "next", "hold_s": 60})["taken"]
    assert host.state().phase == "lost"


def test_holds_and_tickets_of_another_boot_are_void_but_a_live_job_is_not(host: EmulatedHost):
    host.transport.call("slot_take", {"num_slots": 2, "owner": "job", "hold_s": 60})
    host.transport.call("slot_take", {"num_slots": 2, "owner": "held", "hold_s": 60})
    host.transport.call("slot_take", {"num_slots": 2, "owner": "waits", "hold_s": 60})
    host.sh(FOREVER)
    path = host.root / "slots" / "table.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": "another"}))
    assert host.transport.call("slot_take", {"num_slots": 2, "owner": "new", "hold_s": 60}) == {
        "taken": True,
        "slot": 1,
    }
    assert [slot["owner"] for slot in host.transport.call("slots", {})["slots"]] == ["job", "new"]


def test_a_supervisor_that_cannot_be_started_is_said_and_the_job_can_be_started_later(tmp_path: Path):
    with pytest.raises(LaunchError, match="/no/python"):
        EmulatedHost(LocalTransport(tmp_path, python="/no/python"), tmp_path).sh("true")
    host = EmulatedHost(LocalTransport(tmp_path), tmp_path)
    assert host.state().phase == "absent"
    host.sh("exit 6")
    assert host.ended().exit_code == 6


def test_a_supervisor_that_dies_before_the_job_began_is_quoted(tmp_path: Path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'no module named json' >&2; exit 9\n")
    fake.chmod(0o755)
    with pytest.raises(LaunchError, match="ended with 9 before the job began; it said: no module named json"):
        EmulatedHost(LocalTransport(tmp_path / "host", python=str(fake)), tmp_path / "host").sh("true")


def test_a_folder_that_cannot_be_used_is_an_unreachable_host(tmp_path: Path):
    (tmp_path / "file").touch()
    for kind in (LocalTransport, ProcessTransport):
        with pytest.raises(HostUnreachable):
            EmulatedHost(kind(tmp_path / "file"), tmp_path / "file").sh("true")


def test_a_root_by_another_name_is_the_same_host(host: EmulatedHost, tmp_path: Path):
    host.sh(FOREVER)
    (tmp_path / "alias").symlink_to(host.root)
    alias = LocalTransport(tmp_path / "alias")
    os.kill(host.supervisor(), signal.SIGKILL)
    until(lambda: jobs.state(alias, "job").phase == "lost")
    assert jobs.declare_lost(alias, "job").phase == "tombstone"
    assert host.pids() == []


def test_a_program_of_the_users_that_floods_the_wake_pipe_harms_nothing(host: EmulatedHost):
    host.sh("head -c 200000 /dev/zero > wake; exit 5")
    assert host.ended().exit_code == 5


@pytest.mark.parametrize("delay_s", [0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15])
def test_starters_killed_at_any_moment_launch_at_most_once(host: EmulatedHost, delay_s: float):
    script = f"echo x >> launches; {FOREVER}"
    payload = {"job_id": "job", "owner": "o", "argv": ["/bin/sh", "-c", script], "kill_grace_s": 1}
    request = json.dumps({"root": str(host.root), "python": sys.executable, "payload": payload}).encode()
    starters = [
        subprocess.Popen([*HOSTCTL, "start"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) for _ in range(3)
    ]
    for starter in starters:
        assert starter.stdin is not None
        starter.stdin.write(request)
        starter.stdin.close()
    time.sleep(delay_s)
    for starter in starters:
        starter.kill()
        starter.wait()
    assert host.sh(script).lives  # one that a killed starter began may be about to launch
    until(lambda: host.state().phase == "running")
    assert host.text("launches") == "x\n"
    time.sleep(0.2)
    assert host.text("launches") == "x\n"


def test_folders_are_those_of_the_layout(host: EmulatedHost):
    host.sh("true")
    host.transport.call("slot_take", {"num_slots": 1, "owner": "job", "hold_s": 60})
    paths = HostPaths(host.root)
    assert paths.job("job") == host.folder() and host.folder().is_dir()
    assert paths.slots.is_dir()


# ---- a bare host ----


def test_the_files_alone_run_a_job(tmp_path: Path):
    for path in HOST_FILES:
        shutil.copy(path, tmp_path)
    command = [sys.executable, "-I", "-S", str(tmp_path / "hostctl.py")]
    host = EmulatedHost(ProcessTransport(tmp_path / "host", command=command), tmp_path / "host")
    host.sh("echo hello")
    assert host.ended().succeeded
    assert jobs.log(host.transport, "job").text == "hello\n"


def imported_by(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("path", HOST_FILES, ids=lambda path: path.stem)
def test_what_a_host_runs_is_old_python_and_the_standard_library_only(path: Path):
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    beside = {other.stem for other in HOST_FILES}
    assert imported_by(tree) <= set(sys.stdlib_module_names) | beside | {"taas_tasks"}


def test_in_package_form_is_only_imported_inside_the_package(tmp_path: Path):
    for path in HOST_FILES:
        shutil.copy(path, tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import hostctl; print('taas_tasks' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_a_call_is_quick(host: EmulatedHost):
    host.sh(FOREVER)
    began = time.monotonic()
    for _ in range(20):
        host.state()
    assert (time.monotonic() - began) / 20 < 0.05
