"""Hosts for the tests: each kind of transport, and the local one alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from taas_tasks.compute.local import LocalTransport
from taas_tasks.compute.piped import ProcessTransport
from tests.compute.hosts import EmulatedHost


@pytest.fixture(params=["local", "piped"])
def any_host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmulatedHost]:
    """A host for the contract suite: one per transport."""
    kind = LocalTransport if request.param == "local" else ProcessTransport
    host = EmulatedHost(kind(tmp_path / "host"), tmp_path / "host")
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
