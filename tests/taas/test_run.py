from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from torch.utils.data import DataLoader

import taas
from taas.client import Client
from taas.errors import ClientError, RegisterError, RequestError
from taas.registry import registered
from taas.request import parse_request
from taas.run import Run, RunStatus, attach, new_lines, new_run_id, runs, submit
from tests.taas.fake_airflow import FakeAirflow, fails, sha256

CONF: dict[str, Any] = {"project": "lm", "script": "train.py"}


@pytest.fixture
def airflow() -> FakeAirflow:
    return FakeAirflow()


@pytest.fixture
def client(airflow: FakeAirflow) -> Iterator[Client]:
    with airflow.client() as client:
        yield client
    for name in registered():
        taas.unregister(name)


def state(word: str, *lines: str, **prepared: tuple[int, int]) -> dict[str, Any]:
    progress = {name: {"units": units, "asked": asked} for name, (units, asked) in prepared.items()}
    return {"state": word, "phase": "train", "lines": list(lines), "prepared": progress}


def test_a_submitted_run_has_an_id_that_names_its_project(airflow: FakeAirflow, client: Client) -> None:
    run = submit(CONF, client=client)
    assert "-lm-" in run.run_id
    assert list(airflow.runs) == [run.run_id]
    assert run.run_id in run.url
    assert run.run_id in repr(run)


def test_ids_differ() -> None:
    assert len({new_run_id("lm") for _ in range(50)}) == 50


def test_a_request_object_and_its_conf_are_the_same(airflow: FakeAirflow, client: Client) -> None:
    submit(parse_request({**CONF, "gpus": 16}), "a", client=client)
    submit({**CONF, "gpus": 16}, "a", client=client)
    assert airflow.runs["a"]["conf"] == {**CONF, "gpus": 16}


def test_a_wrong_request_is_refused_before_anything_is_sent(airflow: FakeAirflow, client: Client) -> None:
    with pytest.raises(RequestError, match=r"gpus: got 3"):
        submit({**CONF, "gpus": 3}, client=client)
    assert airflow.requests == []


@pytest.mark.parametrize("run_id", ["", ".", "..", "-a", "a b", "a/b", "ü", "a" * 201, 3])
def test_an_impossible_run_id_is_refused(client: Client, run_id: Any) -> None:
    with pytest.raises(ClientError, match="allowed: 1 to 200 letters"):
        submit(CONF, run_id, client=client)
    with pytest.raises(ClientError, match="allowed: 1 to 200 letters"):
        attach(run_id, client=client)


def test_registered_loaders_go_with_a_request_that_names_none(airflow: FakeAirflow, client: Client) -> None:
    train = DataLoader([1, 2, 3], batch_size=2, collate_fn=lambda items: items)
    val = DataLoader([4, 5])
    taas.register(train)
    taas.register(val, units=64)
    submit({**CONF, "cpus": 1, "units": 100}, "a", client=client)
    loaders = airflow.runs["a"]["conf"]["loaders"]
    assert set(loaders) == {"train", "val"}
    assert loaders["val"]["units"] == 64
    data = airflow.blobs[loaders["train"]["sha256"]]
    assert sha256(data) == loaders["train"]["sha256"]
    assert loaders["train"]["payload"] == f"projects/lm/payloads/{sha256(data)}"
    assert list(pickle.loads(data)) == [[1, 2], [3]]


def test_a_payload_that_is_there_is_not_sent_again(airflow: FakeAirflow, client: Client) -> None:
    data_loader = DataLoader([1, 2, 3])
    taas.register(data_loader)
    for run_id in "ab":
        submit({**CONF, "cpus": 1, "units": 100}, run_id, client=client)
    assert len([request for request in airflow.requests if request.method == "PUT"]) == 1


