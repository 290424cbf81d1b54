"""What a chaos run will do, drawn from its seed alone: which requests, and which faults when. No I/O, no clock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

FaultKind = Literal[
    "prep process",
    "rank",
    "node agent",
    "supervisor",
    "ssh connections",
    "host killed",
    "host paused",
    "network cut",
    "task process",
    "triggerer",
    "scheduler",
    "S3 server",
]
FAULT_KINDS: tuple[FaultKind, ...] = FaultKind.__args__  # type: ignore[attr-defined]
RequestKind = Literal["plain", "stream", "restarted"]

_FIRST_S, _PAUSE_S = 6.0, (3.0, 8.0)
_LASTS_S = (4.0, 15.0)


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at_s: Seconds after the start.
        draw: In [0, 1): picks one of the targets that are there then, sorted by name.
        lasts_s: For how long, where it is mended later (a host, a network).
    """

    at_s: float
    kind: FaultKind
    draw: float
    lasts_s: float


@dataclass(frozen=True)
class Wanted:
    """One request: ``num_hosts`` GPU hosts; ``cpus`` preparing machines and ``units`` elements, 0 without a loader."""

    number: int
    kind: RequestKind
    num_hosts: int
    cpus: int = 0
    units: int = 0


def faults(seed: int) -> Iterator[Fault]:
    """Yield faults without end. In each round every kind comes once, in an order of its own."""
    drawn = random.Random(f"faults {seed}")
    at_s = _FIRST_S
    while True:
        for kind in drawn.sample(FAULT_KINDS, len(FAULT_KINDS)):
            yield Fault(at_s, kind, drawn.random(), drawn.uniform(*_LASTS_S))
            at_s += drawn.uniform(*_PAUSE_S)


def requests(seed: int, count: int) -> list[Wanted]:
    """Return the requests of a run; of ten, six read prepared data."""
    drawn = random.Random(f"requests {seed}")
    kinds: list[RequestKind] = ["stream", "stream", "plain", "restarted", "stream", "restarted", "stream", "plain"]
    return [_wanted(number, kinds[number % len(kinds)], drawn) for number in range(count)]


def _wanted(number: int, kind: RequestKind, drawn: random.Random) -> Wanted:
    num_hosts = drawn.choice((1, 2))
    if kind == "plain":
        return Wanted(number, kind, num_hosts)
    units = drawn.randrange(150, 260) if kind == "stream" else drawn.randrange(60, 100)  # one epoch has 100
    return Wanted(number, kind, num_hosts, cpus=drawn.randint(1, 3), units=units)
