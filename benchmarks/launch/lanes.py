"""Figures of all repetitions, and the table. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LAUNCHERS = ("taas", "torchrun", "operator")


@dataclass
class Lane:
    """One case by one launcher. ``void``: why its results were wrong; then no figure of it counts."""

    case: str
    launcher: str
    hosts: int
    values: dict[str, list[float]] = field(default_factory=dict)
    never: dict[str, list[float]] = field(default_factory=dict)  # figure -> seconds for which it was waited in vain
    messages: list[str] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)  # the machine's load when each launch began
    void: list[str] = field(default_factory=list)

    def add(self, figures: Mapping[str, float]) -> None:
        """Take one repetition's figures."""
        for name, value in figures.items():
            self.values.setdefault(name, []).append(value)

    def add_never(self, name: str, waited_s: float) -> None:
        """Take what did not come while it was waited for."""
        self.never.setdefault(name, []).append(waited_s)

    def as_json(self) -> dict[str, Any]:
        """Return everything, every single figure included."""
        figures = {
            name: {
                "median": round(statistics.median(found), 3),
                "min": round(min(found), 3),
                "max": round(max(found), 3),
                "all": found,
            }
            for name, found in self.values.items()
        }
        return {
            "case": self.case,
            "launcher": self.launcher,
            "hosts": self.hosts,
            "figures": figures,
            "never_within_s": self.never,
            "messages": self.messages,
            "loads": self.loads,
            "void": self.void,
        }


def cell(lane: Lane | None, figure: str) -> str:
    """Return a figure for people: "median (min..max)", "not within 120 s", both, "void" or "-"."""
    if lane is None:
        return "-"
    if lane.void:
        return "void"
    told = []
    if found := lane.values.get(figure):
        digits = 1 if figure.endswith("_s") else 0
        low, middle, high = (f"{value:.{digits}f}" for value in (min(found), statistics.median(found), max(found)))
        told.append(middle if low == high else f"{middle} ({low}..{high})")
    if waited := lane.never.get(figure):
        times = f" {len(waited)}x" if len(waited) > 1 or told else ""
        told.append(f"not within {min(waited):.0f} s{times}")
    return ", ".join(told) or "-"


def table(lanes: Sequence[Lane]) -> str:
    """Return all figures as Markdown, one row a figure, one column a launcher."""
    head = ("case", "hosts", "figure", *LAUNCHERS)
    lines = [_row(head), _row("---" for _ in head)]
    for case, hosts in dict.fromkeys((lane.case, lane.hosts) for lane in lanes):
        own = {lane.launcher: lane for lane in lanes if (lane.case, lane.hosts) == (case, hosts)}
        names = dict.fromkeys(name for launcher in LAUNCHERS if launcher in own for name in _figures(own[launcher]))
        for name in names:
            shown = f"{name.removesuffix('_s')}, s" if name.endswith("_s") else name
            lines.append(_row((case, str(hosts), shown, *(cell(own.get(one), name) for one in LAUNCHERS))))
    voids = [f"- void: {lane.case} on {lane.hosts}, {lane.launcher}: {why}" for lane in lanes for why in lane.void]
    return "\n".join([*lines, *voids])


def _figures(lane: Lane) -> list[str]:
    return list(dict.fromkeys([*lane.values, *lane.never]))


def _row(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Return the order of one repetition: each launcher comes first equally often."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def parts(reached: Mapping[str, float | None], *, start: float) -> dict[str, float]:
    """Return the seconds of each part: from the one before it (at first from ``start``) until it was reached.

    A part whose end is not known is left out, and the next one takes its seconds too.
    """
    found, before = {}, start
    for name, at in reached.items():
        if at is not None:
            found[name] = at - before
            before = at
    return found
