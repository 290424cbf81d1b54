"""A run's report as text for a terminal, from its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_ACCOUNT = ("asked", "extracted", "committed", "delivered", "consumed", "dropped", "unread", "padded", "replayed")


def report_text(report: Mapping[str, Any]) -> str:
    """Return the report in lines: state and verdict, accounting per loader, phases, cost, artifacts, warnings."""
    return "\n".join(_lines(report))


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"run {report['run_id']}: {report['state']}"
    if report.get("verdict"):
        yield f"verdict: {report['verdict']}"
    yield from _loader_lines(report.get("loaders") or {}, has_failed=report["state"] == "failed")
    yield from _phase_lines(report.get("phases") or [])
    cost = report.get("cost") or {}
    yield from _stall_lines(report.get("gpu_stall") or {})
    if cost:
        yield "cost in units of price: " + ", ".join(f"{name} {value:,.0f}" for name, value in cost.items())
    yield from _artifact_lines(report)
    yield from (f"warning: {warning}" for warning in report.get("warnings") or [])


def _loader_lines(loaders: Mapping[str, Any], *, has_failed: bool) -> Iterator[str]:
    for name, account in loaders.items():
        counts = ", ".join(f"{word} {account[word]}" for word in _ACCOUNT if account.get(word))
        yield f"loader {name}: {counts or 'nothing'}" + (
            "" if has_failed or account.get("explained", True) else " - UNEXPLAINED"
        )
        yield from (f"  {note}" for note in account.get("notes") or [])


def _phase_lines(phases: list[Mapping[str, Any]]) -> Iterator[str]:
    width = max((len(phase["name"]) for phase in phases), default=0)
    for phase in phases:
        if phase["started_at"] is None:
            continue
        line = f"  {phase['name']:<{width}} {phase['seconds']:10.1f} s"
        if phase.get("flavor"):
            line += f" {phase['cost_units']:14,.0f} units: {phase['machine_seconds']:.1f} s of {phase['flavor']}"
        yield line


def _stall_lines(stall: Mapping[str, float]) -> Iterator[str]:
    if stall:
        yield (
            f"waiting for data: {stall['stall_fraction']:.1%} of the ranks' time; "
            f"rank {stall['worst_rank']:.0f} waited longest, {stall['worst_wait_s']:.1f} s"
        )


def _on_one_line(name: str) -> str:
    """Return a name with its line breaks and other control characters shown as escapes."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in name)


def _artifact_lines(report: Mapping[str, Any]) -> Iterator[str]:
    files = report.get("artifacts") or []
    if not files:
        yield "artifacts: none"
        return
    record = report.get("artifact_record")
    yield f"artifacts: {len(files)} file(s)" + (f", record {record} of the project" if record is not None else "")
    yield from (
        f"  {_on_one_line(file['path'])}  {file['bytes']} bytes  sha256 {file['sha256'][:12]}" for file in files
    )
