"""One look at the ledger after another, until the gate's decision says open. No Airflow in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from taas_tasks.gate import decide
from taas_tasks.layout import RunKeys
from taas_tasks.ledger import units_per_second
from taas_tasks.ledger_reader import LedgerReader
from taas_tasks.store import ObjectStore
from taas_tasks.values import GateDecision, LoaderPlan, PinnedRequest, Plan, ShardRecord

_RECORDS_FOR_RATE = 64


@dataclass
class GateWatch:
    """Follows the ledgers of all loaders of a run; every look asks the store only for what is new."""

    store: ObjectStore
    plan: Plan
    start: str | int | float
    _readers: dict[str, LedgerReader] = field(default_factory=dict)
    _recent: dict[str, list[ShardRecord]] = field(default_factory=dict)
    _prepared: set[str] = field(default_factory=set)

    @classmethod
    def of_run(cls, store: ObjectStore, run: str) -> GateWatch:
        """Return the watch of a run that is planned."""
        keys = RunKeys(run)
        plan = Plan.model_validate_json(store.get(keys.plan))
        pinned = PinnedRequest.model_validate_json(store.get(keys.request))
        return cls(store=store, plan=plan, start=pinned.request.start)

    def look(self) -> GateDecision:
        """Return what is decided now; an open gate is written down before it is told.

        Raises:
            ObjectCorrupt: An object of a ledger is not what was committed.
            StoreError: The store does not answer.
        """
        prepared = frozenset(self._prepared)  # before this look at the ledger: their records were all written
        for name, loader in self.plan.loaders.items():
            if not self._follow(name, loader) and self._is_prepared(name, loader):
                self._prepared.add(name)
        decision = decide(
            self.start,
            loaders=self.plan.loaders,
            watermarks=[reader.watermark for reader in self._readers.values()],
            world_size=self.plan.world_size,
            units_per_second=self._rates(),
            prepared=prepared,
        )
        if decision.is_open:
            self.store.put(RunKeys(self.plan.run).gate, decision.to_bytes())
        return decision

    def _follow(self, name: str, loader: LoaderPlan) -> bool:
        """Whether there is something new."""
        recent = self._recent.setdefault(name, [])
        if name not in self._readers:  # late, or again after a restart: the ledger may be long
            reader = LedgerReader(self.store, self.plan.run, loader)
            recent += reader.catch_up()
            self._readers[name] = reader
        gained = self._readers[name].poll()
        recent += gained
        del recent[:-_RECORDS_FOR_RATE]
        return bool(gained)

    def _is_prepared(self, name: str, loader: LoaderPlan) -> bool:
        """Whether every machine has ended its work; one request while the first one works."""
        keys, machines = RunKeys(self.plan.run), range(loader.machines)
        return name in self._prepared or all(self.store.head(keys.prepared(name, one)) for one in machines)

    def _rates(self) -> Mapping[str, float]:
        found = {
            name: units_per_second(
                self._recent[name], producers=loader.num_streams if loader.is_merged else loader.machines
            )
            for name, loader in self.plan.loaders.items()
        }
        return {name: rate for name, rate in found.items() if rate is not None}
