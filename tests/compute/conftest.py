"""Hosts for the tests: each kind of transport, and the local one alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from taas_tasks.compute.local import LocalTransport
from taas_tasks.compute.piped import ProcessTransport
from taas_tasks.compute.transport import Transport
from tests.compute.hosts import EmulatedHost
from tests.compute.ssh_server import SshServer


@pytest.fixture(scope="session")
def ssh_server() -> Iterator[SshServer]:
    """An SSH server for all tests that do not make it misbehave."""
    with SshServer() as server:
        yield server


@pytest.fixture
def ssh_root(tmp_path: Path, shipped: Path) -> Path:
    """The folder of a host that has the engine."""
    root = tmp_path / "host"
    (root / "engines").parent.mkdir()
    (root / "engines").symlink_to(shipped)
    return root


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory, ssh_server: SshServer) -> Path:
    """Where the engine lies, once for all tests."""
    root = tmp_path_factory.mktemp("shipped")
    ssh_server.transport(root, python=sys.executable).call("slots", {})
    return root / "engines"


@pytest.fixture(params=["local", "piped", "ssh"])
def any_host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmulatedHost]:
    """A host for the contract suite: one per transport."""
    root = tmp_path / "host"
    if request.param == "ssh":
        server: SshServer = request.getfixturevalue("ssh_server")
        transport: Transport = server.transport(request.getfixturevalue("ssh_root"), python=sys.executable)
    else:
        transport = (LocalTransport if request.param == "local" else ProcessTransport)(root)
    host = EmulatedHost(transport, root)
    yield host
    host.stop_all()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[EmulatedHost]:
    """A host by the local transport."""
    host = EmulatedHost(LocalTransport(tmp_path / "host"), tmp_path / "host")
    yield host
    host.stop_all()


@pytest.fixture
def neighbour(tmp_path: Path) -> Iterator[EmulatedHost]:
    """A second host of the same machine."""
    host = EmulatedHost(LocalTransport(tmp_path / "neighbour"), tmp_path / "neighbour")
    yield host
    host.stop_all()
