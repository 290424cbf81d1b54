from __future__ import annotations

import socket

from taas_tasks.launch.network import connect_findings, route_findings, source_address


def test_kernel_sends_to_a_loopback_address_from_loopback() -> None:
    source = source_address("127.0.0.1")
    assert source == "127.0.0.1"
    assert route_findings(address="127.0.0.1", master="127.0.0.1", source=source) == []


def test_other_source_than_the_inventorys_address_is_told_with_both() -> None:
    (found,) = route_findings(address="10.0.0.2", master="10.0.0.1", source="172.17.0.1")
    assert "172.17.0.1" in found
    assert "10.0.0.2" in found


def test_missing_route_is_told() -> None:
    (found,) = route_findings(address="10.0.0.2", master="10.0.0.1", source=None)
    assert "no route" in found


def test_port_that_listens_is_reached_and_one_that_does_not_is_told_with_both_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert connect_findings(address="127.0.0.2", master="127.0.0.1", port=port) == []
    (found,) = connect_findings(address="127.0.0.2", master="127.0.0.1", port=port, timeout_s=1)
    assert f"127.0.0.2 cannot connect to node 0 at 127.0.0.1 port {port}" in found
    assert "firewall" in found


def test_hosts_that_are_one_machine_have_a_route_whatever_address_the_kernel_takes() -> None:
    assert route_findings(address="127.0.0.3", master="127.0.0.2", source="127.0.0.1") == []
    assert route_findings(address="10.0.0.3", master="10.0.0.2", source="10.0.0.2") == []


def test_loopback_in_the_inventory_of_a_host_whose_master_is_elsewhere_is_told() -> None:
    assert route_findings(address="127.0.0.1", master="10.0.0.1", source="10.0.0.2") != []
