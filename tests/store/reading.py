"""Reading by pieces, gathered."""

from __future__ import annotations

from taas_tasks.store.base import ObjectStore


def gathered(store: ObjectStore, key: str, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop) as ``read_into`` gives them; each piece must follow the one before it."""
    found, buffer = bytearray(), memoryview(bytearray(stop - start))

    def use(offset: int, piece: memoryview) -> None:
        if offset == 0:
            found.clear()
        assert offset == len(found)
        found.extend(piece)

    store.read_into(key, start, buffer, use)
    assert found == buffer
    return bytes(found)
