from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from taas_tasks.store import open_store
from tests.faults.scene import Scene
from tests.launch.conftest import make_gang
from tests.support.faulty_proxy import request_proxy
from tests.support.s3_server import S3Server

__all__ = ["make_gang"]
MakeScene = Callable[..., Scene]


@pytest.fixture
def process_as_before(tmp_path: Path) -> Iterator[None]:
    """The current folder, ``sys.path`` and imported modules are as before afterwards: programs run in this process."""
    cwd, path, modules = Path.cwd(), sys.path[:], set(sys.modules)
    yield
    os.chdir(cwd)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "") or ""):
            del sys.modules[name]


@pytest.fixture
def make_scene(s3_server: S3Server, tmp_path: Path, process_as_before: None) -> Iterator[MakeScene]:
    with request_proxy(s3_server.ports.s3) as proxy:

        def make(**more: Any) -> Scene:
            far = s3_server.fresh_config(endpoint_url=proxy.url)
            near = open_store(far.model_copy(update={"endpoint_url": s3_server.config.endpoint_url}))
            return Scene(far, near, tmp_path, proxy, **more)

        yield make


@pytest.fixture
def scene(make_scene: MakeScene) -> Scene:
    return make_scene()
