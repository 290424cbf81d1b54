"""The object store: one small protocol (``base``), S3 (``s3``) and an in-memory one for tests (``memory``)."""

from __future__ import annotations

from taas_tasks.store.base import ObjectInfo, ObjectStore
from taas_tasks.store.credentials import KeySource
from taas_tasks.values import StoreConfig

__all__ = ["ObjectInfo", "ObjectStore", "open_store"]


def open_store(config: StoreConfig, *, credentials: KeySource | None = None) -> ObjectStore:
    """Return the S3 store that ``config`` describes; connects on first use, not here.

    ``credentials``: renewed keys that win over the ones in ``config``.

    Open one per process: a store that was opened before a fork shares its connections with the parent.
    """
    from taas_tasks.store.s3 import S3Store  # boto3 takes 0.3 s to import

    return S3Store(config, credentials=credentials)
