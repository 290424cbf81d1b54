"""The life and the death of jobs, with real processes."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from taas_tasks.compute import jobs, supervisor
from taas_tasks.compute.processes import write_json
from tests.compute.hosts import EmulatedHost, is_alive, until

FOREVER = "sleep 1000"
HOSTILE = [
    "; touch x",
    "$(touch x)",
    "`touch x`",
    "a\nb\tc",
    "'\"\\",
    "добро 世界 🚂",
    "-rf",
    "*",
    "",
    "%s {0}",
    "\x1b[31m\x7f",
]


def pids_in(text: str) -> list[int]:
    return [int(word) for word in text.split()]


# ---- how it ends ----


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_an_exit_code_is_reported(host: EmulatedHost, code: int):
    host.sh(f"exit {code}")
    state = host.ended()
    assert (state.exit_code, state.signal, state.ended_by) == (code, None, "exit")
    assert not state.killed_by_kernel_suspected
    assert state.succeeded == (code == 0)


def test_a_signal_is_reported(host: EmulatedHost):
    host.sh("kill -SEGV $$")
    state = host.ended()
    assert (state.exit_code, state.signal, state.ended_by) == (None, signal.SIGSEGV, "exit")
    assert not state.killed_by_kernel_suspected


@pytest.mark.parametrize("ending", ["kill -KILL $$", "exit 137"])
def test_a_kill_that_was_not_ours_is_suspected_to_be_the_kernels(host: EmulatedHost, ending: str):
    host.sh(ending)
    state = host.ended()
    assert state.ended_by == "exit"
    assert state.killed_by_kernel_suspected


def test_a_command_that_cannot_be_started_has_ended_and_says_why(host: EmulatedHost):
    assert host.submit(["/no/such/program"]).lives in (True, False)
    state = host.ended()
    assert state.exit_code == 127
    assert state.error and "/no/such/program" in state.error
    assert "/no/such/program" in jobs.log(host.transport, "job").text


def test_a_working_directory_that_is_missing_has_ended_the_job(host: EmulatedHost):
    host.sh("true", cwd="/no/such/folder")
    assert host.ended().exit_code == 127


def test_a_job_runs_in_its_folder_or_where_it_is_told(host: EmulatedHost, tmp_path: Path):
    host.sh("pwd; ls")
    host.ended()
    assert jobs.log(host.transport, "job").text.startswith(str(host.folder()))
    host.sh("pwd", job_id="elsewhere", cwd=str(tmp_path))
    host.ended("elsewhere")
    assert jobs.log(host.transport, "elsewhere").text.strip() == str(tmp_path)


def test_times_are_reported(host: EmulatedHost):
    before = time.time()
    host.sh("sleep 0.3")
    state = host.ended()
    assert state.started_at is not None and state.ended_at is not None
    assert before <= state.started_at <= state.ended_at - 0.3 <= time.time()


# ---- every process of it ----


def test_what_a_job_leaves_behind_is_gone_when_it_has_ended(host: EmulatedHost):
    daemon = "setsid sh -c 'echo $$ > daemon; trap \"\" TERM; while :; do sleep 1; done' &"
    cleared = "(env -i setsid sh -c 'echo $$ > cleared; exec sleep 1000' &);"
    host.sh(
        f"{daemon} {cleared} while [ ! -s daemon ] || [ ! -s cleared ]; do sleep 0.02; done; exit 5", kill_grace_s=0.3
    )
    state = host.ended()
    assert (state.exit_code, state.ended_by) == (5, "exit")
    assert not [pid for name in ("daemon", "cleared") for pid in pids_in(host.text(name)) if is_alive(pid)]


def test_a_tree_that_ignores_term_is_killed_after_the_grace(host: EmulatedHost):
    inner = "trap '' TERM; echo $$ >> pids; while :; do sleep 0.1; done"
    host.sh(f'trap \'\' TERM; sh -c "$X" & setsid sh -c "$X" & wait; {FOREVER}', env={"X": inner}, kill_grace_s=0.5)
    until(lambda: len(pids_in(host.text("pids"))) == 2)
    began = time.monotonic()
    jobs.cancel(host.transport, "job", owner="try-1")
    state = host.ended()
    assert (state.ended_by, state.signal) == ("cancel", signal.SIGKILL)
    assert not state.killed_by_kernel_suspected
    assert time.monotonic() - began > 0.4
    assert not [pid for pid in pids_in(host.text("pids")) if is_alive(pid)]


def test_a_job_may_clean_up_within_the_grace(host: EmulatedHost):
    host.sh("trap 'echo bye; exit 3' TERM; echo ready > ready; while :; do sleep 0.05; done", kill_grace_s=10)
    host.text("ready")
    jobs.cancel(host.transport, "job")
    state = host.ended()
    assert (state.ended_by, state.exit_code) == ("cancel", 3)
    assert "bye" in jobs.log(host.transport, "job").text


def test_a_chain_of_forks_faster_than_any_look_is_caught(host: EmulatedHost):
    chain = (
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "hops = os.open('hops', os.O_WRONLY | os.O_CREAT)\n"
        "while True:\n"
        "    if os.fork(): os._exit(0)\n"
        "    os.pwrite(hops, b'%d' % os.getpid(), 0)\n"
    )
    host.submit([sys.executable, "-I", "-S", "-c", chain], kill_grace_s=0.2)
    assert host.ended().ended_by == "exit"
    last = (host.folder() / "hops").read_text()
    time.sleep(0.2)
    assert (host.folder() / "hops").read_text() == last


def test_a_neighbours_job_lives_on(host: EmulatedHost, neighbour: EmulatedHost):
    host.sh(FOREVER, job_id="a")
    host.sh(FOREVER, job_id="a-1")
    neighbour.sh(FOREVER, job_id="a")
    jobs.stop(host.transport, "a", wait_s=5)
    assert host.state("a").phase == "ended"
    for state in (host.state("a-1"), neighbour.state("a")):
        assert state.lives
        assert state.pid is not None and is_alive(state.pid)


# ---- why it is ended ----


def test_a_job_that_runs_too_long_is_ended(host: EmulatedHost):
    host.sh(FOREVER, timeout_s=0.5, kill_grace_s=1)
    state = host.ended()
    assert (state.ended_by, state.signal) == ("timeout", signal.SIGTERM)


def test_a_job_whose_lease_nobody_renews_is_ended(host: EmulatedHost):
    host.sh(FOREVER, lease_s=1, kill_grace_s=1)
    assert host.ended().ended_by == "lease"


def test_a_renewed_lease_keeps_the_job(host: EmulatedHost):
    host.sh(FOREVER, lease_s=1.5, kill_grace_s=1)
    for _ in range(5):
        time.sleep(0.6)
        jobs.renew(host.transport, "job", lease_s=1.5, owner="try-1")
    assert host.state().lives
    assert host.ended().ended_by == "lease"


def test_a_supervisor_told_to_stop_ends_the_job(host: EmulatedHost):
    host.sh(FOREVER, kill_grace_s=1)
    os.kill(host.supervisor(), signal.SIGTERM)
    assert host.ended().ended_by == "shutdown"


def test_a_job_whose_folder_is_removed_ends_before_another_can_run_beside_it(host: EmulatedHost):
    pid = host.sh(FOREVER, kill_grace_s=1).pid
    supervisor_pid = host.supervisor()
    host.folder().rename(host.root / "moved")
    until(lambda: not is_alive(supervisor_pid))
    assert pid is not None and not is_alive(pid)


# ---- when the supervisor is killed ----


def kill_supervisor(host: EmulatedHost, job_id: str = "job") -> None:
    pid = host.supervisor(job_id)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid))


def test_a_job_without_its_supervisor_is_lost_then_reaped_and_never_starts_again(host: EmulatedHost):
    host.sh(f"echo x >> launches; setsid sh -c 'trap \"\" TERM; echo $$ > daemon; {FOREVER}; true' & {FOREVER}")
    daemon = int(host.text("daemon"))
    kill_supervisor(host)
    assert host.state().phase == "lost"
    assert is_alive(daemon)
    assert host.sh("echo x >> launches").phase == "lost"
    state = jobs.declare_lost(host.transport, "job")
    assert state.phase == "tombstone"
    assert state.error and "its supervisor died" in state.error
    assert not is_alive(daemon)
    assert host.pids() == []
    assert host.sh("echo x >> launches").phase == "tombstone"
    assert (host.folder() / "launches").read_text() == "x\n"


def test_a_supervisor_that_comes_late_obeys_the_tombstone(host: EmulatedHost):
    host.sh("true", job_id="pattern")
    jobs.declare_lost(host.transport, "job")
    write_json(
        host.folder() / "spec.json", {"job_id": "job", "argv": ["touch", "x"], "env": {}, "files": {}, "cwd": None}
    )
    done = subprocess.run([sys.executable, "-I", "-S", supervisor.__file__, str(host.folder())], timeout=20)
    assert done.returncode == supervisor.LOST_THE_LOCK
    assert host.state().phase == "tombstone"


def test_what_hid_its_environment_is_reaped_too(host: EmulatedHost):
    host.sh(f"(env -i setsid sh -c 'echo $$ > hidden; {FOREVER}; true' &); {FOREVER}")
    hidden = int(host.text("hidden"))
    until(lambda: str(hidden) in (host.folder() / "seen.json").read_text())
    kill_supervisor(host)
    assert host.pids() != []
    jobs.declare_lost(host.transport, "job")
    assert not is_alive(hidden)


def test_reaping_a_job_that_lives_or_has_ended_only_reports_it(host: EmulatedHost):
    host.sh(FOREVER)
    assert jobs.declare_lost(host.transport, "job").lives
    host.sh("exit 2", job_id="short")
    host.ended("short")
    assert jobs.declare_lost(host.transport, "short").exit_code == 2


def test_a_supervisor_that_hangs_is_reaped_by_force(host: EmulatedHost):
    pid = host.sh(FOREVER).pid
    os.kill(host.supervisor(), signal.SIGSTOP)
    state = jobs.stop(host.transport, "job", wait_s=0.5)
    assert state.phase == "tombstone"
    assert pid is not None and not is_alive(pid)


def test_a_folder_without_a_locked_supervisor_was_never_started(host: EmulatedHost):
    host.folder().mkdir(parents=True)
    assert host.state().phase == "absent"
    assert host.sh("exit 4").phase in ("running", "ended")
    assert host.ended().exit_code == 4


# ---- launch once ----


def test_of_racing_supervisors_one_launches(host: EmulatedHost):
    host.folder().mkdir(parents=True)
    spec = {"job_id": "job", "argv": ["/bin/sh", "-c", f"echo x >> launches; {FOREVER}"], "env": {}, "files": {}}
    write_json(host.folder() / "spec.json", {**spec, "cwd": None, "timeout_s": None, "kill_grace_s": 1})
    command = [sys.executable, "-I", "-S", supervisor.__file__, str(host.folder())]
    racers = [subprocess.Popen(command) for _ in range(8)]
    codes = sorted(racer.wait(timeout=30) for racer in racers)
    assert codes == [0] + [supervisor.LOST_THE_LOCK] * 7
    time.sleep(0.2)
    assert host.text("launches") == "x\n"


# ---- what is given to it ----


def test_hostile_texts_are_plain_data_everywhere(host: EmulatedHost):
    names = {text: f"V{position}" for position, text in enumerate(HOSTILE)}
    files = {f"file {text} .txt".replace("/", ""): text for text in HOSTILE}
    tell = (
        "import json, os, sys; print(json.dumps([sys.argv[1:], {k: v for k, v in os.environ.items() if k[0] == 'V'}, "
        "{n: open(n, newline='').read() for n in os.listdir('.') if n.startswith('file ')}]))"
    )
    env = {name: text for text, name in names.items()}
    host.submit([sys.executable, "-X", "utf8", "-c", tell, *HOSTILE], env=env, files=files, owner="; $(touch x) 世界")
    state = host.ended()
    assert state.exit_code == 0, jobs.log(host.transport, "job").text
    assert state.owner == "; $(touch x) 世界"
    argv, variables, contents = json.loads(jobs.log(host.transport, "job").text)
    assert argv == HOSTILE
    assert variables == env
    assert contents == files
    assert not (host.folder() / "x").exists()


def test_the_environment_is_what_was_given_and_four_names_of_the_host(host: EmulatedHost):
    host.submit(["/usr/bin/env"], env={"A": "1", "PATH": "/given"})
    host.ended()
    names = {
        line.partition("=")[0]: line.partition("=")[2] for line in jobs.log(host.transport, "job").text.splitlines()
    }
    assert set(names) - {"PATH", "HOME", "LANG", "TMPDIR"} == {"A", "TAAS_JOB_ID", "TAAS_JOB_DIR"}
    assert names["TAAS_JOB_ID"] == "job"
    assert names["PATH"] == f"/given:{os.environ['PATH']}"  # as in the ranks: what the host had stays behind it


def test_the_placeholder_stands_for_the_jobs_folder_in_the_command_only(host: EmulatedHost):
    argv = ["/bin/sh", "-c", 'cat "$1"; echo "$IN"', "sh", "{job}/in.txt"]
    host.submit(argv, job_id="filled", env={"IN": "{job}/x"}, files={"in.txt": "text of {job};"})
    assert host.ended("filled").exit_code == 0
    assert jobs.log(host.transport, "filled").text == "text of {job};{job}/x\n"


def test_secrets_are_in_closed_files_only_and_wiped_at_the_end(host: EmulatedHost):
    host.sh(
        "echo ready > ready; while [ ! -e go ]; do sleep 0.02; done", env={"S": "s3cret"}, files={"in.json": "s3cret"}
    )
    host.text("ready")
    for pid in (host.supervisor(), host.state().pid):
        assert b"s3cret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert b"s3cret" not in Path(f"/proc/{host.supervisor()}/environ").read_bytes()
    assert stat.S_IMODE(host.folder().stat().st_mode) == 0o700
    open_files = [path.name for path in host.folder().iterdir() if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert open_files == []
    assert (host.folder() / "in.json").read_text() == "s3cret"
    (host.folder() / "go").touch()
    host.ended()
    left = [path for path in host.folder().iterdir() if path.is_file() and "s3cret" in path.read_text()]
    assert left == []


def test_the_job_is_detached_and_inherits_nothing(host: EmulatedHost):
    host.sh("ls -l /proc/self/fd; umask; trap > traps; cat; sleep 0.2")
    state = host.state()
    pid = host.supervisor()
    assert os.getsid(pid) not in (os.getsid(0), state.pid)
    host.ended()
    text = jobs.log(host.transport, "job").text
    assert "0 -> /dev/null" in text
    assert sum(" -> " in line for line in text.splitlines()) == 4  # in, out, err, and the folder that ls reads


def test_a_job_survives_the_one_who_started_it(host: EmulatedHost):
    starter = (
        "import sys; from pathlib import Path; from taas_tasks.compute import jobs; "
        "from taas_tasks.compute.job import JobSpec; from taas_tasks.compute.local import LocalTransport; "
        "import os, signal; "
        "jobs.submit(LocalTransport(Path(sys.argv[1])), JobSpec(job_id='job', owner='o', argv=['sleep', '1000'])); "
        "os.killpg(0, signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", starter, str(host.root)], start_new_session=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert host.state().lives
