"""An Airflow with the TaaS endpoints and a store, as an httpx transport: the contract in memory, faults on order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import httpx

from taas.client import Client
from taas.client_config import ClientConfig

URL = "http://airflow.test:8080"
STORE = "http://store.test:9000"
RUNS = "/api/v2/dags/taas_train/dagRuns"
Handler = Callable[[httpx.Request], httpx.Response]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class FakeAirflow:
    """Keeps runs, projects and contents. ``before`` handlers come first, each once: they raise, answer or give None."""

    def __init__(self) -> None:
        self.password = "pw"
        self.tokens = 0
        self.valid_token = ""
        self.runs: dict[str, dict[str, Any]] = {}
        self.statuses: dict[str, list[dict[str, Any]]] = {}
        self.reports: dict[str, dict[str, Any]] = {}
        self.artifacts: dict[str, list[tuple[str, bytes, int]]] = {}
        # per run and rank: answers, one a question (the last one is given again): (host, rank, text)s, and whether all
        self.logs: dict[tuple[str, int | None], list[tuple[list[tuple[str | None, int | None, str]], bool]]] = {}
        self.blobs: dict[str, bytes] = {}
        self.heads: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {}
        self.requests: list[httpx.Request] = []
        self.before: list[Callable[[httpx.Request], httpx.Response | None]] = []
        self.pauses: list[float] = []

    def client(self, **config: Any) -> Client:
        values = {"url": URL, "username": "admin", "password": "pw", **config}
        return Client(ClientConfig(**values), transport=httpx.MockTransport(self.handle), sleep=self.pauses.append)

    def put_project(self, project: str, files: dict[str, bytes]) -> None:
        number = self.heads.get(project, (0, {}))[0] + 1
        self.blobs.update({sha256(data): data for data in files.values()})
        listed = {
            path: {"path": path, "sha256": sha256(data), "bytes": len(data), "mode": 0o644}
            for path, data in files.items()
        }
        self.heads[project] = (number, listed)

    def handle(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.requests.append(request)
        if self.before and (answer := self.before.pop(0)(request)) is not None:
            return answer
        if request.url.host == "store.test":
            return self._store(request)
        if request.url.path == "/auth/token":
            return self._login(request)
        if request.headers.get("Authorization") != f"Bearer {self.valid_token}":
            return httpx.Response(401, json={"detail": "Not authenticated"})
        path = unquote(request.url.raw_path.decode().partition("?")[0])
        if path.startswith(RUNS):
            return self._airflow(request, path.removeprefix(RUNS).strip("/"))
        if path.startswith("/taas/projects/"):
            return self._project(request, *path.removeprefix("/taas/projects/").split("/", 1))
        return self._run(path.removeprefix("/taas/runs/"), dict(request.url.params))

    def _login(self, request: httpx.Request) -> httpx.Response:
        if json.loads(request.content) != {"username": "admin", "password": self.password}:
            return httpx.Response(401, json={"detail": "Invalid credentials"})
        self.tokens += 1
        self.valid_token = f"token-{self.tokens}"
        return httpx.Response(201, json={"access_token": self.valid_token})

    def _airflow(self, request: httpx.Request, rest: str) -> httpx.Response:
        if request.method == "POST":
            return self._trigger(json.loads(request.content))
        if not rest:
            newest = list(reversed(self.runs.values()))[: int(request.url.params["limit"])]
            return httpx.Response(200, json={"dag_runs": newest, "total_entries": len(self.runs)})
        run_id, _, part = rest.partition("/")
        if run_id not in self.runs:
            return httpx.Response(404, json={"detail": "The DagRun was not found"})
        if part == "taskInstances":
            tasks = [{"task_id": "validate", "map_index": -1, "state": "success"}]
            return httpx.Response(200, json={"task_instances": tasks})
        if request.method == "PATCH":
            self.runs[run_id] |= json.loads(request.content)
        return httpx.Response(200, json=self.runs[run_id])

    def _trigger(self, body: dict[str, Any]) -> httpx.Response:
        assert set(body) == {"dag_run_id", "logical_date", "conf"}
        assert body["logical_date"] is None
        run_id = body["dag_run_id"]
        if run_id in self.runs:
            return httpx.Response(409, json={"detail": {"reason": "Unique constraint violation"}})
        self.runs[run_id] = {"dag_run_id": run_id, "state": "queued", "conf": body["conf"], "start_date": "2026-01-01"}
        return httpx.Response(200, json=self.runs[run_id])

    def _project(self, request: httpx.Request, project: str, what: str) -> httpx.Response:
        number, files = self.heads.get(project, (0, {}))
        if what == "files":
            return httpx.Response(200, json={"record": number, "snapshot": f"s{number}", "files": list(files.values())})
        if what.startswith("blobs/"):
            return httpx.Response(200, json={"url": f"{STORE}/{what.removeprefix('blobs/')}"})
        body = json.loads(request.content)
        if what == "uploads":
            missing = [blob["sha256"] for blob in body["blobs"] if blob["sha256"] not in self.blobs]
            return httpx.Response(200, json={"missing": [{"sha256": s, "url": f"{STORE}/{s}"} for s in missing]})
        if what == "payloads":
            there = body["sha256"] in self.blobs
            url = None if there else f"{STORE}/{body['sha256']}"
            return httpx.Response(200, json={"key": f"projects/{project}/payloads/{body['sha256']}", "url": url})
        assert what == "commits"
        if body["base"] not in (None, number):
            return httpx.Response(409, json={"detail": f"project {project} is at record {number} now; do it again"})
        absent = [one["path"] for one in body["changes"] if one["sha256"] not in self.blobs]
        if absent:
            return httpx.Response(409, json={"detail": f"not uploaded: {absent}"})
        kept = {path: info for path, info in files.items() if path not in body["removed"]}
        self.heads[project] = (number + 1, {**kept, **{one["path"]: one for one in body["changes"]}})
        return httpx.Response(200, json={"record": number + 1, "snapshot": f"s{number + 1}"})

    def _run(self, what: str, params: dict[str, str]) -> httpx.Response:
        run_id = params["run_id"]
        if what == "status":
            found = self.statuses.get(run_id)
            if not found:
                return httpx.Response(404, json={"detail": f"there is no run '{run_id}' of taas_train"})
            return httpx.Response(200, json={"run_id": run_id, **(found.pop(0) if len(found) > 1 else found[0])})
        if what == "report":
            report = self.reports.get(run_id)
            missing = {"detail": f"run '{run_id}' has no report yet"}
            return httpx.Response(200, json=report) if report else httpx.Response(404, json=missing)
        if what == "artifacts":
            files = [
                {
                    "path": path,
                    "sha256": sha256(data),
                    "bytes": len(data),
                    "mode": mode,
                    "url": f"{STORE}/{sha256(data)}",
                }
                for path, data, mode in self.artifacts.get(run_id, [])
            ]
            self.blobs.update({sha256(data): data for _, data, _ in self.artifacts.get(run_id, [])})
            return httpx.Response(200, json={"files": files})
        assert what == "logs"
        answers = self.logs.get((run_id, int(params["rank"]) if "rank" in params else None), [([], False)])
        said, complete = answers.pop(0) if len(answers) > 1 else answers[0]
        texts = [{"host": host, "rank": rank, "text": text} for host, rank, text in said]
        cursor = str(int(params["cursor"] or 0) + len(texts)) if texts else params["cursor"]
        return httpx.Response(200, json={"texts": texts, "cursor": cursor, "complete": complete})

    def _store(self, request: httpx.Request) -> httpx.Response:
        assert "Authorization" not in request.headers  # a presigned URL says all; the token is not for the store
        name = request.url.path.strip("/")
        if request.method == "PUT":
            assert request.headers["Content-Length"] == str(len(request.content))
            assert "Transfer-Encoding" not in request.headers
            self.blobs[name] = request.content
            return httpx.Response(200)
        found = self.blobs.get(name)
        return httpx.Response(404) if found is None else httpx.Response(200, content=found)


def fails(error: type[httpx.TransportError] = httpx.ReadError) -> Callable[[httpx.Request], httpx.Response | None]:
    """A fault: the connection breaks before the request is handled."""

    def before(request: httpx.Request) -> httpx.Response | None:
        raise error("the line is cut", request=request)

    return before


def answers(status: int, body: Any = None) -> Callable[[httpx.Request], httpx.Response | None]:
    """A fault: this answer instead of the right one."""
    return lambda _request: httpx.Response(status, json=body)
