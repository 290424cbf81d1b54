"""The SSH transport, over a real SSH server in this process: trust, connections that break, the engine, refusals."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncssh
import pytest

from taas.errors import HostRefused, HostUnreachable
from taas_tasks.compute import jobs
from taas_tasks.compute.engine import engine
from taas_tasks.compute.ssh import Patience, SshTransport, close_connections
from taas_tasks.compute.ssh_keys import fingerprint, read_host_key
from taas_tasks.layout import HostPaths
from tests.compute.hosts import EmulatedHost
from tests.compute.ssh_server import CLIENT_KEY, HOST_KEY, SshServer, private, public, silent_port

FOREVER = "sleep 1000"
IMPATIENT = Patience(connect_s=1, login_s=3, open_s=1, call_s=2)
OTHER_KEY = asyncssh.generate_private_key("ssh-ed25519")


@pytest.fixture
def server() -> Iterator[SshServer]:
    """A server of the test's own, to make it misbehave."""
    with SshServer() as server:
        yield server


def transport(server: SshServer, root: Path, patience: Patience | None = None, **fields: object) -> SshTransport:
    return server.transport(root, python=sys.executable, patience=patience, **fields)


def ask(host: SshTransport) -> str:
    return str(host.call("state", {"job_id": "x"})["phase"])


# ---- trust ----


@pytest.mark.parametrize("kind", ["ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp521", "ssh-rsa"])
def test_a_pinned_host_key_of_each_kind_is_recognised(ssh_root: Path, kind: str):
    with SshServer(host_key=asyncssh.generate_private_key(kind)) as server:
        assert ask(transport(server, ssh_root)) == "absent"


def test_a_changed_host_key_is_refused_at_once_with_both_fingerprints(server: SshServer, tmp_path: Path):
    with pytest.raises(HostRefused) as caught:
        ask(transport(server, tmp_path, host_key=public(OTHER_KEY)))
    assert not caught.value.retryable
    for key in (HOST_KEY, OTHER_KEY):
        assert fingerprint(read_host_key(public(key))) in caught.value.message
    assert f"ssh-keyscan -t ed25519 -p {server.port} 127.0.0.1" in caught.value.message
    assert (server.logins, server.commands) == (0, [])


def test_a_host_that_has_no_key_of_the_pinned_kind_is_refused(server: SshServer, tmp_path: Path):
    pinned = asyncssh.generate_private_key("ecdsa-sha2-nistp256")
    with pytest.raises(HostRefused, match="pinned is ecdsa-sha2-nistp256 SHA256:"):
        ask(transport(server, tmp_path, host_key=public(pinned)))


def test_the_pinned_one_of_several_host_keys_is_asked_for(ssh_root: Path):
    second = asyncssh.generate_private_key("ssh-rsa")
    with SshServer(more_host_keys=[second]) as server:
        assert ask(transport(server, ssh_root, host_key=public(second))) == "absent"


def test_without_a_pinned_key_nobody_is_contacted(server: SshServer, tmp_path: Path):
    with pytest.raises(HostRefused, match="host_key cannot be used"):
        ask(transport(server, tmp_path, host_key=""))
    assert server.num_connections == 0


def test_neither_agent_nor_home_is_asked_for_keys(server: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_ed25519").write_text(private(CLIENT_KEY))
    (tmp_path / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{server.port} {public(OTHER_KEY)}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "nobody"))
    with pytest.raises(HostRefused, match="refuses the login"):
        ask(transport(server, tmp_path, private_key=private(OTHER_KEY)))


def test_a_key_with_a_passphrase_in_a_file(server: SshServer, ssh_root: Path, tmp_path: Path):
    path = tmp_path / "key"
    path.write_text(private(CLIENT_KEY, passphrase="open"))
    host = transport(server, ssh_root, private_key=None, key_file=str(path), passphrase="open")
    assert ask(host) == "absent"
    with pytest.raises(HostRefused, match="give private_key_passphrase"):
        ask(transport(server, ssh_root, private_key=None, key_file=str(path)))
    with pytest.raises(HostRefused, match="cannot be read"):
        ask(transport(server, ssh_root, private_key=None, key_file=str(path), passphrase="wrong"))


