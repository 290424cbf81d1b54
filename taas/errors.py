"""Every error of TaaS, as one tree.

    TaasError
    |-- RequestError          the request's conf is wrong; carries every fault at once
    |-- RegisterError         (also a ValueError) a loader cannot be registered or unregistered
    |-- ClientError           Airflow or its TaaS endpoints could not be reached, or refused
    |-- StoreError
    |   |-- ObjectMissing     no object has this key
    |   |-- ObjectCorrupt     the bytes are not those that were written
    |   |-- StoreRefused      credentials, permissions, or a store that ignores If-None-Match
    |   `-- StoreUnavailable  network trouble, 5xx, throttling (a retry can help)
    |-- PrepareError
    |   |-- LoaderError       the user's loader, dataset or collate_fn raised or cannot be prepared
    |   |-- ElementError      an element that no column can hold
    |   `-- StreamTaken       another try of the machine reads the same stream (a retry can help)
    |-- DeliveryError         a rank cannot be given what it asks for
    |-- LaunchError
    |   |-- HostUnreachable   the transport cannot reach the host (a retry can help)
    |   |-- HostRefused       the host may not or cannot be used as it is described: its key, the login, its python
    |   |-- RequirementsFailed  pip could not install a request's requirements on a host
    |   |-- NoCapacity        not enough free hosts of the flavor now (a retry can help)
    |   |-- JobFailed         a job on a host ended badly; carries the verdict
    |   |   |-- JobLost       its supervisor died (a retry can help)
    |   |   |-- JobTimeout    it ran longer than allowed
    |   |   `-- RankFailed    a rank of the training failed; names the first one
    |   `-- PreflightFailed   hosts are not fit for the training; carries every finding
    |-- ProjectError          a project's files cannot be read or written as asked (a bad path, an unknown snapshot)
    |   `-- ProjectConflict   someone else changed the same files meanwhile; names them
    |-- ArtifactError         what rank 0 wrote cannot be published
    `-- RunCancelled          a user stopped the run

A message says what is wrong, what was got, what is allowed and how to mend it, in one line where it can.
"""

from __future__ import annotations

from typing import Any, ClassVar


class TaasError(Exception):
    """Base of all errors of TaaS.

    Carries ``fields`` (JSON values that describe the case), survives pickling and a JSON round trip, and says whether
    doing the same again can help (``retryable``).
    """

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form that ``error_from_dict`` reads."""
        return {"type": type(self).__name__, "message": self.message, "fields": self.fields}


def _rebuild(kind: type[TaasError], message: str, fields: dict[str, Any]) -> TaasError:
    return kind(message, **fields)


class RequestError(TaasError):
    """The request is wrong. ``fields["faults"]`` lists every fault: ``{"field", "message"}``."""


class RegisterError(TaasError, ValueError):
    """A loader cannot be registered, or is not registered."""


class ClientError(TaasError):
    """Airflow, or the TaaS endpoints in it, could not be reached or refused."""


class StoreError(TaasError):
    """The object store did not do what was asked."""


class ObjectMissing(StoreError):
    """No object has this key (``fields["key"]``)."""


class ObjectCorrupt(StoreError):
    """The bytes under a key are not those that were written."""


class StoreRefused(StoreError):
    """Credentials or permissions are wrong, or the store ignores ``If-None-Match``."""


class StoreUnavailable(StoreError):
    """The store does not answer, or throttles, after all retries."""

    retryable = True


class PrepareError(TaasError):
    """Preparing a loader's elements failed."""


class LoaderError(PrepareError):
    """The user's loader, dataset, sampler or collate_fn raised, or cannot be prepared; carries the user's traceback."""


class ElementError(PrepareError):
    """An element cannot be stored as columns."""


class StreamTaken(PrepareError):
    """Another try commits segments of the same stream that are not those of this one; the ledger's count."""

    retryable = True


class DeliveryError(TaasError):
    """A rank cannot be given the elements it asks for."""


class LaunchError(TaasError):
    """Starting or running something on a host failed."""


class HostUnreachable(LaunchError):
    """The transport cannot reach the host."""

    retryable = True


class HostRefused(LaunchError):
    """The host may not or cannot be used as inventory and connection describe it: somebody must mend one of them."""


class RequirementsFailed(LaunchError):
    """The request's requirements cannot be installed on a host; the message has pip's last lines."""


class NoCapacity(LaunchError):
    """Not enough hosts of the flavor are free."""

    retryable = True


class JobFailed(LaunchError):
    """A job on a host ended with a failure."""


class JobLost(JobFailed):
    """A job's supervisor died; what it left was reaped."""

    retryable = True


class JobTimeout(JobFailed):
    """A job ran longer than its timeout, or its lease ran out."""


class PreflightFailed(LaunchError):
    """The hosts are not fit for the training. ``fields["findings"]`` lists what was found, per host."""


class RankFailed(JobFailed):
    """A rank of the training failed; the message names the first one, its host, the class and the traceback's tail."""


class ProjectError(TaasError):
    """Files of a project cannot be read or written as asked."""


class ProjectConflict(ProjectError):
    """The same files were changed on both sides. ``fields["paths"]`` lists them."""


class ArtifactError(TaasError):
    """What rank 0 wrote cannot be staged or published."""


class RunCancelled(TaasError):
    """A user stopped the run."""


def _tree(kind: type[TaasError]) -> dict[str, type[TaasError]]:
    found = {kind.__name__: kind}
    for child in kind.__subclasses__():
        found.update(_tree(child))
    return found


def error_from_dict(value: dict[str, Any]) -> TaasError:
    """Return the error that ``TaasError.to_dict`` described; an unknown type becomes a plain ``TaasError``."""
    kind = _tree(TaasError).get(str(value.get("type")), TaasError)
    return kind(str(value.get("message", "")), **dict(value.get("fields") or {}))
