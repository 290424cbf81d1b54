"""The real stack: started, killed, started again, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from taas_tasks.stack import Stack, StackError, processes
from taas_tasks.stack.ports import is_listening
from taas_tasks.stack.stack import AIRFLOW, PARTS, POSTGRES, S3, WARDEN
from taas_tasks.store import open_store

pytestmark = pytest.mark.stack
SERVERS = (S3, POSTGRES)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A whole stack without DAGs and plugins."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "dags").mkdir()
    (folder / "plugins").mkdir()
    found = Stack(folder / "root", dags=folder / "dags", plugins=folder / "plugins", supervise=True)
    try:
        found.up()
        yield found
    finally:
        found.down(grace_s=3.0)
        found.drop_database()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Stack]:
    """S3 and PostgreSQL only: up in a second."""
    found = Stack(tmp_path / "root", supervise=True)
    try:
        found.up(parts=SERVERS)
        yield found
    finally:
        found.down(grace_s=3.0)
        found.drop_database()


def listeners(stack: Stack) -> set[str]:
    """Addresses that the stack's ports are open on, from the kernel's table (also those of other interfaces)."""
    wanted = set(json.loads(stack.files.state.read_text())["ports"].values())
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) in wanted}


def healthy(stack: Stack) -> bool:
    return [part.problem for part in stack.status()] == [None] * len(PARTS)


def test_everything_is_healthy_and_on_loopback_only(bare: Stack) -> None:
    assert healthy(bare)
    assert set(bare.pids()) == {*PARTS, WARDEN}
    assert listeners(bare) == {"0100007F"}
    mine = set(bare.pids().values())
    assert len(mine) == len(PARTS) + 1


def test_a_second_up_changes_nothing_and_is_quick(bare: Stack) -> None:
    before = bare.pids()
    started = time.monotonic()
    bare.up()
    assert time.monotonic() - started < 10
    assert bare.pids() == before


def test_secrets_are_for_the_owner_only(bare: Stack) -> None:
    for path in (bare.files.secrets, bare.files.client, bare.files.passwords):
        assert path.stat().st_mode & 0o777 == 0o600
    arguments = b"".join(b"\0".join(processes.arguments(pid)) for pid in bare.pids().values())
    for secret in json.loads(bare.files.secrets.read_text()).values():
        assert str(secret).encode() not in arguments or secret == 1
    assert bare.login[1] not in bare.files.state.read_text()


def token(stack: Stack, user: str, password: str) -> str:
    body = json.dumps({"username": user, "password": password}).encode()
    request = urllib.request.Request(f"{stack.url}/auth/token", data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return str(json.load(answer)["access_token"])


def test_the_logins_work_and_a_wrong_password_does_not(bare: Stack) -> None:
    assert token(bare, *bare.login)
    assert token(bare, *bare.viewer_login())
    with pytest.raises(urllib.error.HTTPError) as caught:
        token(bare, "admin", "wrong")
    with caught.value:
        assert caught.value.code == 401


@dataclass
class ConnectionOf:
    """An Airflow connection, as its JSON form says."""

    text: str

    @property
    def login(self) -> str:
        return str(json.loads(self.text)["login"])

    @property
    def password(self) -> str:
        return str(json.loads(self.text)["password"])

    @property
    def extra_dejson(self) -> dict[str, Any]:
        return dict(json.loads(self.text)["extra"])


def test_the_connection_is_one_that_the_engine_reads(bare: Stack) -> None:
    from taas_tasks.airflow.deployment import store_config

    assert store_config(ConnectionOf(bare.environment()["AIRFLOW_CONN_TAAS_STORE"])) == bare.store_config()


def test_the_inventory_is_one_that_the_engine_reads(bare: Stack) -> None:
    from taas_tasks.compute.inventory import Inventory

    found = Inventory.parse(bare.environment()["AIRFLOW_VAR_TAAS_INVENTORY"])
    assert [host.name for host in found.of_flavor("g2.8")] == [f"g2-{n}" for n in range(4)]
    assert [host.slots for host in found.of_flavor("c1.4")] == [1] * 8


def test_a_killed_part_is_reported_and_restarted(bare: Stack) -> None:
    before = bare.pids()
    os.kill(before["triggerer"], signal.SIGKILL)
    assert processes.wait_until(lambda: "triggerer" not in bare.pids(), timeout_s=5)
    problems = {part.name: part.problem for part in bare.status() if part.problem}
    assert problems == {"triggerer": f"its process {before['triggerer']} is gone"}
    bare.restart("triggerer")
    assert healthy(bare)
    assert {name for name, pid in bare.pids().items() if before[name] != pid} == {"triggerer"}


def test_after_kill_9_of_everything_up_brings_all_back_with_its_data(bare: Stack) -> None:
    store = open_store(bare.store_config())
    store.put("kept", b"still here")
    before, url = bare.pids(), bare.url
    for name, pid in before.items():
        if name != WARDEN:
            os.kill(pid, signal.SIGKILL)
    assert processes.wait_until(lambda: set(bare.pids()) == {WARDEN}, timeout_s=10)
    bare.up()
    assert healthy(bare)
    assert bare.url == url
    assert open_store(bare.store_config()).get("kept") == b"still here"
    assert set(before.values()) & {pid for name, pid in bare.pids().items() if name != WARDEN} == set()


def test_down_leaves_no_process_and_no_listener(bare: Stack) -> None:
    environment_mark = bare.environment()[processes.MARKER]
    child = subprocess.Popen(["sleep", "600"], env={**bare.environment()}, start_new_session=True)
    bare.down(grace_s=5.0)
    assert bare.pids() == {}
    assert child.wait(timeout=5) == -signal.SIGKILL
    assert processes.marked({f"{processes.MARKER}={environment_mark}".encode()}) == []
    assert listeners(bare) == set()
    bare.down()


# ---- with S3 and PostgreSQL only


def test_a_state_file_that_was_lost_does_not_lead_to_two_servers_on_one_folder(servers: Stack) -> None:
    open_store(servers.store_config()).put("kept", b"1")
    old = servers.pids()
    servers.files.state.unlink()
    servers.up(parts=SERVERS)
    assert not any(Path(f"/proc/{old[name]}").exists() and is_running(old[name]) for name in SERVERS)
    assert open_store(servers.store_config()).get("kept") == b"1"


def is_running(pid: int) -> bool:
    found = processes.ProcessId.of(pid)
    return found is not None and found.is_alive()


def test_a_pid_that_now_belongs_to_someone_else_is_left_alone(servers: Stack) -> None:
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        state = json.loads(servers.files.state.read_text())
        state["processes"]["scheduler"] = {"pid": stranger.pid, "started_ticks": 1, "started_at": 1.0}
        servers.files.state.write_text(json.dumps(state))
        assert "scheduler" not in servers.pids()
        servers.down(grace_s=3.0)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_port_that_was_taken_meanwhile_is_replaced(servers: Stack) -> None:
    old = servers.store_config().endpoint_url
    servers.down(grace_s=3.0)
    import socket

    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", int(str(old).rpartition(":")[2])))
        taken.listen()
        servers.up(parts=SERVERS)
        assert servers.store_config().endpoint_url != old
        open_store(servers.store_config()).put("works", b"")


def test_jobs_on_the_emulated_hosts_end_with_the_stack(servers: Stack) -> None:
    job = servers.files.hosts / "c1-0" / "jobs" / "j123"
    job.mkdir(parents=True)
    child = subprocess.Popen(["sleep", "600"], env={"PATH": "/usr/bin:/bin", "TAAS_JOB_ID": "j123"})
    other = subprocess.Popen(["sleep", "600"], env={"PATH": "/usr/bin:/bin", "TAAS_JOB_ID": "j1234"})
    try:
        servers.down(grace_s=3.0)
        assert child.wait(timeout=5) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (child, other):
            process.kill()
            process.wait()


def test_a_supervised_stack_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib\n"
        "from taas_tasks.stack import Stack\n"
        "stack = Stack(pathlib.Path(sys.argv[1]), supervise=True)\n"
        "stack.up(parts=('s3', 'postgres'))\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    stack = Stack(tmp_path / "root")
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "root")], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        pids = stack.pids()
        assert set(pids) == {S3, POSTGRES, WARDEN}
    finally:
        owner.kill()
        owner.wait()
        owner.communicate()
    assert processes.wait_until(lambda: not any(map(is_running, pids.values())), timeout_s=30)
    assert not any(is_listening(port) for port in json.loads(stack.files.state.read_text())["ports"].values())
    stack.drop_database()


def test_a_part_that_cannot_start_says_why_and_nothing_is_left(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "root", timeout_s=15)
    stack.files.make_folders()
    (stack.files.s3 / "filerldb2").write_text("a file where the server needs a folder")
    with pytest.raises(StackError, match=r"(?s)s3 (ended at its start|is not healthy).*s3\.log.*filerldb2"):
        stack.up(parts=SERVERS)
    assert stack.pids() == {}
    stack.down()
    stack.drop_database()


def test_the_airflow_processes_are_those_of_the_four_commands() -> None:
    assert AIRFLOW == ("api-server", "scheduler", "dag-processor", "triggerer")


# ---- hosts of the user's own

HOSTS = {
    "hosts": [
        {
            "name": "a",
            "flavor": "c1.4",
            "transport": "ssh",
            "root": "/srv/taas",
            "python": "/usr/bin/python3",
            "connection_id": "host_a",
        }
    ]
}


def test_a_given_inventory_and_its_connections_are_what_airflow_has(tmp_path: Path) -> None:
    from taas_tasks.compute.inventory import Inventory

    given = {"AIRFLOW_CONN_HOST_A": '{"conn_type": "ssh", "host": "10.1.2.3"}'}
    stack = Stack(tmp_path / "root", inventory=HOSTS, connections=given, supervise=True)
    try:
        stack.up(parts=())
        found = stack.environment()
        assert Inventory.parse(found["AIRFLOW_VAR_TAAS_INVENTORY"]) == Inventory.model_validate(HOSTS)
        assert found["AIRFLOW_CONN_HOST_A"] == given["AIRFLOW_CONN_HOST_A"]
    finally:
        stack.down(grace_s=3.0)


def test_the_s3_server_listens_where_it_was_told_also_for_later_commands(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "root", s3_address="127.0.0.2", supervise=True)
    try:
        stack.up(parts=[S3])
        later = Stack(tmp_path / "root")
        assert str(later.store_config().endpoint_url).startswith("http://127.0.0.2:")
        assert next(part.problem for part in later.status() if part.name == S3) is None
        assert listeners(stack) == {"0200007F", "0100007F"}  # SeaweedFS's parts talk over loopback, too
        with pytest.raises(StackError, match=r"listens on 127\.0\.0\.2, asked for was 127\.0\.0\.3: stop the stack"):
            Stack(tmp_path / "root", s3_address="127.0.0.3").up(parts=[S3])
    finally:
        stack.down(grace_s=3.0)
