from __future__ import annotations

import json
from pathlib import Path

from taas_tasks.delivery.cache_files import free_bytes
from taas_tasks.delivery.feeder import _Stats
from taas_tasks.delivery.parts import Segment
from taas_tasks.store.memory import MemoryStore
from tests.delivery.support import Prepared


def test_counts_that_a_full_disk_does_not_take_are_written_when_there_is_room(small_disk: Path) -> None:
    segment = Segment.of(Prepared(MemoryStore(), units=64, length=64).commit(0, 1))
    stats, filler = _Stats(small_disk / "stats.json", ["data"]), small_disk / "filler"
    filler.write_bytes(bytes(free_bytes(small_disk)))
    stats.count(segment, 1, 10)
    stats.write(at_once=True)
    assert not (small_disk / "stats.json").exists()
    filler.unlink()
    stats.write(at_once=True)
    assert json.loads((small_disk / "stats.json").read_text())["delivered_bytes"] == {"data": 10}