def test_loaders_that_are_named_or_emptied_keep_the_registered_ones_out(airflow: FakeAirflow, client: Client) -> None:
    data_loader = DataLoader([1, 2, 3])
    taas.register(data_loader)
    submit({**CONF, "loaders": {}}, "a", client=client)
    submit({**CONF, "loaders": {"x": "data.py:x"}}, "b", client=client)
    assert airflow.runs["a"]["conf"] == CONF
    assert set(airflow.runs["b"]["conf"]["loaders"]) == {"x"}


def test_units_without_any_loader_are_refused(client: Client) -> None:
    with pytest.raises(RequestError, match=r"loaders: is missing .*taas.register a loader before taas.submit"):
        submit({**CONF, "cpus": 1, "units": 100}, client=client)


def test_nothing_is_uploaded_for_a_wrong_request(airflow: FakeAirflow, client: Client) -> None:
    data_loader = DataLoader([1, 2, 3])
    taas.register(data_loader)
    with pytest.raises(RequestError, match="cpus"):
        submit({**CONF, "cpus": 9, "units": 100}, client=client)
    assert airflow.requests == []


def test_a_loader_that_cannot_be_pickled_any_more_is_told(client: Client) -> None:
    data_loader: Any = DataLoader([1, 2, 3])
    taas.register(data_loader)
    data_loader.guard = threading.Lock()
    with pytest.raises(RegisterError, match=r"data_loader cannot be serialized: data_loader.guard is a _thread.lock"):
        submit({**CONF, "cpus": 1, "units": 100}, client=client)


def test_attaching_takes_up_a_run_that_is_there(airflow: FakeAirflow, client: Client) -> None:
    submit(CONF, "a:b+c", client=client)
    run = attach("a:b+c", client=client)
    assert run.state_when_listed == "queued"
    assert run.tasks() == [("validate", -1, "success")]
    with pytest.raises(ClientError, match="there is no run 'nothing'"):
        attach("nothing", client=client)


def test_runs_are_listed_as_handles(client: Client) -> None:
    submit(CONF, "a", client=client)
    submit(CONF, "b", client=client)
    assert [(run.run_id, run.state_when_listed) for run in runs(client=client)] == [("b", "queued"), ("a", "queued")]


def test_the_status_is_a_value(airflow: FakeAirflow, client: Client) -> None:
    airflow.statuses["a"] = [state("running", "train: running", loader=(5, 10))]
    status = Run("a", client=client).status()
    assert status == RunStatus("a", "running", "train", ("train: running",), {"loader": {"units": 5, "asked": 10}})
    assert not status.is_over


def test_waiting_tells_each_new_line_once_and_gives_the_final_state(airflow: FakeAirflow, client: Client) -> None:
    airflow.statuses["a"] = [
        state("queued"),
        state("running", "validate: running"),
        state("running", "validate: success", "prepare: running", loader=(5, 100)),
        state("running", "validate: success", "prepare: running", loader=(9, 100)),
        state("running", "validate: success", "prepare: running", loader=(50, 100)),
        state("failed", "validate: success", "prepare: failed", loader=(50, 100)),
    ]
    lines: list[str] = []
    assert Run("a", client=client).wait(on_line=lines.append, poll_s=0.5) == "failed"
    assert lines == [
        "validate: running",
        "validate: success",
        "prepare: running",
        "loader: 50 of 100 units prepared (50 %)",
        "prepare: failed",
    ]
    assert airflow.pauses == [0.5] * 5


def test_waiting_survives_an_airflow_that_is_away_for_a_while(airflow: FakeAirflow, client: Client) -> None:
    airflow.statuses["a"] = [state("running"), state("success")]
    client.runs()
    airflow.before = [fails(httpx.ConnectError)] * 12
    assert Run("a", client=client).wait() == "success"


def test_waiting_ends_when_airflow_stays_away_or_refuses(airflow: FakeAirflow, client: Client) -> None:
    client.runs()
    with pytest.raises(ClientError, match="there is no run 'a'"):
        Run("a", client=client).wait()
    airflow.before = [fails(httpx.ConnectError)] * 1000
    with pytest.raises(ClientError, match="cannot be reached"):
        Run("a", client=client).wait()


