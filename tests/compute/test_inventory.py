from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from taas.errors import LaunchError
from taas_tasks.compute.inventory import Host, Inventory, open_transport
from taas_tasks.compute.local import LocalTransport


def entry(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "flavor": "g2.8", "root": f"/var/taas/{name}", "python": "/usr/bin/python3", **fields}


def test_hosts_of_a_flavor_come_in_the_order_of_the_inventory():
    inventory = Inventory.parse(json.dumps([entry("b"), entry("c", flavor="c1.4"), entry("a")]))
    assert [host.name for host in inventory.of_flavor("g2.8")] == ["b", "a"]
    assert inventory.host("c").flavor == "c1.4"
    assert Inventory.parse(inventory.model_dump_json()) == inventory


def test_a_flavor_that_no_host_has_is_said_with_those_there_are():
    inventory = Inventory.parse(json.dumps([entry("b"), entry("c", flavor="c1.4")]))
    with pytest.raises(LaunchError, match=r"no host of flavor 'g2.9' in the inventory; it has: c1.4, g2.8"):
        inventory.of_flavor("g2.9")
    with pytest.raises(LaunchError, match=r"no host 'x' in the inventory; it has: b, c"):
        inventory.host("x")


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([entry("a", root="relative")], "host 'a' root: .*absolute path, got 'relative'"),
        ([entry("a"), {"flavor": "g2.8"}], "host number 2 name: .*; host number 2 root: "),
        ([entry("a", slots=0)], "host 'a' slots: "),
        ([entry("a", transport="pigeon")], "host 'a' transport: .*'local' or 'ssh'"),
        ([entry("a", colour="red")], "host 'a' colour: "),
        (["a"], "host number 1"),
        ([entry("a"), entry("a", root="/other")], "same name: a"),
        ([entry("a"), entry("b", root="/var/taas/a")], "same place"),
        ("a", "the list|hosts"),
    ],
)
def test_a_wrong_inventory_is_refused_with_the_host_and_the_field(hosts: Any, message: str):
    with pytest.raises(LaunchError, match=message):
        Inventory.parse(json.dumps(hosts))


def test_an_inventory_that_is_no_json_is_refused():
    with pytest.raises(LaunchError, match="no JSON"):
        Inventory.parse("- name: a")


def test_a_local_host_is_opened(tmp_path: Path):
    host = Host.model_validate(entry("a", root=str(tmp_path)))
    transport = open_transport(host)
    assert isinstance(transport, LocalTransport)
    assert transport.call("state", {"job_id": "x"})["phase"] == "absent"


def test_a_transport_that_this_version_lacks_is_named():
    host = Host.model_validate(entry("x", transport="ssh"))
    with pytest.raises(
        LaunchError, match=r"^host 'x' names transport 'ssh', which this version cannot drive; known: local$"
    ):
        open_transport(host)
