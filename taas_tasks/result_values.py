"""How a training went: from one pass of a rank to all nodes' results. Written on hosts, read by Airflow's tasks."""

from __future__ import annotations

from typing import Any, Literal

from taas_tasks.values import Value


class RankPass(Value):
    """One pass of one rank over a delivered loader: elements of ``epoch`` at steps [first_step, first_step+num_steps).

    At step t the rank took element ``offset + t * world_size + rank`` of the epoch (``offset`` > 0 after a resume).
    """

    loader: str
    rank: int
    number: int  # 0, 1, ... in the order of iter()
    epoch: int
    offset: int
    num_steps: int
    complete: bool
    replay: bool
    wait_s: float
    num_bytes: int


class RankResult(Value):
    """How one rank ended."""

    rank: int
    local_rank: int
    exit_code: int | None
    signal: int | None = None
    error_class: str | None = None  # user error, CUDA OOM, killed by the kernel, NCCL/timeout, data, ...
    message: str | None = None
    traceback_tail: str | None = None
    failed_at: float | None = None
    place: str | None = None  # where it stood when the gang hung: "data.py:17 (read)"
    collective: str | None = None  # what it waited in with its peers then, e.g. all_reduce
    passes: list[RankPass] = []
    first_step_at: float | None = None
    max_rss_bytes: int | None = None


class Restart(Value):
    """The gang was started again within one try. ``told``: the whole in one sentence, the same on every node."""

    number: int  # from 1
    at: float  # unix seconds
    error_class: str
    rank: int | None = None
    host: str | None = None
    checkpoint_step: int | None = None  # from which the script can resume; None: there was no complete checkpoint
    told: str


class GroupSpeeds(Value):
    """How fast the nodes reduced together before the start; None where it did not apply (one node, no GPU)."""

    gloo_ms: float | None = None  # an all-reduce of one number among all nodes
    gloo_mb_per_s: float | None = None  # of 8 MiB
    nccl_ms: float | None = None
    nccl_bus_gb_per_s: float | None = None  # of 256 MiB over all GPUs; unproven, it has not yet run on GPUs


class Measured(GroupSpeeds):
    """What the check before the start has measured on a node."""

    interface: str | None = None  # by which the ranks talk
    clock_skew_s: float = 0.0  # ahead of the object store's


class NodeResult(Value):
    """How one node ended; put at ``layout.RunKeys.node_result`` of its generation."""

    version: Literal[1] = 1
    node_rank: int
    host: str
    generation: int
    ok: bool
    ranks: list[RankResult]
    delivered: dict[str, int] = {}  # loader -> distinct elements (padding left out) that this host's feeder brought
    delivered_bytes: dict[str, int] = {}
    times: dict[str, float] = {}  # unix seconds: agent_started, preflight_done, ranks_started, ranks_ended, staged
    measured: Measured | None = None
    other_rank_writes: list[str] = []
    restarts: list[Restart] = []
    checkpoint_step: int | None = None  # of the newest complete one on this host; times["checkpoint"] is its time
    repairs: list[str] = []  # sentences about segments that were lost and prepared again on this host
    error: dict[str, Any] | None = None  # TaasError.to_dict()


class LaunchResult(Value):
    """The whole training's outcome, gathered by the train task from all ``NodeResult``s."""

    version: Literal[1] = 1
    generation: int
    ok: bool
    nodes: list[NodeResult]
