"""The endpoints below ``/taas``: what the client needs beyond Airflow's own REST API.

A client holds an Airflow token and no keys of the store: files go up and artifacts and logs come down by presigned URLs
that these endpoints hand out. Reading needs the right to see runs of the DAG, writing the right to trigger it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Annotated, Any

from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.common.db.common import SessionDep
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_dag
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Path, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from taas.errors import (
    ArtifactError,
    ObjectMissing,
    ProjectConflict,
    ProjectError,
    RequestError,
    StoreUnavailable,
    TaasError,
)
from taas.request import request_schema
from taas_tasks import project as repository
from taas_tasks.airflow.conf_check import DAG_ID
from taas_tasks.airflow.deployment import read_store_config
from taas_tasks.airflow.run_status import run_status
from taas_tasks.blobs import FileEntry
from taas_tasks.layout import ProjectKeys, RunKeys, payload_key, run_key
from taas_tasks.rank_logs import CURSOR_PATTERN, read_logs
from taas_tasks.store import ObjectStore, open_store
from taas_tasks.values import ArtifactRecord

_URL_LIFETIME_S = 3600
_MAX_ITEMS = 10_000
_THREADS = 16

_SHA256 = r"^[0-9a-f]{64}$"
_Sha256 = Annotated[str, Field(pattern=_SHA256)]
_Bytes = Annotated[int, Field(ge=0)]

CanRead = Depends(requires_access_dag("GET", DagAccessEntity.RUN, DAG_ID))
CanWrite = Depends(requires_access_dag("POST", DagAccessEntity.RUN, DAG_ID))


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Blob(_Body):
    """A content: its sha256 and size."""

    sha256: _Sha256
    bytes: _Bytes


class Uploads(_Body):
    """Contents that a client has."""

    blobs: list[Blob] = Field(max_length=_MAX_ITEMS)


class FileChange(_Body):
    """A file that is to have this content."""

    path: str
    sha256: _Sha256
    bytes: _Bytes
    mode: int = Field(default=0o644, ge=0, le=0o777)


class Commit(_Body):
    """Changes of a project that become its next record, all or none."""

    changes: list[FileChange] = Field(default=[], max_length=_MAX_ITEMS)
    removed: list[str] = Field(default=[], max_length=_MAX_ITEMS)
    base: int | None = None


@lru_cache(maxsize=2)
def _store_of(config: Any) -> ObjectStore:
    return open_store(config)


def deployed_store() -> ObjectStore:
    """Return the store that the connection names now; one client per set of credentials."""
    return _store_of(read_store_config())


def _is_there(store: ObjectStore, key: str, num_bytes: int) -> bool:
    info = store.head(key)
    return info is not None and info.num_bytes == num_bytes


def _absent(store: ObjectStore, keys: ProjectKeys, blobs: Iterable[tuple[str, int]]) -> list[str]:
    """Return the sha256 of the contents that are not in the store with their size, each once."""
    wanted = list(dict.fromkeys(blobs))
    with ThreadPoolExecutor(_THREADS) as pool:
        there = pool.map(lambda blob: _is_there(store, keys.blob(blob[0]), blob[1]), wanted)
        return [sha256 for (sha256, _), found in zip(wanted, there, strict=True) if not found]


_STATUS_OF: tuple[tuple[type[TaasError], int], ...] = (
    (ObjectMissing, 404),
    (ProjectConflict, 409),
    (ProjectError, 400),
    (RequestError, 400),
    (ArtifactError, 400),
    (StoreUnavailable, 503),
)


async def _answer_error(_request: Request, error: Exception) -> JSONResponse:
    status = next((code for kind, code in _STATUS_OF if isinstance(error, kind)), 502)
    return JSONResponse({"detail": str(error)}, status_code=status)


def _project_keys(project: str) -> ProjectKeys:
    rule = request_schema()["properties"]["project"]
    if len(project) > rule["maxLength"] or not re.fullmatch(rule["pattern"], project):
        raise HTTPException(400, f"got the project name {project!r}; allowed: {rule['pattern']}")
    return ProjectKeys(project)


Store = Annotated[ObjectStore, Depends(deployed_store)]
Keys = Annotated[ProjectKeys, Depends(_project_keys)]

router = APIRouter()


@router.get("/projects/{project}/files", dependencies=[CanRead])
def files(keys: Keys, store: Store) -> dict[str, Any]:
    """Return the files of the project's head."""
    number, snapshot = repository.head(store, keys.project)
    entries = repository.snapshot_files(store, keys.project, snapshot)
    listed = [
        {"path": path, "sha256": entry.sha256, "bytes": entry.bytes, "mode": entry.mode}
        for path, entry in sorted(entries.items())
    ]
    return {"record": number, "snapshot": snapshot, "files": listed}


