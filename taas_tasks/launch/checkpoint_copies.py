"""Copies of ``taas.checkpoint``'s newest checkpoint in the object store: a next try on other hosts goes on from it.

The data first, the marker last, as on disk: a copy without a marker does not count. Node 0 copies, since rank 0 writes.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import asdict
from pathlib import Path

from taas.checkpoints import FOLDER, Marker, newest
from taas.errors import StoreError
from taas_tasks.launch.files import write_json
from taas_tasks.layout import RunKeys
from taas_tasks.store.base import ObjectStore

_log = logging.getLogger(__name__)


class CheckpointCopies:
    """A thread that copies each new checkpoint of the project folder; a store that is down delays it only."""

    def __init__(self, store: ObjectStore, *, run: str, generation: int, project: Path, period_s: float = 2.0) -> None:
        self._store = store
        self._prefix = RunKeys(run).checkpoints(generation)
        self._folder = project / FOLDER
        self._period_s = period_s
        # What lies there at the start is what the store has, or what the project's snapshot brought.
        self._copied = newest(self._folder)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="taas-checkpoints", daemon=True)

    def start(self) -> None:
        """Begin to copy."""
        self._thread.start()

    def stop(self, *, wait_s: float) -> None:
        """Copy the last one if that takes no longer than ``wait_s``; the thread dies with the process."""
        self._stopping.set()
        self._thread.join(wait_s)

    def copy_newest(self) -> None:
        """Copy the newest checkpoint, if it is new, and remove the copies of older ones."""
        found = newest(self._folder)
        if found is None or found == self._copied:
            return
        marker = found[0]
        self._store.put_file(self._prefix + marker.data, self._folder / marker.data)
        self._store.put(self._prefix + marker.file_name, json.dumps(asdict(marker)).encode())
        self._copied = found
        for info in self._store.list(self._prefix):
            if info.key.removeprefix(self._prefix) not in (marker.data, marker.file_name):
                self._store.delete(info.key)

    def _run(self) -> None:
        while True:
            is_last = self._stopping.wait(self._period_s)
            try:
                self.copy_newest()
            except (StoreError, OSError) as error:  # OSError: a newer one has just taken its place
                _log.warning("could not copy the newest checkpoint to the store: %s", error)
            if is_last:
                return


def restore(store: ObjectStore, *, run: str, generation: int, project: Path) -> int | None:
    """Bring the newest checkpoint of the try before that has one into the project folder; return its step.

    What the project's own snapshot holds there stays: the newest step counts for ``taas.checkpoint.latest``.
    """
    for earlier in range(generation - 1, 0, -1):
        prefix = RunKeys(run).checkpoints(earlier)
        marker = _newest_copy(store, prefix)
        if marker is not None:
            folder = project / FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            store.get_file(prefix + marker.data, folder / marker.data)
            write_json(folder / marker.file_name, json.dumps(asdict(marker)))
            return marker.step
    return None


def _newest_copy(store: ObjectStore, prefix: str) -> Marker | None:
    sizes = {info.key.removeprefix(prefix): info.num_bytes for info in store.list(prefix)}
    names = sorted(name for name in sizes if name.endswith(".json"))
    marks = [Marker(**json.loads(store.get(prefix + name))) for name in names]
    whole = [marker for marker in marks if sizes.get(marker.data) == marker.num_bytes]
    return max(whole, key=lambda marker: marker.step, default=None)