def test_a_refused_login_names_the_key_that_was_shown(server: SshServer, tmp_path: Path):
    with pytest.raises(HostRefused) as caught:
        ask(transport(server, tmp_path, private_key=private(OTHER_KEY)))
    assert fingerprint(read_host_key(public(OTHER_KEY))) in caught.value.message
    assert "authorized_keys" in caught.value.message


# ---- connections ----


def test_sixteen_threads_share_one_login_and_each_gets_its_answer(server: SshServer, ssh_root: Path):
    host = transport(server, ssh_root)
    together = threading.Barrier(16)

    def one(number: int) -> str:
        together.wait()
        return str(host.call("state", {"job_id": f"job-{number}"})["job_id"])

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(16))) == [f"job-{number}" for number in range(16)]
    assert server.logins == 1
    assert len(server.commands) == 16
    assert server.most_sessions <= 8


def test_who_waits_for_a_login_that_fails_is_told_the_same(tmp_path: Path):
    with silent_port() as port:
        host = SshTransport(SshServer().address(port=port), tmp_path, python="/usr/bin/python3", patience=IMPATIENT)

        def one(_: int) -> str:
            with pytest.raises(HostUnreachable) as caught:
                ask(host)
            return caught.value.message

        began = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            said = set(pool.map(one, range(8)))
        assert len(said) == 1 and "says nothing for 3 s" in said.pop()
        assert time.monotonic() - began < 8  # not one after the other


def test_a_connection_that_broke_is_replaced_and_nobody_hears_of_it(server: SshServer, ssh_root: Path):
    host = transport(server, ssh_root)
    ask(host)
    server.hang_up()
    assert ask(host) == "absent"
    assert server.logins == 2


def test_a_connection_that_breaks_in_the_middle_of_a_call_is_replaced(server: SshServer, ssh_root: Path):
    host = transport(server, ssh_root)
    ask(host)
    server.silent_after = 1
    hang_up = threading.Timer(0.5, lambda: (setattr(server, "silent_after", float("inf")), server.hang_up()))
    hang_up.start()
    assert ask(host) == "absent"
    hang_up.join()
    assert server.logins == 2


def test_a_host_that_goes_silent_in_the_middle_of_a_call_is_unreachable_in_bounded_time(
    server: SshServer, ssh_root: Path
):
    host = transport(server, ssh_root, IMPATIENT)
    ask(host)
    server.silent_after = 1
    began = time.monotonic()
    with pytest.raises(HostUnreachable, match="does not answer state within 2 s"):
        ask(host)
    assert time.monotonic() - began < 6
    server.silent_after = float("inf")
    assert ask(host) == "absent"


