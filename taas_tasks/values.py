"""The values that travel between the steps of a run: frozen, versioned, and the same after a JSON round trip.

``PinnedRequest -> Inspection -> Plan -> ShardRecord* -> GateDecision -> LaunchPlan -> NodeResult* -> LaunchResult ->
ArtifactRecord -> Report``. Reading a version that is not known is an error (``extra="forbid"``, ``version: Literal``).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from taas.request import TrainRequest


class Value(BaseModel):
    """Base of all values: immutable, strict about unknown fields."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        ser_json_bytes="base64",
        val_json_bytes="base64",
        defer_build=True,  # built at first use: a DAG file imports all of these and uses none
    )

    def to_bytes(self) -> bytes:
        """Return the JSON form."""
        return self.model_dump_json(indent=None).encode()


class StoreConfig(Value):
    """Where the object store is. Secret: travels only in 0600 files and in memory.

    ``credentials_path``: a file on the host that has the keys (``taas_tasks.store.credentials``) and is renewed there
    (as a job is told it: a name beside the job's input); it wins over the keys given here. With neither, boto3's own
    chain finds and refreshes them.
    """

    endpoint_url: str | None = None
    public_endpoint_url: str | None = None
    bucket: str
    prefix: str = ""
    region: str = "us-east-1"
    access_key: str | None = None
    secret_key: str | None = None
    session_token: str | None = None
    credentials_path: str | None = None


class PinnedRequest(Value):
    """A validated request and the snapshot of the project that inspect, prepare, train and replay share."""

    version: Literal[1] = 1
    run_id: str
    run: str  # layout.run_key(run_id)
    request: TrainRequest
    snapshot: str
    base_record: int  # number of the project's history record that was the head; 0: an empty project


class Versions(Value):
    """Versions that must agree between machines."""

    python: str
    torch: str | None = None
    packages: dict[str, str] = {}


class Inspection(Value):
    """What a c1.4 found out about a loader before anything costly starts.

    ``epoch_length``: elements that one iteration yields, where the order tells it (map-style); None for iterables.
    ``order``: "recipe" (a known sampler, replayed from seeds on every machine) or "chunks" (a sampler of the user's,
    run once in inspect and written by ``layout.RunKeys.order_chunk``) or "sequential" (an iterable: what it yields).
    ``epoch_lengths``: where a sampler of the user's yields epochs of different lengths, each one's (and then
    ``epoch_length`` is None); they hold at least the units asked for.
    ``read_by``: "index" (any machine loads any element: one stream), "workers" (the loader's own ``num_streams`` loader
    workers, each a stream with one owner: iterables, and map-style loaders with randomness "exact") or "process" (one
    process iterates the loader: no loader workers, or an ``__iter__`` of the user's).
    ``is_shared``: the loader workers read different parts; False where the dataset gives each of them everything.
    ``has_position``: the dataset's ``state_dict`` was found to continue a stream truly.
    ``base_seeds``: of the loader workers, per epoch, where a sampler of the user's was run (``order`` "chunks").
    """

    version: Literal[1] = 1
    loader: str
    kind: Literal["map", "iterable"]
    order: Literal["recipe", "chunks", "sequential"]
    read_by: Literal["index", "workers", "process"] = "index"
    epoch_length: int | None
    epoch_lengths: list[int] = []
    claimed_length: int | None
    num_loader_workers: int
    batch_size: int | None
    pin_memory: bool = False  # the user's loader had it: the delivered one pins as well
    element_bytes: float
    element_seconds: float
    sampled_elements: int
    num_streams: int = 1
    is_shared: bool = True
    has_position: bool = False
    base_seeds: list[int] = []
    order_chunk_elements: int = 0
    order_num_epochs: int = 0
    warnings: list[str] = []
    versions: Versions

    @model_validator(mode="after")
    def _reading_fits(self) -> Inspection:
        if (self.read_by == "index" and self.order == "sequential") or (
            self.read_by != "workers" and self.num_streams != 1
        ):
            raise ValueError(f"read_by is {self.read_by!r} with order {self.order!r} and {self.num_streams} streams")
        return self


