from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from taas_tasks.delivery import wire
from taas_tasks.delivery.outbox import Outbox


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_who_does_not_read_is_not_waited_for_and_gets_all_in_order_later(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    ours, theirs = ends
    outbox = Outbox(ours)
    for number in range(600):
        (tmp_path / "part").write_text(f"part {number}")
        file = os.open(tmp_path / "part", os.O_RDONLY)
        (tmp_path / "part").unlink()
        outbox.send({"number": number, "much": "x" * 2000}, [file])
        os.close(file)  # as the feeder does when nobody wants the part any more
    assert outbox
    for number in range(600):
        message, files = wire.receive(theirs)
        assert message is not None and message["number"] == number
        assert os.pread(files[0], 99, 0) == f"part {number}".encode()
        os.close(files[0])
        outbox.flush()
    assert not outbox


@pytest.mark.parametrize("end", ["closed here", "gone there"])
def test_no_descriptor_is_left_of_what_was_never_sent(ends: tuple[socket.socket, socket.socket], end: str) -> None:
    ours, theirs = ends
    before = num_open()
    outbox = Outbox(ours)
    with Path("/dev/null").open() as file:
        for _ in range(600):
            outbox.send({"much": "x" * 2000}, [file.fileno()])
    assert outbox
    if end == "closed here":
        outbox.close()
    else:
        theirs.close()
        outbox.flush()
        before -= 1
    assert not outbox
    assert num_open() == before
