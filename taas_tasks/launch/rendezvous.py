"""torch's c10d rendezvous, with the node ranks that the plan gave and ports that cannot be taken meanwhile.

torch's dynamic rendezvous ranks nodes by sorting their addresses. Here a node takes part under a name made from its
node rank, so that rank 0 is on node 0 and every restart gives the same ranks. The stores listen on sockets that node 0
has bound itself: a port is never found free first and bound later.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStateError, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from taas_tasks.result_values import NodeResult

_STORE_TIMEOUT = timedelta(seconds=60)


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of ``address`` alone."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.bind((address, 0))
    bound.listen(1024)
    return bound


def host_store(address: str) -> TCPStore:
    """Return a store that this process serves on a free port of ``address`` (its ``port``)."""
    bound = listen(address)
    port = bound.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
        master_listen_fd=bound.detach(),
    )


def join_store(address: str, port: int) -> TCPStore:
    """Return a client of the store that node 0 serves."""
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)


class GangRendezvous(RendezvousHandler):
    """All nodes of a fixed gang, in the order of their node ranks. ``attempt`` counts from 0 (a restart adds one)."""

    def __init__(
        self, store: Store, *, run_id: str, node_rank: int, nnodes: int, address: str, timeout_s: float = 300.0
    ) -> None:
        self._run_id = run_id
        self._store = PrefixStore("taas-told", store)
        self._nnodes = nnodes
        self._node_rank = node_rank
        self._address = address
        self._bootstrap: TCPStore | None = None
        self.attempt = -1
        timeout = RendezvousTimeout(join=timedelta(seconds=timeout_s))
        self._inner = DynamicRendezvousHandler.from_backend(
            run_id,
            PrefixStore("taas-rendezvous", store),
            C10dRendezvousBackend(store, run_id),
            nnodes,
            nnodes,
            local_addr=f"node-{node_rank:05d}",
            timeout=timeout,
        )

    @property
    def use_agent_store(self) -> bool:
        """The agents serve the store of the ranks' process group, so its port is bound before it is published."""
        return True

    def get_backend(self) -> str:
        """Return the name of torch's backend."""
        return str(self._inner.get_backend())

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes; then node 0 serves a fresh store for this attempt's process group."""
        with _own_bootstrap():
            found = self._inner.next_rendezvous()
        if found.rank != self._node_rank:
            raise RendezvousStateError(f"the rendezvous gave node {self._node_rank} the rank {found.rank}")
        self.attempt += 1
        info = self._publish_bootstrap(found.store)
        return RendezvousInfo(found.store, found.rank, found.world_size, info)

    def _publish_bootstrap(self, store: Store) -> RendezvousStoreInfo:
        key = f"taas/bootstrap/{self.attempt}"
        if self._node_rank == 0:
            self._bootstrap = host_store(self._address)
            store.set(key, f"{self._address} {self._bootstrap.port}")
        address, port = store.get(key).decode().split()
        return RendezvousStoreInfo(address, int(port))

    def tell(self, attempt: int, node: NodeResult) -> None:
        """Leave for the other nodes how this one's ranks ended, before it comes back for the next attempt."""
        self._store.set(_told_key(attempt, self._node_rank), node.to_bytes().decode())

    def told(self, attempt: int) -> list[NodeResult]:
        """Return what all nodes have left of an attempt; all have, once a later one has begun."""
        keys = [_told_key(attempt, node_rank) for node_rank in range(self._nnodes)]
        return [NodeResult.model_validate_json(self._store.get(key)) for key in keys]

    def is_closed(self) -> bool:
        """Return whether the gang has been given up."""
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        """Give the gang up."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for a restart of the gang."""
        return int(self._inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        """Return the id of the gang."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the rendezvous for all."""
        return bool(self._inner.shutdown())


def _told_key(attempt: int, node_rank: int) -> str:
    return f"{attempt}/{node_rank}"


@contextmanager
def _own_bootstrap() -> Iterator[None]:
    """Keep torch from serving its own store under the node's name, which is no address. Read once per rendezvous."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
