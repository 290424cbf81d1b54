"""Fixtures that all tests share: object stores, a disk that is soon full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from taas_tasks.store import ObjectStore, open_store
from taas_tasks.store.memory import MemoryStore
from tests.support.s3_server import S3Server, running_s3_server

# properties are not about seconds: a busy machine must not fail them
settings.register_profile("taas", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("taas")

_TOGETHER = ("tests/e2e/", "tests/cluster/", "tests/stack/test_stack.py")
"""Tests that share a stack, by the beginnings of their names."""


class SideBySide(LoadScopeScheduling):
    """Tests go to whichever process is free, but those that share a stack go to one."""

    def _split_scope(self, nodeid: str) -> str:
        return next((place for place in _TOGETHER if nodeid.startswith(place)), nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SideBySide:
    return SideBySide(config, log)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server for the whole session; dies with it."""
    with running_s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_store(s3_server: S3Server) -> ObjectStore:
    """A store on the real server below a prefix of its own; ``s3_server.fresh_config()`` gives another one's config."""
    return open_store(s3_server.fresh_config())


@pytest.fixture
def memory_store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "taas-test", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