def test_waiting_ends_when_the_time_is_up(airflow: FakeAirflow, client: Client) -> None:
    airflow.statuses["a"] = [state("running")]
    with pytest.raises(ClientError, match=r"run 'a' is not over after 0 s \(state: running\); it goes on"):
        Run("a", client=client).wait(timeout_s=0)


def test_a_loader_without_a_number_asked_for_is_no_crash() -> None:
    now = RunStatus("a", "running", None, (), {"x": {"units": 0, "asked": 0}})
    assert new_lines(None, now) == []


NOTHING: Any = ([], False)


def test_logs_are_read_to_their_present_end(airflow: FakeAirflow, client: Client) -> None:
    airflow.logs["a", 3] = [([("h", 3, "one\n")], False), ([("h", 3, "two ü\n")], False), NOTHING]
    assert Run("a", client=client).logs(rank=3) == "one\ntwo ü\n"


def test_followed_logs_come_until_they_are_complete(airflow: FakeAirflow, client: Client) -> None:
    airflow.logs["a", 0] = [([("h", 0, "one\nt")], False), NOTHING, ([("h", 0, "wo\n")], False), ([], True)]
    airflow.statuses["a"] = [state("running")]
    assert list(Run("a", client=client).follow_logs(rank=0)) == ["one\nt", "wo\n"]
    cursors = [request.url.params["cursor"] for request in airflow.requests if request.url.path.endswith("/logs")]
    assert cursors == ["", "1", "1", "2"]


def test_lines_of_all_ranks_are_led_by_host_and_rank(airflow: FakeAirflow, client: Client) -> None:
    texts = [("g2-0", 1, "\r10%\r100%\n\na\u2028b\n"), (None, None, "[taas] try 2\n"), ("g2-1", 8, "unfinished")]
    airflow.logs["a", None] = [(texts, False), NOTHING]
    expected = "[g2-0 r1] 100%\n[g2-0 r1] \n[g2-0 r1] a\u2028b\n[taas] try 2\n[g2-1 r8] unfinished\n"
    assert Run("a", client=client).logs() == expected


def test_followed_logs_end_with_the_run(airflow: FakeAirflow, client: Client) -> None:
    airflow.logs["a", None] = [NOTHING, NOTHING, ([("h", 0, "last words\n")], False), NOTHING]
    airflow.statuses["a"] = [state("running"), state("failed")]
    assert list(Run("a", client=client).follow_logs()) == ["[h r0] last words\n"]


def test_following_logs_outlives_a_restart_of_airflow_but_not_a_refusal(airflow: FakeAirflow, client: Client) -> None:
    airflow.logs["a", None] = [([("h", 0, "one\n")], False), ([("h", 0, "two\n")], True)]
    followed = Run("a", client=client).follow_logs()
    assert next(followed) == "[h r0] one\n"
    airflow.before = [fails(httpx.ConnectError)] * 12
    assert next(followed) == "[h r0] two\n"
    airflow.before = [fails(httpx.ConnectError)] * 12
    with pytest.raises(ClientError, match="cannot be reached"):
        Run("a", client=client).logs()


def test_report_artifacts_and_cancel_are_the_runs(airflow: FakeAirflow, client: Client, tmp_path: Any) -> None:
    run = submit(CONF, "a", client=client)
    with pytest.raises(ClientError, match="no report yet"):
        run.report()
    airflow.reports["a"] = {"run_id": "a", "state": "success"}
    airflow.artifacts["a"] = [("m.pt", b"w", 0o644)]
    assert run.report() == {"run_id": "a", "state": "success"}
    assert [file.path for file in run.artifacts()] == ["m.pt"]
    run.download_artifacts(str(tmp_path))
    assert (tmp_path / "m.pt").read_bytes() == b"w"
    assert run.cancel() == "queued"
    assert json.loads(airflow.requests[-1].content) == {"state": "failed"}
