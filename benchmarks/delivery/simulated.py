"""A run of the seed's own size whose ledger is made up as it is asked for, to measure what following it costs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from taas.errors import ObjectMissing
from taas.flavors import FLAVORS
from taas.request import LoaderRef, TrainRequest
from taas_tasks.layout import RunKeys
from taas_tasks.ledger import read_record
from taas_tasks.plan import make_plan, num_segments, segment_bounds
from taas_tasks.result_values import NodeResult, RankPass, RankResult
from taas_tasks.store.base import ObjectInfo
from taas_tasks.store.memory import MemoryStore
from taas_tasks.streams import lengths_of_streams
from taas_tasks.values import Inspection, JobRecord, LoaderPlan, PinnedRequest, Plan, ShardRecord, Versions

UNITS = 20_480_000
GPUS = 32
CPUS = 8
RUN = "scale"
LOADER = "data_loader"
ELEMENT_BYTES = {"tiny": 100.0, "image": 150_000.0}
_LANES = ",".join(
    f'{{"lane":{lane},"offset":{1000 + 4096 * lane},"length":4096,"num_elements":10,"crc32":{305419896 + lane}}}'
    for lane in range(32)
)


def inspection(*, read_by: str, elements: str) -> Inspection:
    """Return what would have been found of a shuffled map-style loader, or of an iterable of 8 loader workers."""
    is_merged = read_by == "workers"
    return Inspection.model_validate(
        {
            "loader": LOADER,
            "kind": "iterable" if is_merged else "map",
            "order": "sequential" if is_merged else "recipe",
            "read_by": read_by,
            "num_streams": CPUS if is_merged else 1,
            "epoch_length": None if is_merged else UNITS,
            "claimed_length": None,
            "num_loader_workers": CPUS if is_merged else 2,
            "batch_size": 1,
            "element_bytes": ELEMENT_BYTES[elements],
            "element_seconds": 1e-4,
            "sampled_elements": 64,
            "versions": Versions(python="3.11"),
        }
    )


def pinned() -> PinnedRequest:
    """Return the request: the seed's numbers."""
    request = TrainRequest(
        project="scale",
        script="train.py",
        gpus=GPUS,
        cpus=CPUS,
        units=UNITS,
        loaders={LOADER: LoaderRef(source="data.py:make")},
        start="all",
    )
    return PinnedRequest(run_id=RUN, run=RUN, request=request, snapshot="ab" * 32, base_record=1)


def planned(found: Inspection) -> Plan:
    """Return the plan of that request."""
    return make_plan(pinned(), {LOADER: found}, FLAVORS)


class SimulatedStore(MemoryStore):
    """Holds the ledger of a loader up to some share of its segments, each record made when it is asked for.

    The streams of a merged loader are of equal length and end with the units. ``requests`` counts what is asked.
    """

    def __init__(self, loader: LoaderPlan) -> None:
        super().__init__()
        self.requests = 0
        self._loader = loader
        self._prefix = RunKeys(RUN).ledger(LOADER)
        self._lengths = lengths_of_streams(loader.num_streams, loader.units)
        self._totals = {stream: num_segments(loader.sizes, length) for stream, length in self._lengths.items()}
        self._there = dict.fromkeys(self._totals, 0)

    @property
    def num_segments(self) -> int:
        """Segments in all."""
        return sum(self._totals.values())

    def commit(self, share: float) -> None:
        """Let that share of every stream's segments be there."""
        self._there = {stream: int(share * total) for stream, total in self._totals.items()}

    def commit_more(self, count: int) -> None:
        """Let ``count`` more segments be there, spread over the streams."""
        for stream in itertools.islice(itertools.cycle(self._totals), count):
            self._there[stream] = min(self._totals[stream], self._there[stream] + 1)

    def records(self) -> Iterator[ShardRecord]:
        """Yield what is there, stream by stream."""
        keys = RunKeys(RUN)
        for stream, there in self._there.items():
            for n in range(there):
                yield read_record(self._record(stream, n), keys.ledger_record(LOADER, 0, stream, n))

    def get(self, key: str) -> bytes:
        """Return a record, or an object that was put."""
        self.requests += 1
        if not key.startswith(self._prefix):
            return super().get(key)
        _, stream, n = map(int, key.removeprefix(self._prefix).removesuffix(".json").split("/"))
        if n >= self._there[stream]:
            raise ObjectMissing("no such record", key=key)
        return self._record(stream, n)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the records' keys, 1000 by a request."""
        if prefix != self._prefix:
            yield from super().list(prefix, start_after=start_after)
            return
        keys = RunKeys(RUN)
        for stream, there in self._there.items():
            self.requests += -(-there // 1000)
            for n in range(there):
                yield ObjectInfo(keys.ledger_record(LOADER, 0, stream, n), 4000, 0.0)

    def _record(self, stream: int, n: int) -> bytes:
        start, stop = segment_bounds(self._loader.sizes, n)
        length = self._lengths[stream]
        is_last = stop >= length and not self._loader.is_merged
        last = ("true", str(length), "true") if is_last else ("false", "null", "false")
        return (
            f'{{"version":1,"loader":"{LOADER}","epoch":0,"stream":{stream},"n":{n},"start":{start},'
            f'"stop":{min(stop, length)},"num_padding":0,"last_of_epoch":{last[0]},"epoch_length":{last[1]},'
            f'"last_of_units":{last[2]},"key":"runs/{RUN}/shards/{LOADER}/000000/{stream:04d}/{n:08d}-m0-g1.arrow",'
            f'"num_bytes":132072,"schema_length":1000,"schema_crc32":1,"lanes":[{_LANES}],'
            f'"content_digest":"{"0" * 64}","machine":{n % CPUS},"host":"c1-{n % CPUS}","generation":1,'
            f'"pickled_paths":[],"started_at":{1000 + n}.0,"committed_at":{1001 + n}.5,"load_s":1.0,"encode_s":0.1,'
            f'"upload_s":0.1}}'
        ).encode()


def store_of(plan: Plan) -> SimulatedStore:
    """Return the store of a planned run, with nothing prepared."""
    store = SimulatedStore(plan.loaders[LOADER])
    store.put(RunKeys(RUN).plan, plan.to_bytes())
    store.put(RunKeys(RUN).request, pinned().to_bytes())
    return store


def put_training(store: SimulatedStore, *, num_passes: int) -> None:
    """Put what a training leaves whose every rank made so many full passes."""
    keys = RunKeys(RUN)
    train = {"task_id": "train", "generation": 1, "host": "g2-0", "flavor": "g2.8", "ok": True}
    store.put(keys.job_record("train"), JobRecord(job_id="train", started_at=1.0, ended_at=2.0, **train).to_bytes())
    for node in range(GPUS // 8):
        ranks = [
            RankResult(
                rank=rank,
                local_rank=rank % 8,
                exit_code=0,
                passes=[_full_pass(rank, number) for number in range(num_passes)],
            )
            for rank in range(8 * node, 8 * node + 8)
        ]
        result = NodeResult(
            node_rank=node, host=f"g2-{node}", generation=1, ok=True, ranks=ranks, delivered={LOADER: UNITS // 4}
        )
        store.put(keys.node_result(1, node), result.to_bytes())


def _full_pass(rank: int, number: int) -> RankPass:
    return RankPass(
        loader=LOADER,
        rank=rank,
        number=number,
        epoch=0,
        offset=0,
        num_steps=UNITS // GPUS,
        complete=True,
        replay=number > 0,
        wait_s=0.0,
        num_bytes=1,
    )
