from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from taas.client import Client
from taas.client_config import ClientConfig
from taas.errors import ClientError, RequestError
from tests.taas.fake_airflow import RUNS, URL, FakeAirflow, answers, fails

CONF = {"project": "lm", "script": "train.py"}


@pytest.fixture
def airflow() -> FakeAirflow:
    return FakeAirflow()


@pytest.fixture
def client(airflow: FakeAirflow) -> Iterator[Client]:
    with airflow.client() as client:
        yield client


def posts(airflow: FakeAirflow, path: str = RUNS) -> list[httpx.Request]:
    return [request for request in airflow.requests if request.method == "POST" and request.url.path == path]


def test_a_trigger_sends_our_id_a_null_date_and_the_conf(airflow: FakeAirflow, client: Client) -> None:
    client.trigger(CONF, run_id="my:run+1")
    assert json.loads(posts(airflow)[0].content) == {"dag_run_id": "my:run+1", "logical_date": None, "conf": CONF}
    assert client.run("my:run+1")["state"] == "queued"


def test_the_run_id_is_quoted_in_paths(airflow: FakeAirflow, client: Client) -> None:
    client.trigger(CONF, run_id="a:b+c")
    client.run("a:b+c")
    assert airflow.requests[-1].url.raw_path == f"{RUNS}/a%3Ab%2Bc".encode()
    assert client.run_url("a:b+c") == f"{URL}/dags/taas_train/runs/a%3Ab%2Bc"


def test_one_login_serves_many_requests(airflow: FakeAirflow, client: Client) -> None:
    client.trigger(CONF, run_id="a")
    client.run("a")
    assert airflow.tokens == 1


def test_an_expired_token_is_renewed_once(airflow: FakeAirflow, client: Client) -> None:
    client.trigger(CONF, run_id="a")
    airflow.valid_token = "another"
    assert client.run("a")["state"] == "queued"
    assert airflow.tokens == 2


def test_a_token_of_another_key_is_renewed_too(airflow: FakeAirflow, client: Client) -> None:
    client.runs()
    airflow.before = [answers(403, {"detail": "Invalid JWT token"})]
    assert client.runs() == []
    assert airflow.tokens == 2


@pytest.mark.parametrize(
    "answer", [httpx.Response(200, text="<html>"), httpx.Response(405, json={"detail": "Method Not Allowed"})]
)
def test_an_airflow_without_our_plugin_is_a_sentence(
    airflow: FakeAirflow, client: Client, answer: httpx.Response
) -> None:
    client.runs()
    airflow.before = [lambda _: answer]
    with pytest.raises(ClientError, match="has no TaaS endpoints; is the TaaS plugin installed there"):
        client.payload_target("lm", sha256="0" * 64, num_bytes=1)


def test_a_given_token_is_used_without_a_login(airflow: FakeAirflow) -> None:
    airflow.valid_token = "mine"
    with airflow.client(username=None, password=None, token="mine") as client:
        assert client.runs() == []
    assert airflow.tokens == 0


def test_a_refused_token_is_a_sentence(airflow: FakeAirflow) -> None:
    with (
        airflow.client(username=None, password=None, token="old") as client,
        pytest.raises(ClientError, match=r"does not accept the token: Not authenticated. Log in again"),
    ):
        client.runs()


def test_wrong_credentials_are_a_sentence(airflow: FakeAirflow) -> None:
    with (
        airflow.client(password="guess") as client,
        pytest.raises(ClientError, match="refused user 'admin': wrong username or password") as caught,
    ):
        client.runs()
    assert "guess" not in caught.value.message


def test_no_credentials_are_a_sentence(airflow: FakeAirflow) -> None:
    with (
        airflow.client(username=None, password=None) as client,
        pytest.raises(ClientError, match=r"no credentials for Airflow at .*; set TAAS_USERNAME"),
    ):
        client.runs()


