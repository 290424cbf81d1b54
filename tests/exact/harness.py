"""One loader's way from end to end: inspected, planned, prepared, delivered to every rank, accounted for, compared.

Everything is the product's own code but the oracle, which is torch's DataLoader in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import DataLoader

from taas.errors import StoreUnavailable
from taas.flavors import FLAVORS
from taas.request import LoaderRef, TrainRequest
from taas_tasks.accounting import account_loader
from taas_tasks.delivery.counters import read_passes
from taas_tasks.delivery.loader import DeliveredLoader
from taas_tasks.layout import run_key
from taas_tasks.plan import make_plan
from taas_tasks.prep.commit import Producer
from taas_tasks.prep.elements import element_seeded
from taas_tasks.prep.inspect_loader import inspect_loader
from taas_tasks.prep.prepare_program import order_of
from taas_tasks.prep.produce import Tally, produce
from taas_tasks.prep.produce_streams import produce_streams
from taas_tasks.prep.sequential import produce_in_sequence
from taas_tasks.prep.stream_starts import starts_of
from taas_tasks.prep.work import Pace
from taas_tasks.result_values import RankPass
from taas_tasks.store.base import ObjectStore
from taas_tasks.store.memory import MemoryStore
from taas_tasks.values import Inspection, LaunchPlan, LoaderAccount, LoaderPlan, PinnedRequest, Plan
from tests.delivery.support import Host, feeding
from tests.exact import loaders
from tests.prep import oracle
from tests.prep.stream_cases import QUICK, Turn

RUN_ID = "manual__exact"
RUN = run_key(RUN_ID)
NAME = "data"
FAST = Pace(refresh_s=0.0, patience_s=0.05, poll_s=0.01)
_FLAVOR_OF_GPUS = {1: "g1.1", 2: "g1.2", 4: "g1.4", 8: "g2.8"}


@dataclass(frozen=True)
class Scenario:
    """What is asked of one loader, and what goes wrong on the way.

    ``kills``: tries that die, as (machine, number of its writes to the store before it does), in this order.
    ``replays``: passes beyond those that were prepared. ``first`` and ``largest``: sizes of segments.
    """

    kind: str
    size: int = 20
    workers: int = 0
    units: int = 45
    machines: int = 1
    nnodes: int = 1
    nproc: int = 2
    remainder: Literal["pad", "drop"] = "pad"
    randomness: Literal["element", "exact"] = "element"
    seed: int = 0
    first: int = 4
    largest: int = 16
    cache_bytes: int = 1 << 22
    kills: tuple[tuple[int, int], ...] = ()
    replays: int = 0
    name: str = NAME

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nnodes * self.nproc

    @property
    def traits(self) -> loaders.Kind:
        """What is known of the kind."""
        return loaders.KINDS[self.kind]

    def make(self) -> DataLoader[Any]:
        """Return a fresh loader."""
        return loaders.make(self.kind, self.size, self.workers)


# --- the oracle ------------------------------------------------------------------------------------------------------


def local_epochs(scenario: Scenario) -> list[list[Any]]:
    """Return what the loader yields in this process, epoch by epoch, cut at the units.

    The bare loader wherever that is promised: exact, iterables, and whatever is not random. Else the loader with the
    seeding per element.
    """
    loader = scenario.make()
    if scenario.randomness == "exact" or scenario.traits.is_told or scenario.traits.is_iterable:
        stream = oracle.local_stream(loader, seed=scenario.seed, units=scenario.units)
    else:
        seeded = element_seeded(loader, seed=scenario.seed)
        stream = oracle.local_stream(loader, seed=scenario.seed, units=scenario.units, passes=lambda: iter(seeded))
    return [[item.element for item in items] for _, items in groupby(stream, key=lambda item: item.epoch)]


def steps_of(length: int, scenario: Scenario, *, offset: int = 0) -> int:
    """Return the steps of a pass: the rule of the design, written down on its own."""
    rest = length - offset
    return rest // scenario.world_size if scenario.remainder == "drop" else -(-rest // scenario.world_size)


def due(epoch: list[Any], rank: int, scenario: Scenario, *, offset: int = 0) -> list[Any]:
    """Return what a rank is to receive of an epoch: element ``offset + t * world_size + rank`` at step t."""
    steps = steps_of(len(epoch), scenario, offset=offset)
    return [epoch[(offset + t * scenario.world_size + rank) % len(epoch)] for t in range(steps)]


# --- preparing -------------------------------------------------------------------------------------------------------


def producer(scenario: Scenario, machine: int, *, generation: int = 1) -> Producer:
    """Return who prepares."""
    return Producer(RUN, scenario.name, machine, f"c1-{machine}", generation)


def pinned(*scenarios: Scenario, ref: LoaderRef | None = None) -> PinnedRequest:
    """Return the request for the loaders of these scenarios; what is of the run is the first one's."""
    first = scenarios[0]
    source = ref or LoaderRef(source="data.py:make")
    request = TrainRequest(
        project="demo",
        script="train.py",
        flavor=_FLAVOR_OF_GPUS[first.nproc],
        gpus=first.world_size,
        cpus=first.machines,
        units=first.units,
        loaders={one.name: source.model_copy(update={"units": one.units}) for one in scenarios},
        seed=first.seed,
        randomness=first.randomness,
        remainder=first.remainder,
    )
    return PinnedRequest(run_id=RUN_ID, run=RUN, request=request, snapshot="0" * 64, base_record=0)


