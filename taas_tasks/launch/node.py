"""One node of a training, from its project folder to its ``NodeResult``: every step, and what is ended after it."""

from __future__ import annotations

import hashlib
import logging
import shutil
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from taas.errors import DeliveryError, LaunchError, RunCancelled, TaasError
from taas_tasks.artifacts import stage
from taas_tasks.launch import clock, forkserver, gpus, preflight
from taas_tasks.launch.environment import loader_environment, rank_environment
from taas_tasks.launch.feeder_process import FeederProcess
from taas_tasks.launch.files import RankFiles, RankSpec, write_json
from taas_tasks.launch.guard import GuardMode, choose_guard
from taas_tasks.launch.live_logs import LiveLogs
from taas_tasks.launch.logs import LogMerger, mark_restart
from taas_tasks.launch.outcome import NodeLedger
from taas_tasks.launch.payload_check import payload_findings
from taas_tasks.launch.processes import MARK, end_marked
from taas_tasks.launch.watch import StopReason, Watch
from taas_tasks.layout import HostPaths, RunKeys
from taas_tasks.program_values import AgentInput
from taas_tasks.project import materialise
from taas_tasks.result_values import NodeResult
from taas_tasks.store import ObjectStore

_log = logging.getLogger(__name__)

PREFLIGHT_TIMEOUT_S = 120.0


