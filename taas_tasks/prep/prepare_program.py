"""The program that prepares one machine's share: ``python -m taas_tasks.prep.prepare_program INPUT.json``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from taas_tasks.layout import RunKeys
from taas_tasks.prep.commit import Producer
from taas_tasks.prep.lost_records import LostRecord, MakeAgain, prepare_again
from taas_tasks.prep.opening import open_loader
from taas_tasks.prep.order import Order, RecipeOrder
from taas_tasks.prep.order_chunks import ChunkOrder, write_lost_chunks
from taas_tasks.prep.produce import Abort, produce
from taas_tasks.prep.produce_streams import produce_streams
from taas_tasks.prep.program import leave, run_program
from taas_tasks.prep.sequential import produce_in_sequence
from taas_tasks.prep.stream_starts import starts_of
from taas_tasks.prep.work import Pace
from taas_tasks.program_values import PrepareInput
from taas_tasks.project import materialise
from taas_tasks.store.base import ObjectStore
from taas_tasks.values import LoaderPlan, Plan


def run(given: PrepareInput, store: ObjectStore, folder: Path, *, pace: Pace | None = None) -> dict[str, Any]:
    """Prepare this machine's share; return what was committed. ``folder`` becomes the project's folder."""
    abort = Abort(store, given.run, clock=time.monotonic)

    def again(lost: LostRecord) -> None:
        prepare_again(lost, given, check=abort.check)

    result = prepare_share(given, store, folder, pace=pace, make_again=again)
    store.put(RunKeys(given.run).prepared(given.loader, given.machine), b"")
    return result


def prepare_share(
    given: PrepareInput,
    store: ObjectStore,
    folder: Path,
    *,
    pace: Pace | None = None,
    only_stream: int | None = None,
    make_again: MakeAgain | None = None,
) -> dict[str, Any]:
    """The same without saying that it is done; for the last three see ``produce_streams``."""
    plan = Plan.model_validate_json(store.get(given.plan))
    loader_plan = plan.loaders[given.loader]
    producer = Producer(given.run, given.loader, given.machine, given.host, given.generation)
    materialise(store, given.project, given.snapshot, folder)
    loader = open_loader(loader_plan, folder, store)

    def write_order_again() -> None:
        write_lost_chunks(
            open_loader(loader_plan, folder, store),
            name=given.loader,
            seed=plan.seed,
            units=loader_plan.units,
            store=store,
            keys=RunKeys(given.run),
        )

    if loader.num_workers > 0:
        torch.set_num_threads(1)  # this process only copies: torch's threads would spin beside the loader workers
    if loader_plan.inspection.read_by == "process":
        return produce_in_sequence(
            loader,
            loader_plan,
            producer=producer,
            store=store,
            seed=plan.seed,
            allow_pickle=given.allow_pickle,
            is_exact=plan.randomness == "exact",
        ).to_dict()
    if loader_plan.is_merged:
        return produce_streams(
            loader,
            starts_of(loader, loader_plan, store=store, run=given.run, seed=plan.seed, write_again=write_order_again),
            loader_plan,
            producer=producer,
            store=store,
            allow_pickle=given.allow_pickle,
            pace=pace,
            only_stream=only_stream,
            make_again=make_again,
        ).to_dict()
    return produce(
        loader,
        order_of(loader, loader_plan, store=store, run=given.run, seed=plan.seed, write_again=write_order_again),
        loader_plan,
        producer=producer,
        store=store,
        seed=plan.seed,
        allow_pickle=given.allow_pickle,
        pace=pace,
    ).to_dict()


def order_of(
    loader: DataLoader[Any],
    plan: LoaderPlan,
    *,
    store: ObjectStore,
    run: str,
    seed: int,
    write_again: Callable[[], None] | None = None,
) -> Order:
    """Return the order of a random-access loader: its recipe, or what the inspection wrote."""
    if plan.inspection.order == "recipe":
        return RecipeOrder(loader, seed=seed)
    chunk_elements = plan.inspection.order_chunk_elements
    return ChunkOrder(store, RunKeys(run), name=plan.loader, chunk_elements=chunk_elements, write_again=write_again)


def main(argv: list[str]) -> int:
    """Run the program; see ``taas_tasks.prep.program.run_program``."""
    return run_program(argv, PrepareInput, run)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