class SegmentSizes(Value):
    """How an epoch of a stream is cut: sizes double from ``first`` to ``largest`` elements, one doubling per round.

    For a loader that is read by its workers each stream is cut by itself (``machines`` is 1): the sizes are then what a
    segment has unless the stream or the units end before, and records alone tell where the next one starts.

    Both are multiples of 32 elements, or a power of two below 32 (elements of several MiB, or few elements): then a
    segment holds only some of the 32 lanes.
    ``taas_tasks.plan.segment_bounds`` is the one rule that turns this into (start, stop).
    """

    first: int
    largest: int
    machines: int  # a round = as many segments as machines


class LoaderPlan(Value):
    """How one loader is prepared and delivered."""

    loader: str
    units: int
    machines: int  # useful ones, after inspection
    inspection: Inspection
    sizes: SegmentSizes
    payload: str | None = None  # payload key of a pickled loader
    sha256: str | None = None
    source: str | None = None  # "data.py:make_loader"

    @property
    def num_streams(self) -> int:
        """Streams of an epoch; stream s belongs to machine ``s mod machines``."""
        return self.inspection.num_streams

    @property
    def is_merged(self) -> bool:
        """Whether the loader's workers are its streams: the epoch is their merge, by ``taas_tasks.streams``."""
        return self.inspection.read_by == "workers"


class Plan(Value):
    """What will run where. Printed for people by ``taas_tasks.plan.describe``."""

    version: Literal[1] = 1
    run: str
    run_id: str
    project: str
    snapshot: str
    loaders: dict[str, LoaderPlan]
    seed: int
    randomness: Literal["element", "exact"]
    remainder: Literal["pad", "drop"]
    flavor: str
    nnodes: int
    nproc_per_node: int
    cpus: int
    warnings: list[str] = []

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nnodes * self.nproc_per_node


class LaneRecord(Value):
    """One lane (index mod 32) of a shard: a byte range that is one Arrow record batch with its message header."""

    lane: int
    offset: int
    length: int
    num_elements: int  # padding included
    crc32: int


class ShardRecord(Value):
    """The ledger's record of one committed segment: elements [start, stop) of an epoch's stream, plus padding.

    Of a loader that is not merged the one stream is the epoch. In a merged one positions are the stream's own:
    ``last_of_epoch`` and ``epoch_length`` tell where the stream ends by itself (a cut at ``units`` is told by nobody:
    ``taas_tasks.streams.MergedProgress`` finds it), ``last_of_units`` stays false, there is no padding (readers take it
    from the epoch's start), a record may hold no element, and an element lies in lane ``streams.nominal_index`` mod 32.

    ``lanes`` are in the file's order (groups of 8 lanes in the order 0, 2, 1, 3). The bytes [0, schema_length) are the
    schema message. In an epoch's last segment ``last_of_epoch`` is true, ``epoch_length`` is its true length within
    ``units``, and ``num_padding`` elements from the epoch's start (cyclically) follow the real ones, so that the
    epoch's length is a multiple of 32 (also with ``remainder: drop``, where readers pass over them).
    """

    version: Literal[1] = 1
    loader: str
    epoch: int
    stream: int
    n: int
    start: int
    stop: int
    num_padding: int = 0
    last_of_epoch: bool = False
    epoch_length: int | None = None
    last_of_units: bool = False
    position_key: str | None = None  # layout.RunKeys.stream_position: how to read on behind this segment
    key: str
    num_bytes: int
    schema_length: int
    schema_crc32: int
    lanes: list[LaneRecord]
    content_digest: str  # over the lengths and checksums of schema and lanes: two tries of a segment must agree
    machine: int
    host: str
    generation: int
    pickled_paths: list[str] = []
    started_at: float  # unix seconds
    committed_at: float
    load_s: float
    encode_s: float
    upload_s: float


class Watermark(Value):
    """How far the contiguous committed prefix of a loader reaches, in units from 0, epoch after epoch."""

    loader: str
    units: int
    asked: int
    num_segments: int
    complete: bool


class GateDecision(Value):
    """Whether training may start, and why, in a sentence."""

    version: Literal[1] = 1
    is_open: bool
    reason: str
    watermarks: list[Watermark]
    starts_at_units: dict[str, int] = {}


