"""The endpoints below /taas: mounted by Airflow itself, behind its own authentication, on a real S3 server."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from urllib.parse import quote

import httpx
import pytest

from taas_tasks.layout import ProjectKeys, RunKeys, run_key
from taas_tasks.rank_logs import Slice, pack
from taas_tasks.store import open_store
from taas_tasks.values import Artifact, ArtifactRecord, PlacedJob, Placement

# Airflow's API app imports starlette's test client, which asks for another HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx` with `starlette.testclient`")


PLACED = {"generation": 2, "flavor": "g2.8", "asked_at": 0}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def config(s3_server):
    return s3_server.fresh_config()


@pytest.fixture(scope="module")
def store(config):
    return open_store(config)


@pytest.fixture(scope="module")
def served(airflow_db, config):
    """Airflow's own API app, served on a free port of the loopback interface."""
    import uvicorn
    from airflow.api_fastapi.app import create_app

    extra = {"bucket": config.bucket, "prefix": config.prefix, "endpoint_url": config.endpoint_url}
    connection = {"conn_type": "aws", "login": config.access_key, "password": config.secret_key, "extra": extra}
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIRFLOW_CONN_TAAS_STORE", json.dumps(connection))
        server = uvicorn.Server(uvicorn.Config(create_app(apps="core"), log_level="warning", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def as_user(served):
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

    clients: list[httpx.Client] = []

    def client(role: str | None) -> httpx.Client:
        headers = {}
        if role is not None:
            user = SimpleAuthManagerUser(username=role, role=role)
            headers = {"Authorization": f"Bearer {get_auth_manager().generate_jwt(user)}"}
        clients.append(httpx.Client(base_url=served, headers=headers, timeout=30))
        return clients[-1]

    yield client
    for one in clients:
        one.close()


@pytest.fixture(scope="module")
def admin(as_user):
    return as_user("admin")


READS = [
    "/taas/projects/lm/files",
    f"/taas/projects/lm/blobs/{'0' * 64}",
    "/taas/runs/status?run_id=r",
    "/taas/runs/report?run_id=r",
    "/taas/runs/artifacts?run_id=r",
    "/taas/runs/logs?run_id=r",
]
WRITES = [
    ("/taas/projects/lm/uploads", {"blobs": []}),
    ("/taas/projects/lm/commits", {}),
    ("/taas/projects/lm/payloads", {"sha256": "0" * 64, "bytes": 1}),
]


@pytest.mark.parametrize("path", READS)
def test_nobody_reads_without_a_token(as_user, path):
    assert as_user(None).get(path).status_code == 401


@pytest.mark.parametrize("path", READS)
def test_viewer_reads(as_user, path):
    assert as_user("viewer").get(path).status_code in (200, 404)


@pytest.mark.parametrize(("path", "body"), WRITES)
def test_nobody_writes_without_a_token(as_user, path, body):
    assert as_user(None).post(path, json=body).status_code == 401


@pytest.mark.parametrize(("path", "body"), WRITES)
def test_viewer_does_not_write(as_user, path, body):
    assert as_user("viewer").post(path, json=body).status_code == 403


def upload(client, project: str, contents: list[bytes]) -> list[str]:
    blobs = [{"sha256": sha256(data), "bytes": len(data)} for data in contents]
    missing = client.post(f"/taas/projects/{project}/uploads", json={"blobs": blobs}).json()["missing"]
    by_hash = {sha256(data): data for data in contents}
    for item in missing:
        assert httpx.put(item["url"], content=by_hash[item["sha256"]]).status_code == 200
    return [item["sha256"] for item in missing]


def change(path: str, data: bytes) -> dict:
    return {"path": path, "sha256": sha256(data), "bytes": len(data), "mode": 0o644}


def test_files_go_up_and_come_down(admin):
    content, name = b"print('hi')\n", "dir/träin $(x) ;.py"
    assert upload(admin, "up", [content, content]) == [sha256(content)]
    assert upload(admin, "up", [content]) == []
    done = admin.post("/taas/projects/up/commits", json={"changes": [change(name, content)], "base": 0})
    assert done.status_code == 200 and done.json()["record"] == 1
    listed = admin.get("/taas/projects/up/files").json()
    assert listed["record"] == 1 and listed["snapshot"] == done.json()["snapshot"]
    assert listed["files"] == [change(name, content)]
    url = admin.get(f"/taas/projects/up/blobs/{sha256(content)}").json()["url"]
    assert httpx.get(url).content == content
    gone = admin.post("/taas/projects/up/commits", json={"removed": [name], "base": 1})
    assert gone.json()["record"] == 2
    assert admin.get("/taas/projects/up/files").json()["files"] == []


def test_commit_of_what_was_not_uploaded_is_refused_by_name(admin):
    reply = admin.post("/taas/projects/none/commits", json={"changes": [change("a.py", b"never uploaded")]})
    assert reply.status_code == 409 and "a.py" in reply.json()["detail"]


def test_commit_of_a_wrong_size_is_refused(admin):
    upload(admin, "size", [b"12345"])
    wrong = {**change("a.py", b"12345"), "bytes": 6}
    assert admin.post("/taas/projects/size/commits", json={"changes": [wrong]}).status_code == 409


def test_conflicting_commit_is_refused(admin):
    upload(admin, "conflict", [b"one", b"two"])
    first = admin.post("/taas/projects/conflict/commits", json={"changes": [change("a", b"one")], "base": 0})
    assert first.status_code == 200
    second = admin.post("/taas/projects/conflict/commits", json={"changes": [change("a", b"two")], "base": 0})
    assert second.status_code == 409 and "'a'" in second.json()["detail"]


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../b", "a//b", "", "a\x00b"])
def test_unsafe_paths_are_refused(admin, path):
    upload(admin, "unsafe", [b"x"])
    reply = admin.post("/taas/projects/unsafe/commits", json={"changes": [change(path, b"x")]})
    assert reply.status_code == 400, reply.text


@pytest.mark.parametrize("name", ["..", ".hidden", "a b", "a;b", "$(x)", "a\nb", "x" * 64, "ä", "%2e%2e"])
def test_hostile_project_names_are_refused(admin, name):
    assert admin.get(f"/taas/projects/{quote(name, safe='')}/files").status_code in (400, 404)
    assert admin.post(f"/taas/projects/{quote(name, safe='')}/uploads", json={"blobs": []}).status_code in (400, 404)


@pytest.mark.parametrize("digest", ["x", "A" * 64, "0" * 63, "../../../x"])
def test_hostile_hashes_are_refused(admin, digest):
    assert admin.get(f"/taas/projects/lm/blobs/{quote(digest, safe='')}").status_code in (404, 422)
    blobs = {"blobs": [{"sha256": digest, "bytes": 1}]}
    assert admin.post("/taas/projects/lm/uploads", json=blobs).status_code == 422


def test_payload_goes_up_once(admin, store):
    data = b"a pickled loader"
    body = {"sha256": sha256(data), "bytes": len(data)}
    first = admin.post("/taas/projects/lm/payloads", json=body).json()
    assert httpx.put(first["url"], content=data).status_code == 200
    assert store.get(first["key"]) == data
    assert admin.post("/taas/projects/lm/payloads", json=body).json() == {"key": first["key"], "url": None}


@pytest.mark.parametrize("run_id", ["no such run", "../../x", "a;$(b)\n`c`"])
def test_unknown_runs_are_404(admin, run_id):
    for path in ("status", "report", "artifacts"):
        assert admin.get(f"/taas/runs/{path}", params={"run_id": run_id}).status_code == 404
    logs = admin.get("/taas/runs/logs", params={"run_id": run_id}).json()
    assert logs == {"texts": [], "cursor": "", "complete": False}


def test_report_and_artifacts_of_a_run(admin, store):
    run_id = "manual__2026-01-01T00:00:00+00:00"
    keys = RunKeys(run_key(run_id))
    store.put(keys.report, b'{"run_id": "r", "state": "success"}')
    data = b"weights"
    store.put(ProjectKeys("lm").blob(sha256(data)), data)
    artifact = Artifact(path="model.pt", sha256=sha256(data), bytes=len(data), mode=0o644)
    record = ArtifactRecord(project="lm", record=3, snapshot="s", files=[artifact])
    store.put(keys.artifacts, record.to_bytes())
    assert admin.get("/taas/runs/report", params={"run_id": run_id}).json() == {"run_id": "r", "state": "success"}
    (listed,) = admin.get("/taas/runs/artifacts", params={"run_id": run_id}).json()["files"]
    url = listed.pop("url")
    assert listed == {"path": "model.pt", "sha256": sha256(data), "bytes": 7, "mode": 0o644}
    assert httpx.get(url).content == data


def test_logs_are_read_behind_a_cursor(admin, store):
    keys = RunKeys(run_key("logs"))
    jobs = [PlacedJob(host="g2-0", job_id="a"), PlacedJob(host="g2-1", job_id="b")]
    store.put(keys.placement("train", -1), Placement(task_id="train", jobs=jobs, **PLACED).to_bytes())
    store.put(keys.rank_log(2, 3), "épochs\n".encode())
    store.put(keys.log_piece(2, 1, 1), pack("g2-1", [(Slice(rank=9, num_bytes=5), b"live\n")]))
    get = lambda **params: admin.get("/taas/runs/logs", params={"run_id": "logs", **params})  # noqa: E731
    whole = get(rank=3).json()
    assert whole["texts"] == [{"host": None, "rank": 3, "text": "épochs\n"}]
    every = get().json()
    assert every["texts"] == [{"host": "g2-1", "rank": 9, "text": "live\n"}]
    assert get(cursor=every["cursor"]).json() == {"texts": [], "cursor": every["cursor"], "complete": False}
    assert get(cursor="p.2.0.../../x").status_code == 422


def test_status_of_a_run(admin, airflow_db, store):
    from datetime import UTC, datetime

    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session
    from sqlalchemy import insert

    with create_session() as session:
        values = {"dag_id": "taas_train", "run_id": "st", "run_type": "manual", "conf": {}, "clear_number": 0}
        values |= {"run_after": datetime(2026, 1, 1, tzinfo=UTC), "state": "running"}
        session.execute(insert(DagRun).values(**values))
    found = admin.get("/taas/runs/status", params={"run_id": "st"}).json()
    assert found == {"run_id": "st", "state": "running", "phase": None, "lines": [], "prepared": {}}
