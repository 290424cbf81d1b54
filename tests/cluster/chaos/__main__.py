"""``python -m tests.cluster.chaos [--seed N] [--requests 20]``: the long chaos run; ``make chaos`` calls it."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.cluster.chaos.run import Chaos, run, world
from tests.cluster.chaos.schedule import FAULT_KINDS
from tests.cluster.podman import why_not


def main() -> int:
    """Run, print the tables, leave ``var/chaos/SEED.json``; 1 when something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10_000), help="default: drawn")
    parser.add_argument("--requests", type=int, default=20, help="how many requests (20)")
    asked = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no cluster on this machine: {reason}")
    print(f"seed {asked.seed}: make chaos SEED={asked.seed} REQUESTS={asked.requests}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="taas-chaos-"))
    folder.chmod(0o711)  # PostgreSQL runs as another user when we are root
    print(f"logs: {folder}/stack/logs", flush=True)
    with world(folder) as runs:
        found = run(runs, seed=asked.seed, count=asked.requests)
    out = Path("var") / "chaos" / f"{asked.seed}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(found.to_json())
    print(table(found))
    print(f"{out}: {'all is well' if found.is_well else 'NOT WELL'}")
    return 0 if found.is_well else 1


def table(found: Chaos) -> str:
    """Return what happened: by kind of fault, by request, and all that is wrong."""
    lines = [
        "",
        "| fault | applied | nothing to hit | requests it struck | of these succeeded |",
        "|---|---|---|---|---|",
    ]
    applied = Counter(hit.kind for hit in found.hits)
    for kind in FAULT_KINDS:
        struck = [one for one in found.outcomes if kind in one.struck_by]
        well = sum(one.state == "success" for one in struck)
        lines.append(f"| {kind} | {applied[kind]} | {found.missed.get(kind, 0)} | {len(struck)} | {well} |")
    lines += ["", "| request | hosts | machines | units | s | ended | verdict |", "|---|---|---|---|---|---|---|"]
    for one in found.outcomes:
        verdict = (one.verdict or "").splitlines()[:1]
        asked = f"{one.wanted.num_hosts} | {one.wanted.cpus} | {one.wanted.units}"
        lines.append(f"| {one.request} | {asked} | {one.seconds:.0f} | {one.state} | {''.join(verdict)[:160]} |")
    wrong = [*found.wrong, *(f"{one.request}: {text}" for one in found.outcomes for text in one.wrong)]
    return "\n".join([*lines, *(["", "WRONG:", *(f"- {text}" for text in wrong)] if wrong else [])])


if __name__ == "__main__":
    sys.exit(main())
