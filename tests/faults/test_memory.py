"""Memory stays where it is, epoch after epoch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from taas_tasks.store import open_store
from tests.delivery.processes import feeder_process
from tests.delivery.support import Prepared, launch_plan
from tests.support.s3_server import S3Server

pytestmark = pytest.mark.store
MIB = 1 << 20


def private_bytes(pid: int) -> int:
    """Memory of a process without the files that it maps."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))


def test_feeder_and_rank_hold_no_more_after_ten_epochs_than_after_three(s3_server: S3Server, tmp_path: Path) -> None:
    config = s3_server.fresh_config()
    prepared = Prepared(open_store(config), units=320, length=32, width=1 << 14).commit_all()  # 2 MiB an epoch
    plan = launch_plan(prepared, nproc=1, cache_bytes=4 * MIB)
    seen: list[tuple[int, int]] = []
    with feeder_process(config, plan, tmp_path) as (host, feeder):
        loader = host.loader(0)
        for _ in range(10):
            assert sum(1 for _ in loader) == 32
            seen.append((private_bytes(feeder.pid), private_bytes(os.getpid())))
    for after_three, at_the_end in zip(seen[2], seen[9], strict=True):
        assert at_the_end - after_three < 3 * MIB, seen  # seven epochs more brought 14 MiB
