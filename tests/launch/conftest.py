from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from taas_tasks.launch import forkserver
from taas_tasks.launch.environment import rank_environment
from taas_tasks.values import StoreConfig
from tests.launch.gang import Gang
from tests.support.s3_server import S3Server

MakeGang = Callable[..., Gang]


@pytest.fixture
def make_gang(tmp_path: Path, s3_server: S3Server) -> Iterator[MakeGang]:
    """Start gangs of real node agents; every process of theirs is gone when the test ends."""
    made: list[Gang] = []

    def make(
        script: str,
        *,
        files: dict[str, str] | None = None,
        before: Callable[[Gang], None] = lambda gang: None,
        config: StoreConfig | None = None,
        **given: Any,
    ) -> Gang:
        folder = tmp_path / f"gang-{len(made)}"
        gang = Gang(folder, config or s3_server.fresh_config(), {"train.py": script, **(files or {})}, **given)
        made.append(gang)
        before(gang)
        return gang.start()

    yield make
    for gang in made:
        gang.stop()


@pytest.fixture(scope="module")
def fork_server() -> Iterator[None]:
    """A fork server with torch, as a node agent starts it; it and what came from it are gone afterwards."""
    asked: dict[str, dict[str, str]] = {"request_env": {}, "secrets": {}}
    env = rank_environment(os.environ, nnodes=2, nproc_per_node=2, emulate_gpus=True, interface="lo", **asked)
    forkserver.start(env, preload=[])
    yield
    forkserver.stop()
    forkserver.stop_resource_tracker()
