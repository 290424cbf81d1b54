from __future__ import annotations

import json
import re
from typing import Any

import pytest

from taas.errors import LaunchError
from taas_tasks.compute.inventory import Host, Inventory


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
        ([entry("a", root="relative")], "host 'a' root: .*absolute path .*, got 'relative'"),
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


def test_every_fault_of_an_ssh_host_is_told_at_once():
    with pytest.raises(LaunchError) as caught:
        Inventory.parse(json.dumps([entry("a", transport="ssh", root="x", slots=0), entry("b", connection_id="c")]))
    for part in ("host 'a' root", "host 'a' slots", "host 'a' connection_id: .*type ssh", "host 'b' connection_id"):
        assert re.search(part, caught.value.message)


def test_a_path_that_no_command_line_can_hold_is_refused():
    with pytest.raises(LaunchError, match="without control characters"):
        Inventory.parse(json.dumps([entry("a", root="/var/taas\nrm")]))


def test_all_doubles_are_told_at_once():
    twice = [entry("a"), entry("a"), entry("b", transport="ssh", connection_id="c", root="/r")]
    with pytest.raises(LaunchError, match=r"same name: a.*same place \(where it is, root\): \('c', '/r'\)"):
        Inventory.parse(json.dumps([*twice, entry("d", transport="ssh", connection_id="c", root="/r")]))


def test_hosts_of_equal_root_behind_two_connections_are_two():
    ssh = {"transport": "ssh", "root": "/var/taas"}
    assert len(Inventory.parse(json.dumps([entry(n, connection_id=n, **ssh) for n in "ab"])).hosts) == 2


@pytest.mark.parametrize(
    ("fields", "emulates"),
    [
        ({}, True),
        ({"emulate_gpus": False}, False),
        ({"transport": "ssh", "connection_id": "c"}, False),
        ({"transport": "ssh", "connection_id": "c", "emulate_gpus": True}, True),
    ],
)
def test_only_local_hosts_emulate_gpus_unless_it_is_said(fields: dict[str, Any], emulates: bool):
    assert Host.model_validate(entry("a", **fields)).emulates_gpus is emulates