def inspected(store: ObjectStore, scenario: Scenario) -> Inspection:
    """Inspect the loader, for real."""
    return inspect_loader(
        scenario.make,
        producer=producer(scenario, 0),
        store=store,
        seed=scenario.seed,
        randomness=scenario.randomness,
        units=scenario.units,
        allow_pickle=False,
    )


def planned(store: ObjectStore, *scenarios: Scenario) -> Plan:
    """Inspect and plan."""
    inspections = {one.name: inspected(store, one) for one in scenarios}
    return sized(make_plan(pinned(*scenarios), inspections, FLAVORS), *scenarios)


def sized(plan: Plan, *scenarios: Scenario) -> Plan:
    """Return the plan with segments of the scenarios' sizes."""
    changed = dict(plan.loaders)
    for one in scenarios:
        loader = plan.loaders[one.name]
        sizes = loader.sizes.model_copy(update={"first": one.first, "largest": max(one.first, one.largest)})
        changed[one.name] = loader.model_copy(update={"sizes": sizes})
    return plan.model_copy(update={"loaders": changed})


class Killed(StoreUnavailable):
    """Stands for a SIGKILL: the try is over, what it has written stays."""


class Dying(Turn):
    """One try's view of the store: dies at a write, or when it has waited long for what other machines write."""

    def __init__(self, shared: MemoryStore, *, writes: int) -> None:
        super().__init__(shared)
        self._left = writes

    def put(self, key: str, data: Any) -> None:
        self._write()
        super().put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self._write()
        return super().put_if_absent(key, data)

    def _write(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Killed("killed")


def prepare_machine(store: ObjectStore, scenario: Scenario, plan: Plan, *, machine: int, generation: int = 1) -> Tally:
    """Prepare one machine's share in this process, as the program does."""
    loader, loader_plan = scenario.make(), plan.loaders[scenario.name]
    who = producer(scenario, machine, generation=generation)
    common: dict[str, Any] = {"producer": who, "store": store, "allow_pickle": False}
    if loader_plan.inspection.read_by == "process":
        return produce_in_sequence(loader, loader_plan, seed=plan.seed, is_exact=plan.randomness == "exact", **common)
    if loader_plan.is_merged:
        starts = starts_of(loader, loader_plan, store=store, run=RUN, seed=plan.seed)
        return produce_streams(loader, starts, loader_plan, pace=QUICK, **common)
    order = order_of(loader, loader_plan, store=store, run=RUN, seed=plan.seed)
    return produce(loader, order, loader_plan, seed=plan.seed, pace=FAST, **common)


def prepare(store: MemoryStore, scenario: Scenario, plan: Plan) -> int:
    """Prepare all units: the tries that are to die in turn, then all machines until each has done; return the tries.

    A machine that waits for what others are to write gives its turn up: its next try is a retry.
    """
    machines = plan.loaders[scenario.name].machines
    generations = dict.fromkeys(range(machines), 0)
    done: set[int] = set()
    tries = [(machine % machines, writes) for machine, writes in scenario.kills]
    for machine, writes in [*tries, *((machine, 1 << 30) for machine in range(machines))] + [
        (turn % machines, 1 << 30) for turn in range(40 * machines)
    ]:
        if len(done) == machines:
            break
        generations[machine] += 1
        try:
            dying = Dying(store, writes=writes)
            prepare_machine(dying, scenario, plan, machine=machine, generation=generations[machine])
            done.add(machine)
        except StoreUnavailable as error:
            assert isinstance(error, Killed) or "turn is over" in error.message, error
    assert len(done) == machines, "the machines wait for each other"
    return sum(generations.values())


# --- delivering ------------------------------------------------------------------------------------------------------


def launched(plan: Plan, *, cache_bytes: int = 1 << 22, generation: int = 1) -> LaunchPlan:
    """Return what the node agents would be given."""
    return LaunchPlan(
        run=plan.run,
        run_id=plan.run_id,
        project=plan.project,
        snapshot=plan.snapshot,
        generation=generation,
        nnodes=plan.nnodes,
        nproc_per_node=plan.nproc_per_node,
        flavor=plan.flavor,
        emulate_gpus=True,
        loaders=plan.loaders,
        seed=plan.seed,
        randomness=plan.randomness,
        remainder=plan.remainder,
        cache_bytes=cache_bytes,
    )


@dataclass
class Ranks:
    """All ranks of a training; their loaders are iterated step by step, as in synchronous training."""

    hosts: list[Host]
    loaders: list[DeliveredLoader] = field(default_factory=list)

    @property
    def passes(self) -> list[RankPass]:
        """What the ranks' counters tell."""
        return [one for host in self.hosts for one in read_passes(host.counters_dir)]

    def one_pass(self, *, limit: int | None = None) -> list[list[Any]]:
        """Return what each rank receives in its next pass, or in the first ``limit`` steps of it."""
        got: list[list[Any]] = [[] for _ in self.loaders]
        iterators = [iter(loader) for loader in self.loaders]
        going = set(range(len(iterators)))
        while going and (limit is None or len(got[0]) < limit):
            for rank in sorted(going):
                try:
                    got[rank].append(next(iterators[rank]))
                except StopIteration:
                    going.discard(rank)
        return got


@contextmanager
def all_ranks(store: ObjectStore, launch: LaunchPlan, folder: Path, *, name: str = NAME) -> Iterator[Ranks]:
    """Feeders on all hosts, and the loader of every rank."""
    with ExitStack() as stack:
        hosts = [stack.enter_context(feeding(store, launch, folder, node_rank=node)) for node in range(launch.nnodes)]
        yield Ranks(hosts, [host.loader(local, name) for host in hosts for local in range(launch.nproc_per_node)])


# --- comparing -------------------------------------------------------------------------------------------------------


def assert_pass(
    got: list[list[Any]], epoch: list[Any], scenario: Scenario, *, offset: int = 0, where: str = ""
) -> None:
    """Check that every rank received what it was due, all in the same number of steps."""
    steps = steps_of(len(epoch), scenario, offset=offset)
    assert [len(mine) for mine in got] == [steps] * scenario.world_size, f"{where}: steps differ"
    for rank, mine in enumerate(got):
        for step, (element, wanted) in enumerate(zip(mine, due(epoch, rank, scenario, offset=offset), strict=True)):
            assert oracle.equal(element, wanted), f"{where}: rank {rank}, step {step}: {element!r} is not {wanted!r}"


def passes_of(epochs: list[list[Any]], scenario: Scenario, plan: LoaderPlan) -> list[int]:
    """Return the epochs that passes read in order: a last one without a step is passed over where that is known."""
    numbers = list(range(len(epochs)))
    if plan.inspection.epoch_length is not None or plan.inspection.epoch_lengths:
        while steps_of(len(epochs[numbers[-1]]), scenario) == 0:
            numbers.pop()
    return numbers


def assert_books(
    store: ObjectStore, scenario: Scenario, plan: LoaderPlan, ranks: Ranks, epochs: list[list[Any]], numbers: list[int]
) -> LoaderAccount:
    """Check that the accounting closes, is explained, and says what the rule says."""
    account = account_loader(
        plan,
        records=oracle.records_of(store, RUN, scenario.name),
        passes=[one for one in ranks.passes if one.loader == scenario.name],
        world_size=scenario.world_size,
        remainder=scenario.remainder,
        delivered=0,
    )
    lengths = [len(epoch) for epoch in epochs]
    steps = [steps_of(lengths[number], scenario) for number in numbers]
    assert account.explained, account.notes
    assert (account.asked, account.extracted, account.committed) == (scenario.units,) * 3
    assert account.consumed == sum(steps) * scenario.world_size
    assert account.consumed == (
        account.committed - account.dropped - account.unread + account.padded + account.replayed
    )
    once = {number: steps_of(lengths[number], scenario) * scenario.world_size for number in set(numbers)}
    assert account.padded == sum(max(0, taken - lengths[number]) for number, taken in once.items())
    assert account.replayed == account.consumed - sum(once.values())
    left = sum(lengths) - sum(min(taken, lengths[number]) for number, taken in once.items())
    assert account.dropped + account.unread == left
    assert left == 0 or scenario.remainder == "drop"
    assert {rank: told["consumed"] for rank, told in account.per_rank.items()} == (
        {str(rank): sum(steps) for rank in range(scenario.world_size)}
    )
    return account


def check(scenario: Scenario, folder: Path) -> LoaderAccount:
    """Take one scenario from end to end and compare; returns the accounting."""
    store = MemoryStore()
    plan = planned(store, scenario)
    prepare(store, scenario, plan)
    return check_delivery(store, scenario, plan, folder, epochs=local_epochs(scenario))


def check_delivery(
    store: ObjectStore, scenario: Scenario, plan: Plan, folder: Path, *, epochs: list[list[Any]]
) -> LoaderAccount:
    """Deliver what is (being) prepared to all ranks and compare it with what torch yields here."""
    loader_plan = plan.loaders[scenario.name]
    numbers = passes_of(epochs, scenario, loader_plan)
    numbers = [numbers[at % len(numbers)] for at in range(len(numbers) + scenario.replays)]
    launch = launched(plan, cache_bytes=scenario.cache_bytes)
    with all_ranks(store, launch, folder, name=scenario.name) as ranks:
        for at, number in enumerate(numbers):
            where = f"{scenario}, pass {at}, epoch {number}"
            assert_pass(ranks.one_pass(), epochs[number], scenario, where=where)
        return assert_books(store, scenario, loader_plan, ranks, epochs, numbers)
