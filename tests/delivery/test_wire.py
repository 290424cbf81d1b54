from __future__ import annotations

from pathlib import Path

from taas_tasks.delivery import wire


def test_a_socket_is_reached_however_long_its_path_is(tmp_path: Path) -> None:
    folder = tmp_path / ("a-long-name-" * 15)
    folder.mkdir()
    path = str(folder / "socket")
    assert len(path) > 107
    with wire.new_socket() as listener, wire.new_socket() as client:
        with wire.short_path(path) as short:
            listener.bind(short)
        listener.listen()
        with wire.short_path(path) as short:
            client.connect(short)
        accepted, _ = listener.accept()
        with accepted:
            wire.send(client, {"op": "hello"})
            assert wire.receive(accepted) == ({"op": "hello"}, [])
    assert (folder / "socket").is_socket()
