"""Host keys as they are pinned and told apart."""

from __future__ import annotations

import asyncssh
import pytest

from taas_tasks.compute.ssh_keys import HOST_KEY_TYPES, fingerprint, in_order_of, key_type, read_host_key

ED25519 = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGJHgPtIIIIIIIIIIIIIIIIIIIIIIIIIIIIIIIIIIIII"


@pytest.mark.parametrize("kind", HOST_KEY_TYPES)
def test_each_kind_is_read_with_and_without_its_name_and_a_comment(kind: str):
    key = asyncssh.generate_private_key(kind)
    _, encoded, *_ = key.export_public_key().decode().split()
    for text in (f"{kind} {encoded}", f"{kind} {encoded} root@g2-0\n", encoded):
        assert read_host_key(text) == key.public_data
    assert key_type(key.public_data) == kind
    assert fingerprint(key.public_data) == f"{kind} {key.get_fingerprint()}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no host key"),
        ("h.example " + ED25519, "'h.example' is no type of host key; allowed: ssh-ed25519"),
        ("ssh-dss AAAA", "'ssh-dss' is no type"),
        ("ssh-ed25519 %%%", "'%%%'... is no host key"),
        ("ssh-ed25519 AAAA", "no host key"),
        ("ssh-rsa " + ED25519.split()[1], "of type 'ssh-ed25519'"),
        ("AAAAB3Nza", "no host key"),
    ],
)
def test_anything_else_is_refused(text: str, fault: str):
    with pytest.raises(ValueError) as caught:
        read_host_key(text)
    assert fault in str(caught.value)


def test_algorithms_of_the_pinned_key_come_first():
    offered = ("ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512", "rsa-sha2-256")
    assert in_order_of(offered, "ssh-rsa") == ("rsa-sha2-512", "rsa-sha2-256", "ssh-ed25519", "ecdsa-sha2-nistp256")
    assert in_order_of(offered, "ecdsa-sha2-nistp256")[0] == "ecdsa-sha2-nistp256"
    assert sorted(in_order_of(offered, "ssh-ed25519")) == sorted(offered)
