"""What will run where: how epochs are cut into segments, and the plan of a run. Pure: no I/O, clock or environment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from taas.errors import RequestError
from taas.flavors import Flavor
from taas.request import LoaderRef, TrainRequest
from taas_tasks.values import Inspection, LoaderPlan, PinnedRequest, Plan, SegmentSizes

LANES = 32
PREP_FLAVOR = "c1.4"
_MIB = 1 << 20
_TARGET_BYTES = 48 * _MIB
_HARD_BYTES = 256 * _MIB
_MAX_SEGMENTS = 50_000
_STREAMS_BYTES = 1 << 30  # of the segments, one of each stream, that a machine gathers at once
_SEGMENT_SECONDS = (0.5, 20.0)  # of work; committing costs some 10 ms, a retry does half a segment again
_LEAST_SEGMENTS = 32  # of one producer


# --- segments -------------------------------------------------------------------------------------------------------


def _num_growing_rounds(sizes: SegmentSizes) -> int:
    """Rounds whose segments are smaller than ``largest``."""
    return (-(-sizes.largest // sizes.first) - 1).bit_length()


def segment_bounds(sizes: SegmentSizes, n: int) -> tuple[int, int]:
    """Return the elements [start, stop) of segment ``n`` of an epoch, as if the epoch had no end. O(1)."""
    growing = _num_growing_rounds(sizes)
    round_, place = divmod(n, sizes.machines)
    if round_ < growing:
        start = sizes.machines * sizes.first * ((1 << round_) - 1) + place * (sizes.first << round_)
        return start, start + (sizes.first << round_)
    grown = sizes.machines * sizes.first * ((1 << growing) - 1)
    start = grown + (n - sizes.machines * growing) * sizes.largest
    return start, start + sizes.largest


def segment_of(sizes: SegmentSizes, index: int) -> int:
    """Return the segment that holds element ``index`` of an epoch. O(1)."""
    growing = _num_growing_rounds(sizes)
    unit = sizes.machines * sizes.first
    grown = unit * ((1 << growing) - 1)
    if index >= grown:
        return sizes.machines * growing + (index - grown) // sizes.largest
    round_ = (index // unit + 1).bit_length() - 1
    return sizes.machines * round_ + (index - unit * ((1 << round_) - 1)) // (sizes.first << round_)


def num_segments(sizes: SegmentSizes, length: int) -> int:
    """Return how many segments an epoch of ``length`` elements has."""
    return segment_of(sizes, length - 1) + 1 if length > 0 else 0


def owner_of(epoch: int, n: int, *, machines: int) -> int:
    """Return the machine that a segment belongs to: ``n mod machines``, turned by one machine per epoch.

    The turn gives every machine work when an epoch has fewer segments than there are machines.
    """
    return (n + epoch) % machines


def stream_owner(stream: int, *, machines: int) -> int:
    """Return the machine that reads a stream, in every epoch: of a loader whose workers are its streams."""
    return stream % machines


def helper_of(epoch: int, n: int, *, machines: int, turn: int) -> int:
    """Return the machine that redoes a lagging segment in the ``turn``-th place (0 is the first helper).

    Spreads the segments of one slow machine over all others without any claim; never the owner.
    """
    others = machines - 1
    return (owner_of(epoch, n, machines=machines) + 1 + (n // machines + epoch + turn) % others) % machines


def padding_of(length: int) -> int:
    """Return how many elements an epoch of ``length`` elements lacks to a multiple of 32."""
    return -length % LANES


# --- epochs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Epochs:
    """How ``units`` elements fall into epochs. ``length`` is None where only the reading shows it (iterables).

    ``lengths`` holds each epoch's own length where they differ.
    """

    units: int
    length: int | None
    lengths: tuple[int, ...] = ()

    @property
    def num(self) -> int | None:
        """Epochs in all, the last, partial one included; None when not known beforehand."""
        if self.lengths:
            return len(self.lengths)
        return None if self.length is None else -(-self.units // self.length)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(self.lengths)]

    def length_of(self, epoch: int) -> int | None:
        """Return the elements of ``epoch`` that lie within ``units``."""
        if self.lengths:
            return self.lengths[epoch]
        if self.length is None:
            return None
        return max(0, min(self.length, self.units - epoch * self.length))

    def start_of(self, epoch: int) -> int | None:
        """Return the units before ``epoch``."""
        if self.lengths:
            return self._starts[epoch]
        return None if self.length is None else min(self.units, epoch * self.length)


def epochs_of(units: int, epoch_length: int | None, epoch_lengths: Sequence[int] = ()) -> Epochs:
    """Return how ``units`` elements fall into epochs of ``epoch_length`` (or of ``epoch_lengths``, cut at units).

    Raises:
        ValueError: An epoch has no elements, or ``epoch_lengths`` hold fewer than ``units``.
    """
    if epoch_length is not None and epoch_length <= 0:
        raise ValueError(f"an epoch must have elements, got a length of {epoch_length}")
    if not epoch_lengths:
        return Epochs(units, epoch_length)
    cut: list[int] = []
    for length, total in zip(epoch_lengths, accumulate(epoch_lengths), strict=True):
        if total - length >= units:
            break
        cut.append(length - max(0, total - units))
    if sum(cut) < units:
        raise ValueError(f"epochs of {sum(cut)} elements in all do not hold {units} units")
    return Epochs(units, None, tuple(cut))


def epochs_of_plan(plan: LoaderPlan) -> Epochs:
    """Return how the units of a loader fall into epochs."""
    return epochs_of(plan.units, plan.inspection.epoch_length, plan.inspection.epoch_lengths)


def segments_in_order(plan: LoaderPlan) -> Iterator[tuple[int, int]]:
    """Yield every segment ``(epoch, n)`` of a loader that is one stream of known length, in its order.

    Raises:
        ValueError: They are not known: an epoch is as long as it yields, or the loader's workers are its streams.
    """
    epochs = epochs_of_plan(plan)
    if epochs.num is None or plan.is_merged:
        raise ValueError(f"the segments of loader {plan.loader!r} are not known before they are committed")
    for epoch in range(epochs.num):
        for n in range(num_segments(plan.sizes, epochs.length_of(epoch) or 0)):
            yield epoch, n


def total_segments(plan: LoaderPlan) -> int | None:
    """Return how many segments a loader has in all; None where ``segments_in_order`` does not know them."""
    epochs = epochs_of_plan(plan)
    if plan.is_merged:
        return None
    if epochs.lengths:
        return sum(num_segments(plan.sizes, length) for length in epochs.lengths)
    if epochs.num is None or epochs.length is None:
        return None
    last = epochs.length_of(epochs.num - 1) or 0
    return (epochs.num - 1) * num_segments(plan.sizes, epochs.length) + num_segments(plan.sizes, last)


# --- sizes ----------------------------------------------------------------------------------------------------------


def choose_sizes(inspection: Inspection, *, units: int, machines: int, cache_bytes: int) -> SegmentSizes:
    """Return segment sizes: small first, then as large as is good for the store, the memory, the cache and training.

    At most about 48 MiB (more only where the units would be over about 50,000 segments), 20 s of work, and, as training
    waits for a segment's end, a 32nd of what one producer makes or half a second of work; but no less than 32 elements
    for the last two reasons.

    A producer is a machine, or each stream of a loader whose workers are its streams: the sizes are then each
    stream's, and as a machine may hold all streams and a host needs a part of each, and the next one, they share.

    Sizes are multiples of 32 elements, so that all lanes of a segment are even; for elements of several MiB, or
    fewer elements than the machines can share, they are 16, 8, … 1 elements.

    Raises:
        RequestError: One element is larger than the hosts' cache.
    """
    element_bytes = max(1.0, inspection.element_bytes)
    if element_bytes > cache_bytes:
        raise RequestError(
            f"one element of loader {inspection.loader!r} is {_bytes(element_bytes)}, the cache of a host is"
            f" {_bytes(cache_bytes)}; raise cache_gb or use a smaller batch",
            faults=[{"field": "cache_gb", "message": "smaller than one element"}],
        )
    if inspection.read_by == "workers":
        return _sizes_of_streams(inspection, units=units, cache_bytes=cache_bytes)
    at_once = max(1, inspection.num_loader_workers)
    good = _good_size(inspection, units=units, producers=machines, seconds=inspection.element_seconds / at_once)
    largest = _down_to_grain(min(good, cache_bytes / 8 / element_bytes))
    first = min(LANES, largest)
    in_epoch = min(units, inspection.epoch_length or units)
    if machines > 1 and in_epoch * 4 > units:  # many short epochs are shared epoch by epoch, few long ones within
        share = in_epoch / machines
        first = min(first, _down_to_grain(share))
        # a largest segment of more than a quarter of a machine's share leaves the machines unevenly busy at the end
        largest = max(first, min(largest, _down_to_grain(max(share / 4, first))))
    return SegmentSizes(first=first, largest=largest, machines=machines)


def _sizes_of_streams(inspection: Inspection, *, units: int, cache_bytes: int) -> SegmentSizes:
    streams, element_bytes = inspection.num_streams, max(1.0, inspection.element_bytes)
    good = _good_size(inspection, units=units, producers=streams, seconds=inspection.element_seconds)
    # K parts that ranks hold and K next ones, and half as much again: the bytes of an element are a mean
    in_cache = cache_bytes / max(8, 3 * streams) / element_bytes
    in_memory = _STREAMS_BYTES / streams / element_bytes
    largest = _down_to_grain(min(good, in_cache, in_memory))
    return SegmentSizes(first=min(LANES // math.gcd(streams, LANES), largest), largest=largest, machines=1)


def _good_size(inspection: Inspection, *, units: int, producers: int, seconds: float) -> float:
    """Return the elements that the largest segment should have; ``seconds``: of an element, where one is made."""
    element_bytes = max(1.0, inspection.element_bytes)
    least = -(-units // (_MAX_SEGMENTS * LANES)) * LANES
    short, long = (limit / max(1e-9, seconds) for limit in _SEGMENT_SECONDS)
    in_time = min(long, max(short, units / producers / _LEAST_SEGMENTS))
    in_bytes = max(_TARGET_BYTES, min(_HARD_BYTES, least * element_bytes)) / element_bytes
    return min(in_bytes, max(least, in_time))


def _down_to_grain(elements: float) -> int:
    """Return the next multiple of 32, below 32 the next power of two, that is not larger (at least 1)."""
    whole = max(1, int(elements))
    return whole // LANES * LANES if whole >= LANES else 1 << (whole.bit_length() - 1)


# --- the plan -------------------------------------------------------------------------------------------------------


def make_plan(pinned: PinnedRequest, inspections: Mapping[str, Inspection], flavors: Mapping[str, Flavor]) -> Plan:
    """Return what will run where for a pinned request, given what was found out about each of its loaders.

    Raises:
        RequestError: With the loaders as they are the request cannot be carried out; carries every fault.
    """
    request = pinned.request
    flavor = flavors[request.flavor]
    nnodes, nproc = _hosts(request, flavor)
    faults: list[dict[str, str]] = []
    warnings: list[str] = []
    loaders: dict[str, LoaderPlan] = {}
    for name, ref in sorted(request.loaders.items()) if request.cpus else []:
        loader = _plan_loader(request, name, ref, inspections[name])
        faults += _loader_faults(request, loader, nnodes * nproc)
        warnings += _loader_warnings(request, loader)
        loaders[name] = loader
    plan = Plan(
        run=pinned.run,
        run_id=pinned.run_id,
        project=request.project,
        snapshot=pinned.snapshot,
        loaders=loaders,
        seed=request.seed,
        randomness=request.randomness,
        remainder=request.remainder,
        flavor=request.flavor,
        nnodes=nnodes,
        nproc_per_node=nproc,
        cpus=request.cpus or 0,
        warnings=warnings,
    )
    faults += _cost_faults(request, plan, flavors)
    if faults:
        raise RequestError("; ".join(fault["message"] for fault in faults), faults=faults)
    return plan


def _hosts(request: TrainRequest, flavor: Flavor) -> tuple[int, int]:
    nproc = max(1, flavor.gpus)
    return max(1, request.gpus // nproc), nproc


def _plan_loader(request: TrainRequest, name: str, ref: LoaderRef, inspection: Inspection) -> LoaderPlan:
    units = ref.units or request.units or 0
    machines = useful_machines(inspection, cpus=request.cpus or 1)
    cache_bytes = int(request.cache_gb * (1 << 30)) // max(1, len(request.loaders))
    return LoaderPlan(
        loader=name,
        units=units,
        machines=machines,
        inspection=inspection,
        sizes=choose_sizes(inspection, units=units, machines=machines, cache_bytes=cache_bytes),
        payload=ref.payload,
        sha256=ref.sha256,
        source=ref.source,
    )


def useful_machines(inspection: Inspection, *, cpus: int) -> int:
    """Return how many machines can share the preparation of a loader.

    One for each stream of its workers at most, one for what a single process reads, or what each worker reads whole.
    """
    if inspection.read_by == "index":
        return cpus
    return min(cpus, inspection.num_streams) if inspection.is_shared else 1


def _loader_faults(request: TrainRequest, loader: LoaderPlan, world_size: int) -> list[dict[str, str]]:
    faults = []
    inspection = loader.inspection
    longest = min(loader.units, inspection.epoch_length or max(inspection.epoch_lengths, default=loader.units))
    if request.remainder == "drop" and longest < world_size:
        message = (
            f"loader {loader.loader!r} gives {longest} elements in a pass, fewer than the {world_size} ranks, and"
            ' remainder "drop" leaves no step; ask for more units, or use remainder "pad"'
        )
        faults.append({"field": "remainder", "message": message})
    return faults


def _loader_warnings(request: TrainRequest, loader: LoaderPlan) -> list[str]:
    name = f"loader {loader.loader!r}"
    warnings = [f"{name}: {text}" for text in loader.inspection.warnings]
    if loader.machines < (request.cpus or 1):
        warnings.append(
            f"{name}: {loader.machines} of the {request.cpus} machines asked for can share it, {_why(loader)}"
        )
    if loader.is_merged and loader.num_streams % loader.machines:
        warnings.append(f"{name}: {_unevenness(loader)}")
    total = _least_segments(loader)
    if total > 2 * _MAX_SEGMENTS:
        num = epochs_of_plan(loader).num or 1
        warnings.append(f"{name}: {total} segments, as an epoch has only {loader.units / num:.0f} elements")
    return warnings


def _least_segments(loader: LoaderPlan) -> int:
    """Return how many segments there are, for streams at least; 0 where nothing can be said."""
    num_epochs = epochs_of_plan(loader).num or 0
    return num_epochs * loader.num_streams if loader.is_merged else total_segments(loader) or 0


def _unevenness(loader: LoaderPlan) -> str:
    """Say what it means that the streams do not divide evenly among the machines."""
    most, more = -(-loader.num_streams // loader.machines), loader.num_streams % loader.machines
    text = (
        f"its {loader.num_streams} streams are uneven on {loader.machines} machines: {more} of them read {most},"
        f" the others {most - 1}"
    )
    enough = -(-loader.num_streams // most)
    return f"{text}; {enough} machines would be as quick" if enough < loader.machines else text


def _why(loader: LoaderPlan) -> str:
    """Say why no more machines are of use."""
    if not loader.is_merged:
        return "as one process must read it in sequence; num_workers of 1 or more would make streams that can be shared"
    if not loader.inspection.is_shared:
        return "as its dataset gives every loader worker all elements; share them by get_worker_info()"
    return f"as it has {loader.num_streams} loader worker(s), each a stream that one machine must read in sequence"


# --- for people -----------------------------------------------------------------------------------------------------


def preparation_seconds(loader: LoaderPlan) -> float:
    """Return the estimated seconds that one loader's machines need, from the measured seconds of an element.

    A machine makes as many elements at once as the loader has workers; of streams each makes one at a time, wherever
    it is read.
    """
    at_once = loader.num_streams if loader.is_merged else loader.machines * max(1, loader.inspection.num_loader_workers)
    return -(-loader.units // at_once) * loader.inspection.element_seconds


def preparation_price(plan: Plan, flavors: Mapping[str, Flavor]) -> float:
    """Return the estimated price of preparing all loaders."""
    price = flavors[PREP_FLAVOR].price
    return sum(preparation_seconds(loader) * loader.machines * price for loader in plan.loaders.values())


def _cost_faults(request: TrainRequest, plan: Plan, flavors: Mapping[str, Flavor]) -> list[dict[str, str]]:
    price = preparation_price(plan, flavors)
    if request.max_cost is None or price <= request.max_cost:
        return []
    message = (
        f"preparing the loaders alone is estimated at {price:,.0f} units of price, max_cost is"
        f" {request.max_cost:,.0f}; raise max_cost or ask for fewer units"
    )
    return [{"field": "max_cost", "message": message}]


def describe(plan: Plan, flavors: Mapping[str, Flavor]) -> str:
    """Return the plan as text for people: what runs where, bytes, seconds, price and warnings."""
    flavor = flavors[plan.flavor]
    lines = [
        f"run {plan.run_id} of project {plan.project} (snapshot {plan.snapshot[:12]})",
        f"train: {plan.nnodes} x {plan.flavor} = {plan.world_size} ranks,"
        f" {plan.nnodes * flavor.price:,.0f} units of price per second",
    ]
    lines += [_describe_loader(loader, flavors) for loader in plan.loaders.values()]
    if plan.loaders:
        price = preparation_price(plan, flavors)
        lines.append(f"preparation: about {price:,.0f} units of price; randomness {plan.randomness}, seed {plan.seed}")
    else:
        lines.append("preparation: none, training starts at once")
    return "\n".join(lines + [f"warning: {text}" for text in plan.warnings])


def _describe_loader(loader: LoaderPlan, flavors: Mapping[str, Flavor]) -> str:
    inspection = loader.inspection
    seconds = preparation_seconds(loader)
    epoch = f"epochs of {inspection.epoch_length}" if inspection.epoch_length else "epochs as long as it yields"
    streams = f" as {loader.num_streams} streams of its loader workers" if loader.is_merged else ""
    return (
        f"prepare {loader.loader}: {loader.units:,} elements ({epoch}) of about {_bytes(inspection.element_bytes)},"
        f" {_bytes(loader.units * inspection.element_bytes)} in all,{streams} on {loader.machines} x {PREP_FLAVOR}"
        f" in about {_seconds(seconds)}, {seconds * loader.machines * flavors[PREP_FLAVOR].price:,.0f} units of price;"
        f" segments of {loader.sizes.first} to {loader.sizes.largest} elements"
    )


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
