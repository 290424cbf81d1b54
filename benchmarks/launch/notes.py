"""What ranks have noted (``train.py``), read back. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """A rank reached something. ``pid``: in its host's namespace; ``at``: unix seconds, one clock for all hosts."""

    host: str
    rank: int
    pid: int
    event: str
    at: float


def read(host: str, text: str) -> list[Note]:
    """Return the notes of a host; a line that a killed rank left unfinished is none."""
    found = []
    for line in text.splitlines():
        try:
            found.append(Note(host=host, **json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def slowest(
    notes: Sequence[Note], event: str, *, world_size: int, without: Collection[tuple[str, int]] = ()
) -> float | None:
    """Return when the last rank first reached ``event``, or None while one has not.

    Args:
        notes: of all hosts.
        event: "script", "rendezvous", "step" or "done".
        world_size: the ranks that there must be.
        without: processes (host, pid) that do not count, as those before a restart.
    """
    first: dict[int, float] = {}
    for one in notes:
        if one.event == event and (one.host, one.pid) not in without:
            first[one.rank] = min(one.at, first.get(one.rank, one.at))
    return max(first.values()) if sorted(first) == list(range(world_size)) else None


def fault(notes: Sequence[Note], *, world_size: int) -> str | None:
    """Return why the results are wrong, or None when they are right: a wrong sum, ranks that there should not be."""
    wrong = sorted({one.rank for one in notes if one.event == "wrong"})
    if wrong:
        return f"the all-reduce gave a wrong sum on rank(s) {wrong}"
    strangers = sorted({one.rank for one in notes if not 0 <= one.rank < world_size})
    return f"there are rank(s) {strangers} in a world of {world_size}" if strangers else None
