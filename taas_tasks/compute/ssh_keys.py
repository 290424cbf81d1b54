"""Host keys: what is pinned, in which form, and how two of them are told apart. Decisions only."""

from __future__ import annotations

import base64
import binascii
import hashlib

HOST_KEY_TYPES = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa")


def read_host_key(text: str) -> bytes:
    """Return the key in the wire's form from ``TYPE BASE64`` (or the BASE64 alone), as a connection's extra has it.

    Raises:
        ValueError: It is no such key; says what was got and what is allowed.
    """
    parts = text.split()
    kind, encoded = (parts[0], parts[1]) if len(parts) > 1 else (None, "".join(parts))
    if kind is not None and kind not in HOST_KEY_TYPES:
        raise ValueError(
            f"{kind!r} is no type of host key; allowed: {', '.join(HOST_KEY_TYPES)} and the key behind it "
            "(a line of ssh-keyscan without the host's name)"
        )
    try:
        key = base64.b64decode(encoded, validate=True)
        found = key_type(key)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{encoded[:20]!r}... is no host key; give 'TYPE BASE64' as ssh-keyscan prints it") from error
    if found not in HOST_KEY_TYPES or kind not in (None, found):
        raise ValueError(f"the key is of type {found!r}; allowed: {', '.join(HOST_KEY_TYPES)}, and the one it says")
    return key


def key_type(key: bytes) -> str:
    """Return the type that a key in the wire's form names.

    Raises:
        ValueError: It is too short for one.
    """
    length = int.from_bytes(key[:4], "big")
    if not 0 < length <= len(key) - 4:
        raise ValueError("it names no type")
    return key[4 : 4 + length].decode("ascii")


def fingerprint(key: bytes) -> str:
    """Return a key as people compare it: what ``ssh-keygen -l`` shows."""
    digest = base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")
    return f"{key_type(key)} SHA256:{digest}"


def in_order_of(offered: tuple[str, ...], kind: str) -> tuple[str, ...]:
    """Return the algorithms with those of a key's type first, so that a host with several keys shows the pinned one."""
    first = [name for name in offered if name == kind or (kind == "ssh-rsa" and name.startswith("rsa-sha2"))]
    return (*first, *(name for name in offered if name not in first))
