from __future__ import annotations

import threading
import time

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousError

from taas_tasks.launch.rendezvous import GangRendezvous, host_store, join_store


def gang(nnodes: int) -> list[GangRendezvous]:
    served = host_store("127.0.0.1")
    stores = [served, *(join_store("127.0.0.1", served.port) for _ in range(nnodes - 1))]
    return [
        GangRendezvous(store, run_id="r", node_rank=node_rank, nnodes=nnodes, address="127.0.0.1", timeout_s=30)
        for node_rank, store in enumerate(stores)
    ]


def meet(nodes: list[GangRendezvous], order: list[int]) -> dict[int, tuple[int, int, str, int]]:
    found: dict[int, tuple[int, int, str, int]] = {}

    def one(node_rank: int) -> None:
        info = nodes[node_rank].next_rendezvous()
        bootstrap = info.bootstrap_store_info
        assert bootstrap is not None
        found[node_rank] = (info.rank, info.world_size, bootstrap.master_addr, bootstrap.master_port)

    threads = [threading.Thread(target=one, args=(node_rank,)) for node_rank in order]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(30)
    return found


def test_ranks_are_the_node_ranks_whoever_comes_first() -> None:
    nodes = gang(3)
    found = meet(nodes, [2, 1, 0])
    assert {node_rank: values[0] for node_rank, values in found.items()} == {0: 0, 1: 1, 2: 2}
    assert {values[1] for values in found.values()} == {3}
    assert len({values[2:] for values in found.values()}) == 1
    assert [node.attempt for node in nodes] == [0, 0, 0]
    host, port = found[2][2:]
    join_store(host, port).set("a", "b")  # node 0 serves it already: nobody can take the port
    for node in nodes:
        node.shutdown()


def test_node_that_waits_is_freed_when_the_gang_is_given_up() -> None:
    zero, _ = gang(2)
    timer = threading.Timer(0.5, zero.set_closed)
    timer.start()
    started = time.monotonic()
    with pytest.raises(RendezvousError):
        zero.next_rendezvous()
    assert time.monotonic() - started < 10
    timer.join()


def test_two_trainings_on_one_host_never_share_a_port() -> None:
    stores = [host_store("127.0.0.1") for _ in range(8)]
    assert len({store.port for store in stores}) == 8
    for number, store in enumerate(stores):
        join_store("127.0.0.1", store.port).set("whose", str(number))
    assert [store.get("whose") for store in stores] == [str(number).encode() for number in range(8)]
