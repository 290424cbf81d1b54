"""The client of Airflow's REST API and of the TaaS endpoints beside it: one method per request, errors as sentences.

A client holds an Airflow token and no keys of the store: contents go up and come down by presigned URLs.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from taas.client_config import ClientConfig
from taas.errors import ClientError, RequestError
from taas.flavors import Flavor, load_flavors
from taas.log_text import LogText
from taas.request import PROJECT_PATTERN, PROJECT_TEXT, parse_request, request_digest

DAG_ID = "taas_train"
FINAL_STATES = ("success", "failed")

_RUNS = f"/api/v2/dags/{DAG_ID}/dagRuns"
_TIMEOUT = httpx.Timeout(60.0, connect=10.0)
_PAUSES_S = (0.2, 0.5, 1.0, 2.0)
_TRANSIENT = (429, 502, 503, 504)
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout)
_NO_ENDPOINTS = "Airflow at {url} has no TaaS endpoints; is the TaaS plugin installed there?"
_BATCH = 500


@dataclass(frozen=True)
class FileInfo:
    """A file of a project, or an artifact: path in the project, content and mode; ``url`` reads it, where known."""

    path: str
    sha256: str
    bytes: int
    mode: int = 0o644
    url: str | None = None

    def to_change(self) -> dict[str, Any]:
        """Return what a commit says of the file."""
        return {"path": self.path, "sha256": self.sha256, "bytes": self.bytes, "mode": self.mode}


@dataclass(frozen=True)
class ProjectFiles:
    """The head of a project: number of the record (0: none yet), snapshot, and files by path."""

    record: int
    snapshot: str
    files: dict[str, FileInfo]


class Client:
    """A connection to one Airflow. Safe to use from several threads; close it, or use it in a ``with``.

    Args:
        config: Where Airflow is and who asks.
        transport: How requests travel (tests put their own in).
        sleep: How to pause between tries.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.config = config
        self.sleep = sleep
        self._token = config.token
        # A proxy named in the environment has no way to this machine's own loopback.
        trust_env = urlsplit(config.url).hostname not in ("127.0.0.1", "localhost", "::1")
        self._http = httpx.Client(base_url=config.url, transport=transport, timeout=_TIMEOUT, trust_env=trust_env)
        self.storage = httpx.Client(transport=transport, timeout=_TIMEOUT, trust_env=trust_env)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()
        self.storage.close()

    @property
    def flavors(self) -> dict[str, Flavor]:
        """The flavors that requests are checked with before they are sent."""
        return load_flavors(self.config.flavors_file)

    def run_url(self, run_id: str) -> str:
        """Return the address of a run in Airflow's pages."""
        return f"{self.config.url}/dags/{DAG_ID}/runs/{quote(run_id, safe='')}"

    # Airflow's own API

    def trigger(self, conf: Mapping[str, Any], *, run_id: str) -> None:
        """Start a run under an id of ours; when it is there already with the same request, that is the same.

        Raises:
            RequestError: Airflow refused the conf.
            ClientError: the id is taken by a run with another request, or anything else went wrong.
        """
        body = {"dag_run_id": run_id, "logical_date": None, "conf": dict(conf)}
        reply = self._send("POST", _RUNS, json=body, accept=(400, 404, 409, 422))
        if reply.status_code == 409:
            self._check_same(run_id, conf)
        elif reply.status_code == 404:
            raise ClientError(
                f"Airflow at {self.config.url} has no DAG {DAG_ID}; is the TaaS DAG folder installed, and parsed yet?",
                status=404,
            )
        elif reply.status_code in (400, 422):
            raise RequestError(_detail(reply), status=reply.status_code)

    def run(self, run_id: str) -> dict[str, Any]:
        """Return what Airflow says of a run: ``state``, ``conf``, ``start_date``, ``end_date``, ..."""
        return self._get(_run_path(run_id), missing=f"there is no run '{run_id}' at {self.config.url}; see: taas runs")

    def runs(self, *, limit: int = 50) -> list[dict[str, Any]]:
        """Return the latest runs, the newest first."""
        found: list[dict[str, Any]] = self._get(_RUNS, params={"limit": limit, "order_by": "-run_after"})["dag_runs"]
        return found

    def task_instances(self, run_id: str) -> list[dict[str, Any]]:
        """Return what Airflow says of a run's task instances."""
        found: list[dict[str, Any]] = self._get(f"{_run_path(run_id)}/taskInstances")["task_instances"]
        return found

    def cancel(self, run_id: str) -> str:
        """Mark a run failed, which stops all that it does; return its state before.

        A run that is over stays as it is.
        """
        before = str(self.run(run_id)["state"])
        if before not in FINAL_STATES:
            self._send("PATCH", _run_path(run_id), json={"state": "failed"})
        return before

    # The TaaS endpoints

    def project_files(self, project: str) -> ProjectFiles:
        """Return the files of a project's head."""
        reply = self._get(f"{_project_path(project)}/files")
        return ProjectFiles(reply["record"], reply["snapshot"], {f.path: f for f in map(_file_info, reply["files"])})

    def missing_blobs(self, project: str, blobs: Iterable[tuple[str, int]]) -> dict[str, str]:
        """Return, of contents given as (sha256, bytes), those that the project lacks: sha256 -> URL to PUT it to."""
        wanted = [{"sha256": sha256, "bytes": size} for sha256, size in dict(blobs).items()]
        urls: dict[str, str] = {}
        for first in range(0, len(wanted), _BATCH):
            body = {"blobs": wanted[first : first + _BATCH]}
            reply = self._post(f"{_project_path(project)}/uploads", body)
            urls |= {item["sha256"]: item["url"] for item in reply["missing"]}
        return urls

    def commit(self, project: str, *, changes: Sequence[FileInfo], removed: Sequence[str], base: int) -> int:
        """Make changes the project's next record, on top of record ``base``; return its number."""
        body = {"changes": [file.to_change() for file in changes], "removed": list(removed), "base": base}
        return int(self._post(f"{_project_path(project)}/commits", body, is_repeatable=False)["record"])

    def blob_url(self, project: str, sha256: str) -> str:
        """Return a URL that reads a content of a project."""
        return str(self._get(f"{_project_path(project)}/blobs/{sha256}")["url"])

    def payload_target(self, project: str, *, sha256: str, num_bytes: int) -> tuple[str, str | None]:
        """Return a payload's key, and the URL to PUT it to (None: it is there)."""
        body = {"sha256": sha256, "bytes": num_bytes}
        reply = self._post(f"{_project_path(project)}/payloads", body)
        return reply["key"], reply["url"]

    def status(self, run_id: str) -> dict[str, Any]:
        """Return the status of a run as the endpoint gives it."""
        return self._get("/taas/runs/status", params={"run_id": run_id}, missing=f"there is no run '{run_id}'")

    def report(self, run_id: str) -> dict[str, Any]:
        """Return a run's report."""
        return self._get("/taas/runs/report", params={"run_id": run_id})

    def artifacts(self, run_id: str) -> list[FileInfo]:
        """Return the files that a run published, each with a URL that reads it."""
        reply = self._get("/taas/runs/artifacts", params={"run_id": run_id})
        return [_file_info(item) for item in reply["files"]]

    def logs(self, run_id: str, *, rank: int | None, cursor: str) -> tuple[list[LogText], str, bool]:
        """Return what a rank (None: every rank) wrote behind a cursor, the next cursor, and whether that was all."""
        asked: dict[str, str | int] = {"run_id": run_id, "cursor": cursor}
        reply = self._get("/taas/runs/logs", params=asked if rank is None else {**asked, "rank": rank})
        texts = [LogText(item["text"], item["host"], item["rank"]) for item in reply["texts"]]
        return texts, str(reply["cursor"]), bool(reply["complete"])

    # Requests

    def _check_same(self, run_id: str, conf: Mapping[str, Any]) -> None:
        theirs = self.run(run_id).get("conf") or {}
        if not self._is_same(theirs, conf):
            message = f"run id '{run_id}' is taken by a run with another request; choose another, or leave it out"
            raise ClientError(message, run_id=run_id)

    def _is_same(self, left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
        with contextlib.suppress(RequestError):
            digests = {request_digest(parse_request(conf, flavors=self.flavors)) for conf in (left, right)}
            return len(digests) == 1
        return dict(left) == dict(right)

    def _get(
        self, path: str, *, params: Mapping[str, str | int] | None = None, missing: str | None = None
    ) -> dict[str, Any]:
        reply = self._send("GET", path, params=params, accept=(404,) if missing else ())
        if reply.status_code == 404:
            raise ClientError(missing or "", status=404)
        value: dict[str, Any] = _json(reply, self.config.url)
        return value

    def _post(self, path: str, body: Any, *, is_repeatable: bool = True) -> dict[str, Any]:
        reply = self._send("POST", path, json=body, is_repeatable=is_repeatable)
        value: dict[str, Any] = _json(reply, self.config.url)
        return value

    def _send(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, str | int] | None = None,
        accept: Sequence[int] = (),
        is_repeatable: bool = True,
    ) -> httpx.Response:
        """Send a request as the user, with a fresh token when the old one has expired."""
        if self._token is None:
            self._token = self._login()
        reply = self._try(method, path, json=json, params=params, token=self._token, is_repeatable=is_repeatable)
        if _is_stale(reply) and self.config.password is not None:
            self._token = self._login()
            reply = self._try(method, path, json=json, params=params, token=self._token, is_repeatable=is_repeatable)
        if reply.is_success or reply.status_code in accept:
            return reply
        raise self._refused(reply, f"{method} {path}")

    def _login(self) -> str:
        if self.config.username is None or self.config.password is None:
            raise ClientError(
                f"no credentials for Airflow at {self.config.url}; set TAAS_USERNAME and TAAS_PASSWORD, or TAAS_TOKEN, "
                "or put them into ~/.config/taas.toml"
            )
        body = {"username": self.config.username, "password": self.config.password}
        reply = self._try("POST", "/auth/token", json=body, params=None, token=None, is_repeatable=True)
        if reply.status_code in (400, 401, 403, 422):
            raise ClientError(
                f"Airflow at {self.config.url} refused user '{self.config.username}': wrong username or password "
                "(TAAS_USERNAME, TAAS_PASSWORD, or the client's file)",
                status=reply.status_code,
            )
        if not reply.is_success:
            raise self._refused(reply, "POST /auth/token")
        return str(_json(reply, self.config.url)["access_token"])

    def _try(self, method: str, path: str, *, token: str | None, is_repeatable: bool, **kwargs: Any) -> httpx.Response:
        """Send a request, again after trouble on the way; one that must not be repeated only if it never arrived."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        for pause_s in (*_PAUSES_S, None):
            try:
                reply = self._http.request(method, path, headers=headers, **kwargs)
            except httpx.TransportError as error:
                if pause_s is None or not (is_repeatable or isinstance(error, _NOT_SENT)):
                    raise self._unreachable(error) from error
            except httpx.InvalidURL as error:
                raise ClientError(f"'{self.config.url}' is no address of an Airflow: {error}") from error
            else:
                if pause_s is None or not is_repeatable or reply.status_code not in _TRANSIENT:
                    return reply
            self.sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    def _unreachable(self, error: httpx.TransportError) -> ClientError:
        kind = "did not answer in time" if isinstance(error, httpx.TimeoutException) else f"cannot be reached: {error}"
        hint = "is it running? Start the local stack with 'taas up', or set TAAS_URL"
        return ClientError(f"Airflow at {self.config.url} {kind}; {hint}", transient=True)

    def _refused(self, reply: httpx.Response, what: str) -> ClientError:
        code, detail = reply.status_code, _detail(reply)
        who = f"user '{self.config.username}'" if self.config.username else "the token"
        if _is_stale(reply):
            message = (
                f"Airflow at {self.config.url} does not accept {who}: {detail}. Log in again (TAAS_TOKEN expired?)"
            )
        elif code == 403:
            message = f"{who} may not do this at {self.config.url} ({what}): {detail}"
        elif _is_ours(what) and detail in ("Not Found", "Method Not Allowed"):
            message = _NO_ENDPOINTS.format(url=self.config.url)
        elif 400 <= code < 500 and _is_ours(what) and detail:
            message = detail
        else:
            message = f"Airflow at {self.config.url} answered {code} to {what}: {detail or 'no reason given'}"
        return ClientError(message, status=code, transient=code in _TRANSIENT)


def _is_stale(reply: httpx.Response) -> bool:
    """Return whether a token is not accepted: it expired (401), or was signed with another key (403, by its text)."""
    return reply.status_code == 401 or (reply.status_code == 403 and "JWT" in _detail(reply))


def _is_ours(what: str) -> bool:
    """Return whether a request went to a TaaS endpoint, whose reasons are written for people."""
    return " /taas/" in what


def _run_path(run_id: str) -> str:
    return f"{_RUNS}/{quote(run_id, safe='')}"


def _project_path(project: str) -> str:
    if not re.fullmatch(PROJECT_PATTERN, project):
        raise ClientError(f"got the project name '{project}'; allowed: {PROJECT_TEXT}", project=project)
    return f"/taas/projects/{quote(project, safe='')}"


def _file_info(item: Mapping[str, Any]) -> FileInfo:
    return FileInfo(item["path"], item["sha256"], item["bytes"], item.get("mode", 0o644), item.get("url"))


def _json(reply: httpx.Response, url: str) -> Any:
    try:
        return reply.json()
    except ValueError as error:
        path = reply.request.url.path
        ours = _NO_ENDPOINTS.format(url=url)
        message = ours if path.startswith("/taas/") else f"{url} answered no JSON to {path}; is it an Airflow?"
        raise ClientError(message) from error


def _detail(reply: httpx.Response) -> str:
    """Return the reason that a refusal gives, in one line per fault."""
    try:
        detail = reply.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return reply.text.strip().partition("\n")[0][:200]
    if isinstance(detail, list):
        return "\n".join(_detail_item(item) for item in detail)
    if isinstance(detail, Mapping):
        return str(detail.get("message") or detail.get("reason") or dict(detail))
    return str(detail)


def _detail_item(item: Any) -> str:
    if not isinstance(item, Mapping):
        return str(item)
    where = ".".join(str(part) for part in item.get("loc", ()) if part not in ("body", "query", "path"))
    return f"{where}: {item.get('msg')}" if where else str(item.get("msg"))


__all__ = ["DAG_ID", "FINAL_STATES", "Client", "ClientConfig", "FileInfo", "ProjectFiles"]
