"""Writing whole objects by presigned URLs straight from the caller's memory.

boto3 hashes every byte for the signature and wants the body in one piece: more CPU than all else that a shard costs.
A presigned URL signs no payload, and the parts go to the socket as they are. Readers verify what they read by the
checksums that records hold; what is small carries its checksum along.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence

from taas.errors import StoreError, StoreUnavailable
from taas_tasks.store.answers import Retries, code_of, error_for
from taas_tasks.store.connections import TROUBLE, Connections, Exchange, Target

_SMALL_BYTES = 1 << 20


def md5_header(data: bytes) -> str:
    """Return the value of ``Content-MD5``: a store refuses a body that it does not fit."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _checksum(parts: Sequence[bytes | memoryview]) -> dict[str, str]:
    """Return the header for what is small: plans and the like, which have no record that holds their checksums."""
    if sum(memoryview(part).nbytes for part in parts) > _SMALL_BYTES:
        return {}
    return {"Content-MD5": md5_header(b"".join(parts))}


class HttpWriter:
    """Writes objects whose presigned URL ``sign(key)`` gives. Safe to use from several threads."""

    def __init__(self, sign: Callable[[str], str], *, retries: Retries, timeout_s: float = 60.0) -> None:
        self._sign = sign
        self._retries = retries
        self._connections = Connections(timeout_s=timeout_s)

    def put(self, key: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write the object that ``parts`` are, one after the other; an existing one is replaced.

        Raises:
            StoreRefused, StoreUnavailable: as ``ObjectStore`` says.
        """
        for attempt in range(1, self._retries.max_attempts + 1):
            error = self._try(key, parts)
            if error is None:
                return
            if not isinstance(error, StoreUnavailable) or attempt == self._retries.max_attempts:
                raise error
            self._retries.wait(attempt)

    def _try(self, key: str, parts: Sequence[bytes | memoryview]) -> StoreError | None:
        target = Target.of(self._sign(key))  # anew each time: the credentials may have been renewed
        try:
            exchange = self._connections.send(target, _checksum(parts), method="PUT", body=parts)
            text = self._text(exchange)
        except TROUBLE as error:
            reason = f"{type(error).__name__}: {error}"
            return StoreUnavailable(f"{target.scheme}://{target.netloc} does not answer ({reason})", key=key)
        status, date = exchange.response.status, exchange.response.getheader("Date")
        return None if status == 200 else error_for(key, status=status, code=code_of(text), message=text, date=date)

    def _text(self, exchange: Exchange) -> str:
        try:
            return exchange.response.read().decode(errors="replace")
        finally:
            self._connections.finish(exchange)

    def close(self) -> None:
        """Close the idle connections; the next write opens new ones."""
        self._connections.close()