def test_triggering_again_with_the_same_request_is_a_success(airflow: FakeAirflow, client: Client) -> None:
    client.trigger(CONF, run_id="a")
    client.trigger({**CONF, "gpus": 8, "env": None}, run_id="a")
    assert len(airflow.runs) == 1


def test_an_id_taken_by_another_request_is_refused(client: Client) -> None:
    client.trigger(CONF, run_id="a")
    with pytest.raises(ClientError, match="run id 'a' is taken by a run with another request"):
        client.trigger({**CONF, "gpus": 16}, run_id="a")


def test_an_id_taken_by_a_run_whose_conf_is_no_request_is_refused(airflow: FakeAirflow, client: Client) -> None:
    airflow.runs["a"] = {"dag_run_id": "a", "state": "failed", "conf": {"x": 1}}
    with pytest.raises(ClientError, match="another request"):
        client.trigger(CONF, run_id="a")


def test_a_lost_reply_of_a_trigger_starts_one_run(airflow: FakeAirflow, client: Client) -> None:
    def lost(request: httpx.Request) -> httpx.Response | None:
        airflow.handle(request)
        raise httpx.ReadTimeout("no reply", request=request)

    client.runs()
    airflow.before = [lost]
    client.trigger(CONF, run_id="a")
    assert list(airflow.runs) == ["a"]
    assert airflow.pauses == [0.2]


@pytest.mark.parametrize("fault", [fails(httpx.ConnectError), fails(), answers(503), answers(502), answers(429)])
def test_trouble_on_the_way_is_tried_again(airflow: FakeAirflow, client: Client, fault: Any) -> None:
    client.runs()
    airflow.before = [fault, fault]
    assert client.runs() == []
    assert airflow.pauses == [0.2, 0.5]


def test_an_airflow_that_stays_away_is_one_sentence(airflow: FakeAirflow, client: Client) -> None:
    airflow.before = [fails(httpx.ConnectError)] * 10
    with pytest.raises(
        ClientError, match=r"cannot be reached: the line is cut; is it running. Start .* 'taas up'"
    ) as caught:
        client.runs()
    assert caught.value.fields == {"transient": True}
    assert len(airflow.requests) == 5


def test_an_airflow_that_does_not_answer_is_one_sentence(airflow: FakeAirflow, client: Client) -> None:
    airflow.before = [fails(httpx.ReadTimeout)] * 10
    with pytest.raises(ClientError, match="did not answer in time"):
        client.runs()


def test_a_commit_whose_reply_may_be_lost_is_not_repeated(airflow: FakeAirflow, client: Client) -> None:
    client.runs()
    airflow.before = [fails(httpx.ReadError)]
    with pytest.raises(ClientError, match="cannot be reached"):
        client.commit("lm", changes=[], removed=[], base=0)
    assert len(posts(airflow, "/taas/projects/lm/commits")) == 1


@pytest.mark.parametrize("error", [httpx.ConnectError, httpx.ConnectTimeout])
def test_a_commit_that_never_left_is_repeated(
    airflow: FakeAirflow, client: Client, error: type[httpx.TransportError]
) -> None:
    client.runs()
    airflow.before = [fails(error)]
    assert client.commit("lm", changes=[], removed=[], base=0) == 1


@pytest.mark.parametrize(
    ("status", "detail", "error", "message"),
    [
        (400, "gpus: got 3; allowed: 8\nunits: x", RequestError, "gpus: got 3; allowed: 8\nunits: x"),
        (422, [{"loc": ["body", "conf"], "msg": "bad"}], RequestError, "^conf: bad$"),
        (404, "DAG not found", ClientError, "has no DAG taas_train; is the TaaS DAG folder installed"),
        (403, "Forbidden", ClientError, "user 'admin' may not do this .*: Forbidden"),
        (500, "boom", ClientError, "answered 500 to POST /api/v2/dags/taas_train/dagRuns: boom"),
        (418, {"message": "teapot"}, ClientError, "answered 418 .*: teapot"),
    ],
)
def test_refusals_of_a_trigger_are_told(
    airflow: FakeAirflow, client: Client, status: int, detail: Any, error: type[Exception], message: str
) -> None:
    client.runs()
    airflow.before = [answers(status, {"detail": detail})]
    with pytest.raises(error, match=message):
        client.trigger(CONF, run_id="a")


