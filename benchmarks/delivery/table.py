"""The results as a table for people."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

_TARGETS: tuple[tuple[str, str, float, str], ...] = (
    ("mb_s_vs_best_peer", "MB/s against the best peer that stores the same elements", 2.0, ">="),
    ("cpu_vs_best_peer", "CPU s/GB against the best such peer", 0.5, "<="),
    ("mb_s_vs_best_peer_with_start", "the same, of one short epoch from nothing", 2.0, ">="),
    ("cpu_vs_best_peer_with_start", "the same, of one short epoch from nothing", 0.5, "<="),
    ("vs_ceiling", "against the client's ceiling (worst workload)", 0.8, ">="),
    ("prep_efficiency", "prep: one machine against the bare loader", 0.95, ">="),
    ("prep_scaling_8", "prep: 8 machines against 1", 7.5, ">="),
)


def markdown(results: dict[str, Any]) -> str:
    """Return the whole table as Markdown."""
    machine = results["machine"]
    about = f"{machine['cores']} cores, {machine['cpu']}, {results['seconds']} s"
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = ["# Delivery" + (" (quick)" if results.get("quick") else ""), "", about, "", versions, ""]
    for part in dict.fromkeys(lane["part"] for lane in results["lanes"]):
        lines += _part(part, [lane for lane in results["lanes"] if lane["part"] == part])
    return "\n".join([*lines, *_ratios(results["ratios"]), *_notes(results)]) + "\n"


def _part(part: str, lanes: list[dict[str, Any]]) -> list[str]:
    lines = [f"## {part}", ""]
    for group in dict.fromkeys((lane["workload"], lane["source"]) for lane in lanes):
        own = [lane for lane in lanes if (lane["workload"], lane["source"]) == group]
        lines += [f"### {' from '.join(one for one in group if one)}", ""]
        lines += _table(("lane", "median", "min..max", "", "CPU s/GB", "about"), map(_row, own))
    return lines


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    names = list(head)
    return [_line(names), _line("---" for _ in names), *map(_line, rows), ""]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _row(lane: dict[str, Any]) -> list[str]:
    if lane["void"]:
        return [lane["name"], "void", "", "", "", lane["void"].splitlines()[0][:160]]
    if not lane["values"]:
        return [lane["name"], "-", "", "", "", ""]
    spread = f"{number(lane['spread'][0])}..{number(lane['spread'][1])}"
    cpu = number(lane["cpu_s_per_gb"]) if lane["cpu_s_per_gb"] is not None else ""
    return [lane["name"], number(lane["median"]), spread, lane["unit"], cpu, _about(lane)]


def _about(lane: dict[str, Any]) -> str:
    told = [str(lane[name]) for name in ("setting",) if lane.get(name)]
    requests = lane.get("requests", [])
    requests = [one for one in (requests if isinstance(requests, list) else [requests]) if one is not None]
    if requests:
        told.append(f"{statistics.median(requests):.0f} requests")
    if "fetched_bytes" in lane:
        told.append(f"{lane['fetched_bytes'] / 1e6:.1f} MB fetched")
    return ", ".join(told)


def number(value: float) -> str:
    """Return a number with three digits that count."""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _ratios(ratios: dict[str, Any]) -> list[str]:
    lines = ["## Ratios", ""]
    rows = []
    for name, value in ratios.items():
        target = next((one for one in _TARGETS if one[0] == name), None)
        text = (
            ", ".join(f"{key} {_shown(one)}" for key, one in value.items())
            if isinstance(value, dict)
            else _shown(value)
        )
        rows.append([name, text, _judged(target, value) if target else ""])
    return lines + _table(("ratio", "value", "target"), rows)


def _shown(value: Any) -> str:
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _judged(target: tuple[str, str, float, str], value: Any) -> str:
    _, about, limit, sign = target
    numbers = [one for one in (value.values() if isinstance(value, dict) else [value]) if isinstance(one, int | float)]
    met = bool(numbers) and all(one >= limit if sign == ">=" else one <= limit for one in numbers)
    return f"{about}: {sign} {limit}: {'met' if met else 'MISSED'}"


def _notes(results: dict[str, Any]) -> list[str]:
    return ["## Notes", "", *(f"- {note}" for note in results["notes"])]
