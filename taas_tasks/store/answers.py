"""What a store's failed answer means: HTTP status and S3 error code -> one of our errors."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from taas.errors import ObjectCorrupt, ObjectMissing, StoreError, StoreRefused, StoreUnavailable

RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_RETRIED_CODES = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestTimeout", "InternalError"})
_REFUSALS = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "InvalidToken"})
EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
_CLOCK_CODES = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
_MAX_SKEW_S = 900.0  # what S3 allows
_jitter = random.Random()  # of its own: the user's stream of random numbers must not move when a request is retried


@dataclass(frozen=True)
class Retries:
    """How often and how patiently a request is tried: full jitter below ``first_wait_s * 2**n``, at most 20 s."""

    max_attempts: int = 6
    first_wait_s: float = 0.2

    def wait(self, attempt: int) -> None:
        """Sleep before the try after ``attempt`` (from 1)."""
        time.sleep(_jitter.uniform(0, min(20.0, self.first_wait_s * 2**attempt)))


def code_of(body: str) -> str:
    """Return the error code in S3's XML answer, or nothing."""
    found = re.search(r"<Code>([^<]*)</Code>", body)
    return found.group(1) if found else ""


def error_for(
    key: str,
    *,
    status: int,
    code: str,
    message: str = "",
    date: str | None = None,
    clock: Callable[[], float] = time.time,
) -> StoreError:
    """Return the error that a failed answer about ``key`` means. ``date``: the answer's own, in HTTP's form."""
    if code == "NoSuchBucket":
        return StoreRefused("the bucket does not exist: make it, or correct its name in the store's connection")
    skew_s = _skew_s(date, clock())
    # An answer to a HEAD has no code: there the date alone tells.
    if code in _CLOCK_CODES or (status == 403 and not _is_named(code) and abs(skew_s or 0.0) > _MAX_SKEW_S):
        text = f"the store refused {key!r} ({_is_named(code) or status}): {_off(skew_s)}"
        return StoreRefused(f"{text}; set this machine's clock (NTP)", key=key, code=code, skew_s=skew_s)
    if code in EXPIRED_CODES:
        text = f"the store refused {key!r} ({code}): the session credentials have expired and were not renewed"
        return StoreRefused(f"{text}; renew those of the store's connection", key=key, code=code)
    if status in (401, 403) or code in _REFUSALS:
        text = f"the store refused {key!r} ({code or status}): check the access key, the secret and the bucket's policy"
        return StoreRefused(text, key=key, code=code)
    if status in RETRIED_STATUS or code in _RETRIED_CODES:
        return StoreUnavailable(f"the store is overloaded or down ({code or status}) for {key!r}", key=key, code=code)
    return _error_of_object(key, status, code, message)


def _error_of_object(key: str, status: int, code: str, message: str) -> StoreError:
    if status == 404:
        return ObjectMissing(f"no object has the key {key!r}", key=key)
    if status == 412:
        return ObjectCorrupt(f"object {key!r} was replaced while it was read", key=key)
    if status == 416:
        return ObjectCorrupt(f"object {key!r} ends before the range that was asked for", key=key)
    return StoreError(f"the store answered {status} {code} for {key!r}: {message[:200]}", key=key, code=code)


def _is_named(code: str) -> str:
    """Return the code that S3 gave, or nothing: boto3 gives the status in its place."""
    return "" if code.isdigit() else code


def _skew_s(date: str | None, now: float) -> float | None:
    """Return by how many seconds this machine's clock is ahead of the answer's date."""
    try:
        return now - parsedate_to_datetime(date).timestamp() if date else None
    except ValueError:
        return None


def _off(skew_s: float | None) -> str:
    if skew_s is None or abs(skew_s) <= _MAX_SKEW_S:
        return f"this machine's clock is more than {_MAX_SKEW_S:.0f} s off the store's"
    return f"this machine's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the store's"