@router.post("/projects/{project}/uploads", dependencies=[CanWrite])
def uploads(keys: Keys, body: Uploads, store: Store) -> dict[str, Any]:
    """Return which contents are missing, and where to PUT them."""
    missing = _absent(store, keys, [(blob.sha256, blob.bytes) for blob in body.blobs])
    return {
        "missing": [
            {"sha256": sha256, "url": store.presign_put(keys.blob(sha256), expires_s=_URL_LIFETIME_S)}
            for sha256 in missing
        ]
    }


@router.post("/projects/{project}/commits", dependencies=[CanWrite])
def commits(keys: Keys, body: Commit, store: Store, user: GetUserDep) -> dict[str, Any]:
    """Make the changes the project's next record. Contents are verified by sha256 wherever they are read."""
    missing = set(_absent(store, keys, [(one.sha256, one.bytes) for one in body.changes]))
    if missing:
        names = ", ".join(one.path for one in body.changes if one.sha256 in missing)
        raise HTTPException(409, f"not uploaded yet, or with another size: {names}; upload them and commit again")
    entries = {one.path: FileEntry(sha256=one.sha256, bytes=one.bytes, mode=one.mode) for one in body.changes}
    record = repository.commit(
        store, keys.project, entries, removed=body.removed, base=body.base, author=user.get_name()
    )
    return {"record": record.number, "snapshot": record.snapshot}


@router.get("/projects/{project}/blobs/{sha256}", dependencies=[CanRead])
def blob(keys: Keys, sha256: Annotated[str, Path(pattern=_SHA256)], store: Store) -> dict[str, Any]:
    """Return where a content can be read."""
    key = keys.blob(sha256)
    if store.head(key) is None:
        raise HTTPException(404, f"project {keys.project!r} has no content {sha256}")
    return {"url": store.presign_get(key, expires_s=_URL_LIFETIME_S)}


@router.post("/projects/{project}/payloads", dependencies=[CanWrite])
def payloads(keys: Keys, body: Blob, store: Store) -> dict[str, Any]:
    """Return the key of a payload, and where to PUT it; no URL when it is there already."""
    key = payload_key(keys.project, body.sha256)
    there = _is_there(store, key, body.bytes)
    return {"key": key, "url": None if there else store.presign_put(key, expires_s=_URL_LIFETIME_S)}


@router.get("/runs/status", dependencies=[CanRead])
def status(run_id: str, session: SessionDep, store: Store) -> dict[str, Any]:
    """Return a run's state, what it is doing and how far its loaders are prepared."""
    return _found(run_status(session, store, run_id), run_id)


@router.get("/runs/report", dependencies=[CanRead])
def report(run_id: str, store: Store) -> JSONResponse:
    """Return the run's report."""
    text = _get_or_404(store, RunKeys(run_key(run_id)).report, f"run {run_id!r} has no report yet")
    return JSONResponse(json.loads(text))


@router.get("/runs/artifacts", dependencies=[CanRead])
def artifacts(run_id: str, store: Store) -> dict[str, Any]:
    """Return the files that the run published, and where each can be read."""
    text = _get_or_404(store, RunKeys(run_key(run_id)).artifacts, f"run {run_id!r} has published nothing yet")
    record = ArtifactRecord.model_validate_json(text)
    keys = ProjectKeys(record.project)
    listed = [
        {
            "path": one.path,
            "sha256": one.sha256,
            "bytes": one.bytes,
            "mode": one.mode,
            "url": store.presign_get(keys.blob(one.sha256), expires_s=_URL_LIFETIME_S),
        }
        for one in record.files
    ]
    return {"record": record.record, "files": listed}


@router.get("/runs/logs", dependencies=[CanRead])
def logs(
    run_id: str,
    store: Store,
    rank: Annotated[int | None, Query(ge=0, le=10_000)] = None,
    cursor: Annotated[str, Query(max_length=4000, pattern=CURSOR_PATTERN)] = "",
) -> dict[str, Any]:
    """Return what a rank (by default every rank) has written behind a cursor so far, and the next cursor."""
    part = read_logs(store, run_key(run_id), rank=rank, cursor=cursor)
    texts = [{"host": one.host, "rank": one.rank, "text": one.text} for one in part.texts]
    return {"texts": texts, "cursor": part.cursor, "complete": part.complete}


def _get_or_404(store: ObjectStore, key: str, message: str) -> bytes:
    try:
        return store.get(key)
    except ObjectMissing:
        raise HTTPException(404, message) from None


def _found(found: dict[str, Any] | None, run_id: str) -> dict[str, Any]:
    if found is None:
        raise HTTPException(404, f"there is no run {run_id!r} of {DAG_ID}")
    return found


def make_app() -> FastAPI:
    """Return the app; tests put another store in by ``dependency_overrides[deployed_store]``."""
    app = FastAPI(title="TaaS", description=__doc__)
    app.add_exception_handler(TaasError, _answer_error)
    app.include_router(router)
    return app