def test_an_answer_that_is_no_json_is_a_sentence(airflow: FakeAirflow, client: Client) -> None:
    client.runs()
    airflow.before = [lambda _: httpx.Response(200, text="<html>")]
    with pytest.raises(ClientError, match=r"answered no JSON to .*; is it an Airflow"):
        client.runs()
    airflow.before = [lambda _: httpx.Response(400, text="<html>\nmore")]
    with pytest.raises(ClientError, match=r"answered 400 to GET .*: <html>$"):
        client.runs()


def test_an_unknown_run_is_a_sentence(client: Client) -> None:
    with pytest.raises(ClientError, match=r"there is no run 'x' at http://airflow.test:8080; see: taas runs"):
        client.run("x")
    with pytest.raises(ClientError, match="there is no run 'x'"):
        client.status("x")


def test_reasons_of_our_endpoints_come_as_they_are(client: Client) -> None:
    with pytest.raises(ClientError, match=r"^run 'x' has no report yet$"):
        client.report("x")


def test_cancelling_marks_the_run_failed(airflow: FakeAirflow, client: Client) -> None:
    client.trigger(CONF, run_id="a")
    assert client.cancel("a") == "queued"
    assert airflow.runs["a"]["state"] == "failed"


def test_cancelling_a_run_that_is_over_changes_nothing(airflow: FakeAirflow, client: Client) -> None:
    airflow.runs["a"] = {"dag_run_id": "a", "state": "success", "conf": {}}
    assert client.cancel("a") == "success"
    assert airflow.runs["a"]["state"] == "success"


def test_runs_come_newest_first_up_to_the_limit(client: Client) -> None:
    for name in "abc":
        client.trigger(CONF, run_id=name)
    assert [run["dag_run_id"] for run in client.runs(limit=2)] == ["c", "b"]


def test_many_contents_are_asked_for_in_batches(airflow: FakeAirflow, client: Client) -> None:
    blobs = [(f"{number:064x}", 1) for number in range(1201)]
    assert len(client.missing_blobs("lm", [*blobs, blobs[0]])) == 1201
    sizes = [len(json.loads(r.content)["blobs"]) for r in posts(airflow, "/taas/projects/lm/uploads")]
    assert sizes == [500, 500, 201]


def test_flavors_of_the_site_are_used_to_compare_requests(airflow: FakeAirflow, tmp_path: Path) -> None:
    path = tmp_path / "flavors.toml"
    path.write_text('[flavors."g3.1"]\nvcpus=1\ngpus=1\ngpu_model="H"\nram_gb=1\nprice=1\n')
    with airflow.client(flavors_file=path) as client:
        client.trigger({**CONF, "flavor": "g3.1", "gpus": 4}, run_id="a")
        client.trigger({**CONF, "flavor": "g3.1", "gpus": 4, "seed": 0}, run_id="a")


@pytest.mark.parametrize("project", ["", "../other", "a/b", "a..b"])
def test_an_impossible_project_name_is_refused_before_anything_is_sent(
    airflow: FakeAirflow, client: Client, project: str
) -> None:
    with pytest.raises(ClientError, match=r"got the project name .*; allowed: at most 63 letters"):
        client.project_files(project)
    assert airflow.requests == []


def test_a_client_shows_no_secret() -> None:
    text = repr(ClientConfig("http://x", "u", "pass-word", "to-ken"))
    assert "pass-word" not in text
    assert "to-ken" not in text