def test_a_host_that_stops_altogether_is_unreachable_in_bounded_time(ssh_root: Path):
    """As when it is paused: its kernel still takes what is sent."""
    script = f"""
import time
from tests.compute.ssh_server import SshServer
from pathlib import Path
import sys
from asyncssh import import_private_key
with SshServer(host_key=import_private_key({private(HOST_KEY)!r}), user_key={public(CLIENT_KEY)!r}) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        address = SshServer().address(port=int(process.stdout.readline()))
        host = SshTransport(address, ssh_root, python=sys.executable, patience=IMPATIENT)
        assert ask(host) == "absent"
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(HostUnreachable):
            ask(host)
        assert time.monotonic() - began < 10
        os.kill(process.pid, signal.SIGCONT)
        assert ask(host) == "absent"
    finally:
        close_connections()
        process.kill()
        process.communicate()


def test_logins_that_are_dropped_are_tried_again(server: SshServer, ssh_root: Path):
    server.drop_logins = 2
    assert ask(transport(server, ssh_root)) == "absent"
    assert (server.logins, server.num_connections) == (1, 3)


def test_a_host_that_drops_every_login_is_unreachable(server: SshServer, tmp_path: Path):
    server.drop_logins = 1000
    with pytest.raises(HostUnreachable, match="hangs up at login"):
        ask(transport(server, tmp_path, IMPATIENT))


def test_fewer_sessions_than_we_would_like_are_waited_for(server: SshServer, ssh_root: Path):
    server.max_sessions = 2
    host = transport(server, ssh_root)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: ask(host), range(8))) == {"absent"}
    assert server.logins == 1


def test_nobody_listens(tmp_path: Path):
    with silent_port() as port:
        pass
    host = SshTransport(SshServer().address(port=port), tmp_path, python=sys.executable)
    with pytest.raises(HostUnreachable, match=r"trainer@127.0.0.1:\d+ \(connection 'h'\) cannot be reached") as caught:
        ask(host)
    assert caught.value.retryable


def test_a_name_that_is_none_is_said(tmp_path: Path):
    host = SshTransport(SshServer().address(host="no-such-host.invalid"), tmp_path, python=sys.executable)
    with pytest.raises(HostUnreachable, match=r"no-such-host\.invalid"):
        ask(host)


def _ask_in_child(host: SshTransport, answers: multiprocessing.SimpleQueue[str]) -> None:
    answers.put(ask(host))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_that_forks_leaves_the_connection_to_its_parent(server: SshServer, ssh_root: Path):
    host = transport(server, ssh_root)
    ask(host)
    forking = multiprocessing.get_context("fork")
    answers = forking.SimpleQueue()
    child = forking.Process(target=_ask_in_child, args=(host, answers))
    child.start()
    child.join(30)
    assert child.exitcode == 0 and answers.get() == "absent"
    assert ask(host) == "absent"
    assert server.logins == 2  # one of each process; the parent's outlived the child


# ---- what a login shell says, what is run ----


def test_noise_of_a_login_does_not_break_the_reply(server: SshServer, tmp_path: Path):
    server.noise = b'Welcome to g2-0!\n{"ok": "not me"}\n' + b"x" * 100_000 + b" no end of line"
    host = transport(server, tmp_path)
    assert ask(host) == "absent"
    assert host.call("slots", {}) == {"slots": [], "tickets": []}


def test_nothing_but_verb_and_paths_is_in_a_command(server: SshServer, tmp_path: Path):
    root = tmp_path / "a folder; $(touch x) 'of' \"ours\""
    host = EmulatedHost(transport(server, root), root)
    try:
        host.sh("echo done", job_id="the-job", env={"S": "s3cret"}, files={"in.json": "s3cret too"})
        assert host.ended("the-job").succeeded
    finally:
        host.stop_all()
    for command in server.commands:
        assert "s3cret" not in command and "the-job" not in command
    assert list(tmp_path.iterdir()) == [root]


# ---- the engine ----


def test_the_engine_is_put_on_a_bare_host_once(server: SshServer, tmp_path: Path):
    host = transport(server, tmp_path)
    for _ in range(3):
        ask(host)
    assert len(server.commands) == 1 + 1 + 3  # missed, shipped, and then one round trip for each call
    folder = HostPaths(tmp_path).engine(engine().digest)
    found = {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix != ".pyc" and path.is_file()
    }
    assert found == set(engine().files)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    close_connections()
    ask(transport(server, tmp_path))
    assert len(server.commands) == 6


def test_processes_and_threads_that_ship_at_once_all_get_their_answer(server: SshServer, tmp_path: Path):
    address = server.address().model_dump_json()
    script = f"""
