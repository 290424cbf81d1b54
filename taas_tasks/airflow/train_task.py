"""The training: one node agent per host of a gang, one verdict over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from taas.errors import HostRefused, JobTimeout, LaunchError, RankFailed, RequirementsFailed, TaasError
from taas_tasks.airflow.host_job_task import HostJobTask, Order, Work, hosts_of
from taas_tasks.airflow.program_inputs import common_input
from taas_tasks.airflow.secret_values import resolve_secrets
from taas_tasks.compute.inventory import Host
from taas_tasks.program_values import AgentInput
from taas_tasks.result_values import LaunchResult
from taas_tasks.values import LaunchPlan, PinnedRequest, Placement, Plan
from taas_tasks.verdict import gather, launch_error

_GIB = 1 << 30
_STARTING_S = 600.0


def emulates_gpus(hosts: Sequence[Host]) -> bool:
    """Return whether the ranks of a gang run on CPUs in the place of GPUs.

    Raises:
        LaunchError: some of its hosts do and some do not: their ranks could not talk to each other.
    """
    found = {host.emulates_gpus for host in hosts}
    if len(found) > 1:
        said = ", ".join(f"{host.name} {'emulates' if host.emulates_gpus else 'has'} GPUs" for host in hosts)
        raise LaunchError(f"the hosts of one training must be alike: {said}; set emulate_gpus alike in the inventory")
    return found.pop()


def launch_plan(plan: Plan, pinned: PinnedRequest, *, generation: int, hosts: list[Host]) -> LaunchPlan:
    """Return what the node agents of one try run."""
    request = pinned.request
    plain = {} if plan.loaders else request.loaders
    payloads = {name: (one.payload, one.sha256) for name, one in plain.items() if one.payload and one.sha256}
    return LaunchPlan(
        run=plan.run,
        run_id=plan.run_id,
        project=plan.project,
        snapshot=plan.snapshot,
        generation=generation,
        nnodes=plan.nnodes,
        nproc_per_node=plan.nproc_per_node,
        flavor=plan.flavor,
        emulate_gpus=emulates_gpus(hosts),
        script=request.script,
        args=list(request.args),
        cell_payload=request.cell.payload if request.cell else None,
        cell_sha256=request.cell.sha256 if request.cell else None,
        loaders=plan.loaders,
        plain_loaders={name: one.source for name, one in plain.items() if one.source},
        plain_payloads=payloads,
        seed=plan.seed,
        randomness=plan.randomness,
        remainder=plan.remainder,
        other_ranks=request.other_ranks,
        cache_bytes=int(request.cache_gb * _GIB),
        allow_pickle=request.allow_pickle,
        max_restarts=request.max_restarts,
        hang_timeout_s=request.hang_timeout_s or None,
    )


def _results(work: Work, placement: Placement) -> LaunchResult:
    hosts = [job.host for job in placement.jobs]
    return gather(work.store, work.scope.run, placement.generation, len(hosts), hosts=hosts)


class TrainTask(HostJobTask):
    """Takes the gang of hosts, starts a node agent on each, and succeeds when rank 0's files are staged."""

    def order(self, work: Work) -> Order:
        """Return the training of the run's plan."""
        plan: Plan = work.read(work.scope.keys.plan, Plan)
        pinned: PinnedRequest = work.read(work.scope.keys.request, PinnedRequest)
        request = pinned.request

        def inputs(placement: Placement, node_rank: int) -> AgentInput:
            hosts = hosts_of(work, placement)
            return AgentInput(
                **common_input(work.deployment.store, pinned, placement, hosts[node_rank]),
                launch_plan=launch_plan(plan, pinned, generation=placement.generation, hosts=hosts),
                node_rank=node_rank,
                address=hosts[node_rank].address,
                env=request.env,
                secrets=resolve_secrets(request.secrets, project=request.project),
            )

        return Order(
            flavor=plan.flavor,
            num_hosts=plan.nnodes,
            module="taas_tasks.launch.agent_program",
            inputs=inputs,
            timeout_s=request.timeout_s + _STARTING_S,
            requirements=request.requirements,
            stopped_by=("prepare",) if plan.loaders else (),
            stopped_by_states=("failed", "upstream_failed", "skipped"),
        )

    def before_start(self, work: Work, placement: Placement) -> None:
        """Take back an earlier try's word that the run is aborted."""
        work.store.delete(work.scope.keys.abort)

    def succeeded(self, work: Work, placement: Placement) -> int:
        """Return the generation that counts.

        Raises:
            TaasError: the results of the nodes say otherwise than their jobs.
        """
        result = _results(work, placement)
        error = launch_error(result)
        if error is not None:
            raise error
        return placement.generation

    def failed(self, work: Work, placement: Placement, error: TaasError) -> TaasError:
        """Return the verdict over all nodes: the first failing rank, its host and cause; the jobs' own ends else.

        An agent that was ended for its timeout tells of a stop only, the job's own end says why; one whose host could
        not give it what it needs never came to leave a result.
        """
        if isinstance(error, (HostRefused, RequirementsFailed)):
            return error
        result = _results(work, placement)
        verdict = launch_error(result, flavor=work.deployment.flavors.get(placement.flavor))
        if verdict is None or (isinstance(error, JobTimeout) and not isinstance(verdict, RankFailed)):
            return error
        return verdict

    def stopped(self, reason: str) -> NoReturn:
        """Fail: without its data the training cannot go on."""
        raise LaunchError(f"{reason}; clear what was preparing as well as this task")
