"""What the parts of the benchmark share: the options they are given and what they give back."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Options:
    """How long to measure and where to put files. ``repetitions`` is at least 5 unless ``quick``."""

    quick: bool
    repetitions: int
    out: Path  # var/bench
    scratch: Path  # an empty folder of this run, in memory where there is /dev/shm; removed at the end


@dataclass
class Lane:
    """One lane's results, a value per repetition. ``void`` says why they do not count (wrong ids, order, contents)."""

    part: str  # delivery, prep, overlap, memory, scale
    name: str
    workload: str
    source: str
    unit: str  # "MB/s", "elements/s", "s", "MiB"
    values: list[float]
    cpu_s_per_gb: list[float] = field(default_factory=list)
    void: str | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """The median value."""
        return statistics.median(self.values) if self.values else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            **{name: getattr(self, name) for name in ("part", "name", "workload", "source", "unit", "values", "void")},
            "median": self.median,
            "spread": [min(self.values), max(self.values)] if self.values else [],
            "cpu_s_per_gb": statistics.median(self.cpu_s_per_gb) if self.cpu_s_per_gb else None,
            **self.more,
        }


@dataclass
class Section:
    """What a part of the benchmark found: its lanes, its entries of ``ratios``, and sentences for people."""

    lanes: list[Lane] = field(default_factory=list)
    ratios: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