import sys
from pathlib import Path
from taas_tasks.compute.ssh import SshAddress, SshTransport
host = SshTransport(SshAddress.model_validate_json({address!r}), Path({str(tmp_path)!r}), python=sys.executable)
sys.stdin.readline()
print(host.call("state", {{"job_id": "x"}})["phase"])
"""
    others = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    host = transport(server, tmp_path)
    with ThreadPoolExecutor(6) as pool:
        said = [pool.submit(other.communicate, "go\n", timeout=60) for other in others]
        answers = list(pool.map(lambda _: ask(host), range(4)))
    assert answers == ["absent"] * 4
    assert [one.result()[0] for one in said] == ["absent\n"] * 2
    left = [path.name for path in (tmp_path / "engines").iterdir()]
    assert engine().digest in left
    assert not [name for name in left if name.startswith(".")]
    ours = sum("sys.stdin.buffer" in command for command in server.commands)
    assert ours <= 3  # at most once for each process


def test_an_engine_of_which_parts_were_removed_is_put_there_again(server: SshServer, tmp_path: Path):
    host = transport(server, tmp_path)
    ask(host)
    hostctl = HostPaths(tmp_path).engine(engine().digest) / "taas_tasks/compute/hostctl.py"
    hostctl.unlink()
    assert ask(host) == "absent"
    assert hostctl.exists()


def test_a_job_outlives_the_connection_that_started_it(server: SshServer, ssh_root: Path):
    host = EmulatedHost(transport(server, ssh_root), ssh_root)
    try:
        assert host.sh(FOREVER, kill_grace_s=1).phase == "running"
        server.hang_up()
        close_connections()
        assert host.state().lives
    finally:
        host.stop_all()


# ---- hosts that are not fit ----


def test_a_python_that_is_not_there_is_named(server: SshServer, tmp_path: Path):
    with pytest.raises(HostRefused, match="has no python at '/no/such/python'") as caught:
        ask(server.transport(tmp_path, python="/no/such/python"))
    assert "inventory" in caught.value.message


def fake_python(tmp_path: Path, text: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_python_that_is_too_old_is_refused_with_both_versions(server: SshServer, tmp_path: Path):
    lie = "import sys; sys.version_info = (3, 9, 2); sys.version = '3.9.2 (default)'; "
    old = fake_python(tmp_path, f"""exec {sys.executable} -I -S -c "{lie}$4" """)
    with pytest.raises(HostRefused, match=r"is 3.9.2, at least 3.11 is needed"):
        ask(server.transport(tmp_path / "host", python=old))


def test_a_host_without_room_for_the_engine_may_be_asked_again(server: SshServer, tmp_path: Path):
    (tmp_path / "host").write_text("a file where the folder should be")
    with pytest.raises(HostUnreachable, match="the engine cannot be put there") as caught:
        ask(transport(server, tmp_path / "host"))
    assert caught.value.retryable


def test_a_host_that_says_anything_else_is_quoted(server: SshServer, tmp_path: Path):
    broken = fake_python(tmp_path, "echo Segmentation fault >&2; exit 139")
    with pytest.raises(HostUnreachable, match="it said: Segmentation fault"):
        ask(server.transport(tmp_path / "host", python=broken))


# ---- values that look like commands ----

HOSTILE = [
    "; touch x;", "$(touch x)", "`touch x`", "a\nb\n", "it's \"quoted\" \\ ", "üñí 🚂", "--flag", "-c", "{job}", "%s",
]  # fmt: skip


def test_whatever_a_user_wrote_reaches_the_job_as_it_is(server: SshServer, tmp_path: Path):
    root = tmp_path / "root; $(touch x) `touch x`"
    host = EmulatedHost(transport(server, root), root)
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['V'], open('in.json').read()]))"
    sent: list[list[object]] = []
    try:
        for number, value in enumerate(HOSTILE):
            argument = value.replace(
                "{job}", "{jobs}"
            )  # in a command {job} has a meaning, and no user's word is in one
            argv = [sys.executable, "-c", show, "--", argument]
            host.submit(argv, job_id=f"j{number}", owner=value, env={"V": value}, files={"in.json": value})
            sent.append([["--", argument], value, value])
        for number, value in enumerate(HOSTILE):
            assert host.ended(f"j{number}").succeeded
            assert json.loads(jobs.log(host.transport, f"j{number}").text) == sent[number]
            assert host.state(f"j{number}").owner == value
    finally:
        host.stop_all()
    assert not list(tmp_path.rglob("x")) and not Path("/x").exists()
    for command in server.commands:
        assert "🚂" not in command


def test_no_process_of_the_host_shows_a_secret_in_its_command_line(server: SshServer, ssh_root: Path):
    host = EmulatedHost(transport(server, ssh_root), ssh_root)
    secret = "s3cret-of-this-test"
    try:
        host.sh("echo ready > ready; sleep 1000", env={"TOKEN": secret}, files={"in.json": secret}, kill_grace_s=1)
        host.text("ready")
        shown = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.exists()]
        assert not [line for line in shown if secret.encode() in line]
        assert stat.S_IMODE((host.folder() / "in.json").stat().st_mode) == 0o600
        assert not any(secret in command for command in server.commands)
    finally:
        host.stop_all()
