"""The real stack for the end-to-end tests: S3, PostgreSQL and Airflow's four processes, below one temporary folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from taas_tasks.stack import Stack
from tests.e2e.runs import CPU_HOSTS, GPU_HOSTS, Runs


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The whole stack, once for the session; it ends with this process, in whatever way that ends.

    ``TAAS_TEST_STACK`` names the folder of one that is up already, for whoever writes tests.
    """
    if folder := os.environ.get("TAAS_TEST_STACK"):
        yield Stack(Path(folder), hosts_gpu=GPU_HOSTS, hosts_cpu=CPU_HOSTS)
        return
    stack = Stack(tmp_path_factory.mktemp("stack"), hosts_gpu=GPU_HOSTS, hosts_cpu=CPU_HOSTS, supervise=True)
    try:
        stack.up()
        yield stack
    finally:
        stack.down()
        stack.drop_database()


@pytest.fixture(scope="session")
def runs(stack: Stack) -> Iterator[Runs]:
    """What the tests do with runs on the stack."""
    with Runs(stack) as found:
        yield found
