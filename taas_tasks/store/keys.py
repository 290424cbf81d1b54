"""Which object keys are allowed: those that every store keeps as they are."""

from __future__ import annotations

from taas.errors import StoreError

MAX_KEY_BYTES = 1024  # S3's limit, prefix included


def check_key(key: str) -> str:
    """Return ``key`` when every store keeps it as it is.

    Stores that map keys to folders (SeaweedFS, MinIO, gateways) normalise or refuse empty parts, ``.`` and ``..``;
    SeaweedFS takes a backslash for a slash.

    Raises:
        StoreError: the key is empty, too long, no valid unicode, or has a part that some store would change.
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in key or "\\" in key:
        raise StoreError(
            f"key {key!r} is not allowed: its parts must not be empty, '.' or '..', nor hold NUL or a backslash",
            key=key,
        )
    _check_encoding(key)
    return key


def _check_encoding(key: str) -> None:
    try:
        num_bytes = len(key.encode())
    except UnicodeEncodeError:
        raise StoreError(f"key {key!r} is no valid unicode: it has lone surrogates", key=ascii(key)) from None
    if num_bytes > MAX_KEY_BYTES:
        raise StoreError(f"key {key[:60]!r}... has {num_bytes} bytes; allowed are {MAX_KEY_BYTES}", key=key)