class LaunchPlan(Value):
    """What node agents run. One object for all nodes; each agent's input adds its ``node_rank``."""

    version: Literal[1] = 1
    run: str
    run_id: str
    project: str
    snapshot: str
    generation: int
    nnodes: int
    nproc_per_node: int
    flavor: str
    emulate_gpus: bool
    script: str | None = None
    args: list[str] = []
    cell_payload: str | None = None
    cell_sha256: str | None = None
    loaders: dict[str, LoaderPlan] = {}  # to be delivered
    plain_loaders: dict[str, str] = {}  # name -> "data.py:make_loader": given as they are (no units)
    plain_payloads: dict[str, tuple[str, str]] = {}  # name -> (payload key, sha256)
    seed: int
    randomness: Literal["element", "exact"] = "element"
    remainder: Literal["pad", "drop"] = "pad"
    other_ranks: Literal["refuse", "scratch"] = "refuse"
    cache_bytes: int
    allow_pickle: bool = False
    max_restarts: int = 0
    hang_timeout_s: float | None = None

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nnodes * self.nproc_per_node


class Artifact(Value):
    """One file that rank 0 wrote."""

    path: str
    sha256: str
    bytes: int
    mode: int
    rank: int = 0


class StagedArtifacts(Value):
    """New and changed files of rank 0, their contents already blobs of the project. Not visible until published."""

    version: Literal[1] = 1
    run: str
    generation: int
    base_snapshot: str
    files: list[Artifact]
    notes: list[str] = []  # what was left out, and why: links that leave the folder, devices, deleted files


class ArtifactRecord(Value):
    """What ``upload`` published: one numbered record of the project."""

    version: Literal[1] = 1
    project: str
    record: int
    snapshot: str
    files: list[Artifact]
    notes: list[str] = []
    kept_beside: dict[
        str, str
    ] = {}  # path as rank 0 wrote it -> path where it was kept, as someone changed it meanwhile


class JobRecord(Value):
    """What one job cost: put at ``layout.RunKeys.job_record`` by the Airflow task that saw it end (or stopped it)."""

    version: Literal[1] = 1
    job_id: str
    task_id: str  # inspect, prepare, train
    map_index: int = -1
    generation: int
    host: str
    flavor: str
    ok: bool
    ended_by: str | None = None
    started_at: float | None = None  # unix seconds, by the host's clock
    ended_at: float | None = None


class PlacedJob(Value):
    """A job and its host."""

    host: str
    job_id: str


class Placement(Value):
    """Where one try of a task has its jobs, node 0 first; without jobs it waits for hosts.

    Kept with the task's state (a retry finds its jobs) and at ``layout.RunKeys.placement``, both before the start.
    """

    version: Literal[1] = 1
    task_id: str  # inspect, prepare, train
    map_index: int = -1
    generation: int
    flavor: str
    asked_at: float  # unix seconds: the place in the queue for hosts
    jobs: list[PlacedJob] = []
    given_up: bool = False  # a host stayed silent until its jobs must have ended by themselves


class TaskTime(Value):
    """When one task instance of the run started and ended, as Airflow tells it."""

    task_id: str
    map_index: int = -1
    state: str | None
    started_at: float | None = None
    ended_at: float | None = None


class LoaderAccount(Value):
    """The accounting of one loader. ``consumed = committed - dropped - unread + padded + replayed``."""

    asked: int
    extracted: int
    committed: int
    delivered: int
    consumed: int
    dropped: int
    unread: int
    padded: int
    replayed: int
    explained: bool
    notes: list[str] = []
    per_rank: dict[str, Any] = {}


class Phase(Value):
    """Seconds, machines and price of one phase."""

    name: str
    started_at: float | None
    ended_at: float | None
    seconds: float
    machine_seconds: float
    flavor: str | None
    cost_units: float


class Report(Value):
    """The report of a run; always written, also for a failed one."""

    version: Literal[1] = 1
    run_id: str
    run: str
    state: Literal["success", "failed"]
    verdict: str | None
    request: dict[str, Any]
    snapshot: str | None
    loaders: dict[str, LoaderAccount]
    artifacts: list[Artifact]
    artifact_record: int | None
    phases: list[Phase]
    cost: dict[str, float]
    gpu_stall: dict[str, float]
    metrics: list[dict[str, Any]] = []
    warnings: list[str] = []
