from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from taas_tasks.delivery import wire
from taas_tasks.delivery.client import Connection


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Connection, socket.socket]]:
    with wire.new_socket() as listener:
        path = str(tmp_path / "s")
        with wire.short_path(path) as short:
            listener.bind(short)
        listener.listen()
        connection = Connection(path)
        feeders_end, _ = listener.accept()
        feeders_end.settimeout(10)
        with feeders_end:
            yield connection, feeders_end
        connection.close()


@contextmanager
def child(target: Any) -> Iterator[Any]:
    """A process forked in mid-pass, as the workers of a plain DataLoader are."""
    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def test_a_pass_that_is_left_is_told_although_a_child_process_has_the_connection_open(
    pair: tuple[Connection, socket.socket],
) -> None:
    connection, feeders_end = pair
    wait = multiprocessing.get_context("fork").Event()
    with child(lambda: wait.wait(30)):
        connection.close()
        assert wire.receive(feeders_end) == (None, [])


def test_a_child_process_that_ends_leaves_its_parents_pass_open(pair: tuple[Connection, socket.socket]) -> None:
    connection, feeders_end = pair
    with child(connection.close) as ended:
        ended.join(10)
        assert ended.exitcode == 0
    connection.send("release", n=1)
    assert wire.receive(feeders_end)[0] == {"op": "release", "n": 1}