class Node:
    """A context manager: whatever ``run`` has started is ended on the way out, whichever way that is."""

    def __init__(self, given: AgentInput, store: ObjectStore, *, host_env: Mapping[str, str]) -> None:
        self.given = given
        self.plan = given.launch_plan
        self.store = store
        self.keys = RunKeys(given.run)
        paths = HostPaths(Path(given.host_root).resolve())
        self.paths = paths
        self.project = paths.project(given.run, given.generation)
        self.files = RankFiles(paths.scratch(given.run, given.generation))
        self.host_env = dict(host_env)
        self.mark = uuid.uuid4().hex
        self.feeder: FeederProcess | None = None
        self.merger: LogMerger | None = None
        self.live_logs: LiveLogs | None = None
        self.attempt = -1
        self.watch = Watch(
            store,
            run=given.run,
            generation=given.generation,
            node_rank=given.node_rank,
            nnodes=self.plan.nnodes,
            host=given.host,
        )
        self.ledger = NodeLedger(given.node_rank, given.host, given.generation, self.files, self.project)

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._report_failure(error)
        self._end_everything()
        self.watch.stop()

    def run(self) -> dict[str, Any]:
        """Run the node's part of the training to its end and return the key of its result."""
        self.watch.start()
        self._make_folders()
        self._materialise()
        env = self._rank_env()
        forkserver.start(env, preload=forkserver.worth_preloading(forkserver.imports_of(self.project)))
        guard = choose_guard(self.project)
        rendezvous_store, infos = self._preflight(guard)
        self._start_feeder()  # it starts while the group is tried
        self._check_group(infos)
        self.ledger.note("preflight_done")
        self._write_rank_files(guard)
        self._run_gang(rendezvous_store)
        self._end_everything()  # nothing may still write while the files are staged
        self._stage()
        return self._put_result(ok=True, error=None)

    def cancelled(self, signal_name: str) -> RunCancelled:
        """Return the error for a stop by a signal."""
        return RunCancelled(f"the training on {self.given.host} was stopped by {signal_name}")

    def _make_folders(self) -> None:
        run_folder = self.project.parent.parent
        for older in sorted(run_folder.glob("g*")) if run_folder.is_dir() else []:
            if older != self.project.parent:
                shutil.rmtree(older, ignore_errors=True)
        shutil.rmtree(self.project.parent, ignore_errors=True)
        self.files.make_folders()
        write_json(self.files.launch_plan, self.plan.model_dump_json())

    def _materialise(self) -> None:
        materialise(self.store, self.given.project, self.given.snapshot, self.project)
        if self.plan.cell_payload is not None:
            self._fetch(self.plan.cell_payload, str(self.plan.cell_sha256), self.files.cell)
        for key, sha256 in self.plan.plain_payloads.values():
            self._fetch(key, sha256, self.files.payload(sha256))

    def _fetch(self, key: str, sha256: str, path: Path) -> None:
        data = self.store.get(key)
        got = hashlib.sha256(data).hexdigest()
        if got != sha256:
            raise LaunchError(f"the payload {key} has sha256 {got}, the request says {sha256}: submit it again")
        path.write_bytes(data)

    def _rank_env(self) -> dict[str, str]:
        env = rank_environment(
            self.host_env,
            request_env=self.given.env,
            secrets=self.given.secrets,
            nnodes=self.plan.nnodes,
            nproc_per_node=self.plan.nproc_per_node,
            emulate_gpus=self.plan.emulate_gpus,
            interface=preflight.interface_of(self.given.address),
        )
        return {**env, MARK: self.mark}

    def _preflight(self, guard: GuardMode | None) -> tuple[Any, list[preflight.NodeInfo]]:
        """Compare all nodes; return the store of the rendezvous, which node 0 serves from here on, and the nodes."""
        from taas_tasks.launch.rendezvous import host_store, join_store

        served = None
        cuda = None if self.plan.emulate_gpus else gpus.ask_torch(self.files.scratch, check=self._check)
        info = self._node_info(cuda)
        findings = preflight.own_findings(self.plan, info, guard=guard)
        findings += payload_findings(self.plan, self.files, self.project, check=self._check)
        if cuda is not None:
            findings += gpus.cuda_findings(cuda) + gpus.look()
        if self.given.node_rank == 0 and not findings:
            served = host_store(self.given.address)
            info = info.model_copy(update={"port": served.port})
        infos = self._exchange(info.model_copy(update={"findings": findings}), second=False)
        if len(infos) > 1:
            reach = preflight.reach_findings(info, infos[0])
            self._exchange(info.model_copy(update={"findings": reach}), second=True)
        return served or join_store(infos[0].address, int(infos[0].port or 0)), infos

    def _exchange(self, info: preflight.NodeInfo, *, second: bool) -> list[preflight.NodeInfo]:
        infos = preflight.exchange(
            self.store,
            info,
            run=self.given.run,
            generation=self.given.generation,
            nnodes=self.plan.nnodes,
            timeout_s=PREFLIGHT_TIMEOUT_S,
            second=second,
            check=self._check,
        )
        preflight.judge(infos)
        return infos

    def _node_info(self, cuda: gpus.Cuda | None) -> preflight.NodeInfo:
        return preflight.NodeInfo(
            node_rank=self.given.node_rank,
            host=self.given.host,
            address=self.given.address,
            versions=preflight.installed_versions(),
            num_gpus=cuda.num_gpus if cuda is not None else 0,
            gpu_model=cuda.model if cuda is not None else None,
            disk_free_bytes=shutil.disk_usage(self.given.host_root).free,
            shm_bytes=preflight.shm_bytes(),
            interface=preflight.interface_of(self.given.address),
            clock_skew_s=clock.skew_s(self.store, self.keys.node_clock(self.given.generation, self.given.node_rank)),
        )

    def _check_group(self, infos: Sequence[preflight.NodeInfo]) -> None:
        """Have processes of all nodes reduce together, as the ranks will; while they do, the feeder starts."""
        num_gpus = 0 if self.plan.emulate_gpus else self.plan.nproc_per_node
        if len(infos) > 1 or num_gpus:
            from taas_tasks.launch.group_run import check_group

            report = check_group(
                infos,
                node_rank=self.given.node_rank,
                num_gpus=num_gpus,
                generation=self.given.generation,
                folder=self.files.scratch,
                check=self._check,
            )
            preflight.judge(
                [info.model_copy(update={"findings": report.findings.get(info.node_rank, [])}) for info in infos]
            )
        else:
            report = None
        self.ledger.take_measured(preflight.measured(infos[self.given.node_rank], report))

    def _start_feeder(self) -> None:
        if not self.plan.loaders:
            return
        self.feeder = FeederProcess(self.files)
        self.feeder.start(
            self.plan,
            store=self.given.store,
            node_rank=self.given.node_rank,
            host=self.given.host,
            cache_dir=self.paths.cache,
            env=self.host_env,
            loader_env=loader_environment(self.host_env, request_env=self.given.env, secrets=self.given.secrets),
        )

    def _write_rank_files(self, guard: GuardMode | None) -> None:
        spec = RankSpec(
            host=self.given.host,
            project_dir=str(self.project),
            scratch=str(self.files.scratch),
            script=self.plan.script,
            args=self.plan.args,
            cell_path=str(self.files.cell) if self.plan.cell_payload is not None else None,
            cell_sha256=self.plan.cell_sha256,
            flavor=self.plan.flavor,
            emulate_gpus=self.plan.emulate_gpus,
            other_ranks=self.plan.other_ranks,
            guard=guard,
        )
        write_json(self.files.spec, spec.model_dump_json())

    def _before_start(self, ranks: Mapping[int, int]) -> None:
        """Write the contexts of an attempt, now that the ranks are known, and begin to show their logs."""
        for local_rank, rank in ranks.items():
            private = self.plan.other_ranks == "scratch" and rank != 0
            project = self.files.copy_project(self.project, rank) if private else self.project
            self.files.write_context(
                rank=rank,
                local_rank=local_rank,
                world_size=self.plan.world_size,
                socket=self.feeder.socket if self.feeder is not None else None,
                project=project,
            )
        self.attempt += 1
        if self.attempt == 0:
            self._show_logs({rank: self.files.log(rank) for rank in ranks.values()})
        for rank in ranks.values() if self.attempt > 0 else ():
            mark_restart(self.files.log(rank), rank=rank, attempt=self.attempt)

    def _show_logs(self, logs: Mapping[int, Path]) -> None:
        """Begin to show the ranks' logs in the job's own, and to put them into the store."""
        feeder = {"feeder": self.files.feeder_log} if self.feeder is not None else {}
        self.merger = LogMerger(logs, host=self.given.host, out=sys.stdout.buffer, others=feeder)
        self.merger.start()
        self.live_logs = LiveLogs(
            self.store,
            run=self.given.run,
            generation=self.given.generation,
            node_rank=self.given.node_rank,
            host=self.given.host,
            logs=logs,
        )
        self.live_logs.start()

    def _run_gang(self, rendezvous_store: Any) -> None:
        from taas_tasks.launch.gang_run import run_gang

        outcome = run_gang(
            self.plan,
            node_rank=self.given.node_rank,
            address=self.given.address,
            store=rendezvous_store,
            files=self.files,
            before_start=self._before_start,
            stop_reason=self._stop_reason,
            watch=self.watch,
            ledger=self.ledger,
            objects=self.store,
            project=self.project,
        )
        if outcome.stopped_for is not None:
            raise _error_for(outcome.stopped_for)
        if not outcome.ok:
            raise self.ledger.rank_failure()

    def _check(self) -> None:
        """Raise when another node has failed or the run was aborted."""
        reason = self.watch.stop_reason()
        if reason is not None:
            raise _error_for(reason)

    def _stop_reason(self) -> StopReason | None:
        failure = self.feeder.failure() if self.feeder is not None else None
        if failure is not None:
            return StopReason("data", failure, self.given.node_rank)
        return self.watch.stop_reason()

    def _stage(self) -> None:
        if self.given.node_rank != 0:
            return
        run, generation = self.given.run, self.given.generation
        stage(self.store, self.given.project, self.given.snapshot, self.project, run=run, generation=generation)
        self.ledger.note("staged")

    def _report_failure(self, error: BaseException) -> None:
        """Tell the other nodes and leave a result that says why; the first error is the one that is raised."""
        told = error if isinstance(error, TaasError) else self._as_told(error)
        self.watch.mark_failed(str(told).splitlines()[0])
        self._end_everything()
        try:
            self._put_result(ok=False, error=told)
        except TaasError as second:
            _log.warning("could not leave the node's result: %s", second)

    def _as_told(self, error: BaseException) -> TaasError:
        if isinstance(error, Exception):
            return LaunchError(f"the node agent on {self.given.host} failed: {type(error).__name__}: {error}")
        return self.cancelled(str(error))

    def _put_result(self, *, ok: bool, error: TaasError | None) -> dict[str, Any]:
        self._put_logs()
        result: NodeResult = self.ledger.result(ok=ok, error=error, loaders=list(self.plan.loaders))
        key = self.keys.node_result(self.given.generation, self.given.node_rank)
        self.store.put(key, result.to_bytes())
        return {"node_result": key}

    def _put_logs(self) -> None:
        generation = self.given.generation
        for rank in self.ledger.ranks():
            if self.files.log(rank).exists():
                self.store.put_file(self.keys.rank_log(generation, rank), self.files.log(rank))
        if self.given.node_rank == 0 and self.files.metrics.exists():
            self.store.put_file(self.keys.metrics(generation), self.files.metrics)

    def _end_everything(self) -> None:
        """End the feeder, the fork server and every process that a rank has left behind. Safe to call again."""
        if self.feeder is not None:
            self.feeder.stop()
        forkserver.stop()
        told = end_marked(self.mark)
        if told:
            _log.warning("ended %d process(es) that the ranks had left behind: %s", len(told), told)
        forkserver.stop_resource_tracker()
        if self.merger is not None:
            self.merger.stop()
            self.merger = None
        if self.live_logs is not None:
            self.live_logs.stop()
            self.live_logs = None


def _error_for(reason: StopReason) -> TaasError:
    if reason.kind == "aborted":
        return RunCancelled(reason.message)
    if reason.kind == "data":
        return DeliveryError(reason.message)
    return LaunchError(f"stopped, because {reason.message}", kind=reason.kind, node_rank=reason.node_rank)
