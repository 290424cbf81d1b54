"""The program that inspects one loader on a c1.4: ``python -m taas_tasks.prep.inspect_program INPUT.json``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from taas_tasks.layout import RunKeys
from taas_tasks.prep.commit import Producer
from taas_tasks.prep.inspect_loader import inspect_loader
from taas_tasks.prep.opening import open_loader
from taas_tasks.prep.program import leave, run_program
from taas_tasks.program_values import InspectInput
from taas_tasks.project import materialise
from taas_tasks.store.base import ObjectStore


def run(given: InspectInput, store: ObjectStore, folder: Path) -> dict[str, Any]:
    """Inspect the loader and put the ``Inspection``; return its key. ``folder`` becomes the project's folder."""
    materialise(store, given.project, given.snapshot, folder)

    def open_it() -> DataLoader[Any]:
        return open_loader(given, folder, store)

    inspection = inspect_loader(
        open_it,
        producer=Producer(given.run, given.loader, machine=0, host=given.host, generation=given.generation),
        store=store,
        seed=given.seed,
        randomness=given.randomness,
        units=given.units,
        allow_pickle=given.allow_pickle,
    )
    key = RunKeys(given.run).inspection(given.loader)
    store.put(key, inspection.to_bytes())
    return {"inspection": key}


def main(argv: list[str]) -> int:
    """Run the program; see ``taas_tasks.prep.program.run_program``."""
    return run_program(argv, InspectInput, run)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
