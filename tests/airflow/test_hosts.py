"""Hosts of the inventory as transports, by Airflow's connections."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from taas.errors import HostRefused, HostUnreachable
from taas_tasks.airflow.hosts import OpenHosts, check_connections, open_host, read_connection, ssh_address
from taas_tasks.compute.inventory import Host
from taas_tasks.compute.local import LocalTransport
from tests.compute.ssh_server import CLIENT_KEY, HOST_KEY, USER, SshServer, private, public

KEYS = {"private_key": private(CLIENT_KEY), "host_key": public(HOST_KEY)}


@dataclass
class Connection:
    """What Airflow gives."""

    conn_type: str | None = "ssh"
    host: str | None = "127.0.0.1"
    login: str | None = USER
    port: int | None = None
    extra_dejson: dict[str, Any] = field(default_factory=lambda: dict(KEYS))


def ssh_host(root: Path = Path("/var/taas"), *, name: str = "g2-0", **fields: Any) -> Host:
    own = {"name": name, "flavor": "g2.8", "transport": "ssh", "connection_id": f"taas_{name}", "root": str(root)}
    return Host(**{"python": sys.executable, **own, **fields})


def refusal(connection: Connection) -> str:
    with pytest.raises(HostRefused) as caught:
        ssh_address("h", connection)
    assert not caught.value.retryable
    return caught.value.message


def test_a_connection_is_read_as_the_provider_reads_it():
    extra = {"key_file": "/k", "private_key_passphrase": "p", "host_key": KEYS["host_key"], "compress": "false"}
    address = ssh_address("h", Connection(port=2222, extra_dejson=extra))
    assert (address.host, address.port, address.user) == ("127.0.0.1", 2222, USER)
    assert (address.key_file, address.private_key, address.passphrase) == ("/k", None, "p")
    assert ssh_address("h", Connection()).port == 22
    bare = {**KEYS, "host_key": KEYS["host_key"].split()[1]}
    assert ssh_address("h", Connection(extra_dejson=bare)).host_key == bare["host_key"]


def test_neither_keys_nor_passphrases_are_shown():
    text = repr(ssh_address("h", Connection(extra_dejson={**KEYS, "private_key_passphrase": "s3cret"})))
    assert "s3cret" not in text and "PRIVATE KEY" not in text


def test_all_faults_of_a_connection_are_told_at_once_with_the_way_out():
    message = refusal(Connection(conn_type="http", host="h.example", login=None, extra_dejson={}))
    for part in ("'http', not 'ssh'", "no login", "no key (passwords are not used)", "pins no host_key"):
        assert part in message
    assert "ssh-keyscan -t ed25519 -p 22 h.example | cut -d' ' -f2-" in message


@pytest.mark.parametrize("name", ["no_host_key_check", "ignore_hostkey_verification", "allow_host_key_change"])
def test_what_would_weaken_the_check_of_the_host_key_is_refused(name: str):
    for value in (True, "true", "True"):
        assert f"extra says {name}" in refusal(Connection(extra_dejson={**KEYS, name: value}))
    assert ssh_address("h", Connection(extra_dejson={**KEYS, name: "false"})).host == "127.0.0.1"


def test_a_host_key_that_is_none_is_refused():
    scanned = "h.example ssh-ed25519 " + KEYS["host_key"].split()[1]
    assert "without the host's name" in refusal(Connection(extra_dejson={**KEYS, "host_key": scanned}))


def test_two_keys_are_one_too_many():
    assert "both key_file and private_key" in refusal(Connection(extra_dejson={**KEYS, "key_file": "/k"}))


def test_connections_of_all_hosts_are_checked_at_once_and_none_is_contacted(tmp_path: Path):
    connections = {
        "taas_a": Connection(host="192.0.2.1"),
        "taas_b": Connection(login=None),
        "taas_c": Connection(extra_dejson={**KEYS, "private_key": "no key"}),
        "taas_d": Connection(extra_dejson={"host_key": KEYS["host_key"], "key_file": str(tmp_path / "missing")}),
    }
    hosts = [ssh_host(name=name) for name in "abcd"]
    local = Host(name="l", flavor="g2.8", root="/x", python="/y")
    with pytest.raises(HostRefused) as caught:
        check_connections([*hosts, local], read=connections.__getitem__)
    lines = caught.value.message.splitlines()
    assert [line.split(":")[0] for line in lines] == ["host b", "host c", "host d"]
    assert "no login" in lines[0] and "cannot be read" in lines[1] and "key_file" in lines[2]
    check_connections([hosts[0], local], read=connections.__getitem__)


def test_a_connection_that_airflow_lacks_is_named(airflow_db: None):
    with pytest.raises(HostRefused, match="no connection 'taas_nowhere', which the inventory names"):
        read_connection("taas_nowhere")


def test_a_connection_of_airflow_reaches_its_host(airflow_db: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with SshServer() as server:
        value = {"conn_type": "ssh", "host": "127.0.0.1", "login": USER, "port": server.port, "extra": KEYS}
        monkeypatch.setenv("AIRFLOW_CONN_TAAS_G2-0", json.dumps(value))
        assert open_host(ssh_host(tmp_path)).call("state", {"job_id": "x"})["phase"] == "absent"


class Reader:
    """Counts how often Airflow is asked."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.num_reads = 0

    def __call__(self, connection_id: str) -> Connection:
        self.num_reads += 1
        return self.connection


def test_airflow_is_asked_at_the_first_call_and_again_only_after_one_that_failed(tmp_path: Path):
    with SshServer() as server:
        reader = Reader(Connection(port=server.port))
        transport = open_host(ssh_host(tmp_path), read=reader)
        assert reader.num_reads == 0
        for _ in range(5):
            transport.call("slots", {})
        assert reader.num_reads == 1
    with pytest.raises(HostUnreachable, match=r"host g2-0: .*cannot be reached"):
        transport.call("slots", {})
    with SshServer() as mended:
        reader.connection = Connection(port=mended.port)
        transport.call("slots", {})
    assert reader.num_reads == 2


def test_hosts_are_opened_once_and_again_when_they_have_changed():
    opened: list[Host] = []

    def open_one(host: Host) -> Any:
        opened.append(host)
        return object()

    hosts = OpenHosts(open_one=open_one)
    first = hosts.of([ssh_host(), ssh_host(name="b")])
    assert hosts.of([ssh_host()])["g2-0"] is first["g2-0"]
    assert hosts.of([ssh_host(slots=2)])["g2-0"] is not first["g2-0"]
    assert len(opened) == 3


def test_a_local_host_is_opened(tmp_path: Path):
    transport = open_host(Host(name="a", flavor="g2.8", root=str(tmp_path), python=sys.executable))
    assert isinstance(transport, LocalTransport)
    assert transport.call("state", {"job_id": "x"})["phase"] == "absent"
