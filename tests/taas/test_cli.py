from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from taas.cli import main
from taas.request import TrainRequest
from tests.taas.fake_airflow import FakeAirflow, answers, fails
from tests.taas.test_project_files import content, fill
from tests.taas.test_report_text import REPORT
from tests.taas.test_run import state

CONF = {"project": "lm", "script": "train.py"}
Command = Callable[..., int]


@pytest.fixture
def airflow() -> FakeAirflow:
    return FakeAirflow()


@pytest.fixture
def taas(airflow: FakeAirflow) -> Command:
    def run(*words: object) -> int:
        with airflow.client() as client:
            return main([str(word) for word in words], connect=lambda: client)

    return run


@pytest.fixture
def request_file(tmp_path: Path) -> Path:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(CONF))
    return path


def test_check_says_that_there_are_no_faults(taas: Command, request_file: Path, capsys: Any) -> None:
    assert taas("check", request_file) == 0
    assert "request.json: no faults (digest " in capsys.readouterr().out


def test_check_names_every_fault_on_its_own_line(taas: Command, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"project": "lm", "gpus": 3, "unit": 5}))
    assert taas("check", path) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == ["unit", "gpus", "script"]
    assert all(line.startswith("taas: ") for line in lines)


def test_schema_describes_every_field_of_a_request(taas: Command, capsys: Any) -> None:
    assert taas("schema") == 0
    fields = json.loads(capsys.readouterr().out)["properties"]
    assert set(fields) == set(TrainRequest.model_fields)
    assert all(field["description"] for field in fields.values())


def test_check_knows_the_flavors_of_the_site(taas: Command, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({**CONF, "flavor": "g3.1", "gpus": 4}))
    flavors = tmp_path / "f.toml"
    flavors.write_text('[flavors."g3.1"]\nvcpus=1\ngpus=1\ngpu_model="H"\nram_gb=1\nprice=1\n')
    assert taas("check", path) == 2
    assert taas("check", path, "--flavors", flavors) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"a": 1,}', "not valid JSON"), ("[]", "got a list"), ('{"a": 1, "a": 2}', "a: is there twice")],
)
def test_a_bad_file_is_one_line(taas: Command, tmp_path: Path, capsys: Any, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert taas("submit", path) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_missing_file_is_one_line(taas: Command, capsys: Any) -> None:
    assert taas("submit", "none.json") == 2
    assert capsys.readouterr().err == "taas: cannot read none.json: No such file or directory\n"


def test_a_request_comes_from_standard_input_too() -> None:
    command = [sys.executable, "-m", "taas.cli", "check", "-"]
    done = subprocess.run(command, input=json.dumps(CONF), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("-: no faults")


def test_submit_says_the_run_and_its_page(taas: Command, airflow: FakeAirflow, request_file: Path, capsys: Any) -> None:
    assert taas("submit", request_file, "--run-id", "a") == 0
    assert capsys.readouterr().out == "submitted run a: http://airflow.test:8080/dags/taas_train/runs/a\n"


def test_submitting_twice_under_one_id_starts_one_run(taas: Command, airflow: FakeAirflow, request_file: Path) -> None:
    assert taas("submit", request_file, "--run-id", "a") == 0
    assert taas("submit", request_file, "--run-id", "a") == 0
    assert list(airflow.runs) == ["a"]


@pytest.mark.parametrize(("final", "code"), [("success", 0), ("failed", 1)])
def test_submit_that_follows_ends_as_the_run_does(
    taas: Command, airflow: FakeAirflow, request_file: Path, capsys: Any, final: str, code: int
) -> None:
    airflow.statuses["a"] = [state("running", "train: running"), state(final, f"train: {final}")]
    assert taas("submit", request_file, "--run-id", "a", "--follow") == code
    assert capsys.readouterr().out.splitlines()[1:] == [
        "train: running",
        f"train: {final}",
        f"run a: {final}. Its report: taas report a",
    ]


def test_submit_json_prints_one_object_and_progress_beside(
    taas: Command, airflow: FakeAirflow, request_file: Path, capsys: Any
) -> None:
    airflow.statuses["a"] = [state("success", "train: success")]
    assert taas("submit", request_file, "--run-id", "a", "--follow", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "run_id": "a",
        "url": "http://airflow.test:8080/dags/taas_train/runs/a",
        "state": "success",
    }
    assert "train: success" in err


def test_an_interrupt_leaves_the_run_and_says_how_to_stop_it(
    taas: Command, airflow: FakeAirflow, request_file: Path, capsys: Any
) -> None:
    airflow.statuses["a"] = [state("running")]

    def interrupt(request: httpx.Request) -> None:
        if request.url.path == "/taas/runs/status":
            raise KeyboardInterrupt

    airflow.before = [interrupt] * 5
    assert taas("submit", request_file, "--run-id", "a", "--follow") == 130
    assert "run a goes on. Stop it: taas cancel a" in capsys.readouterr().err
    assert airflow.runs["a"]["state"] == "queued"


def test_follow_takes_up_a_run(taas: Command, airflow: FakeAirflow, request_file: Path) -> None:
    taas("submit", request_file, "--run-id", "a")
    airflow.statuses["a"] = [state("failed")]
    assert taas("follow", "a") == 1


def test_a_refusal_of_airflow_is_the_users_mistake(
    taas: Command, airflow: FakeAirflow, request_file: Path, capsys: Any
) -> None:
    airflow.before = [lambda _: None, answers(400, {"detail": "gpus: got 8; allowed here: 4"})]
    assert taas("submit", request_file) == 2
    assert capsys.readouterr().err == "taas: gpus: got 8; allowed here: 4\n"


def test_an_airflow_that_is_away_is_one_line(taas: Command, airflow: FakeAirflow, capsys: Any) -> None:
    airflow.before = [fails(httpx.ConnectError)] * 9
    assert taas("runs") == 1
    err = capsys.readouterr().err
    assert "cannot be reached" in err
    assert len(err.splitlines()) == 1


def test_runs_are_listed(taas: Command, request_file: Path, capsys: Any) -> None:
    taas("submit", request_file, "--run-id", "a")
    capsys.readouterr()
    assert taas("runs") == 0
    assert capsys.readouterr().out == "a  queued  2026-01-01\n"
    assert taas("runs", "--json", "--limit", "1") == 0
    assert json.loads(capsys.readouterr().out) == [{"run_id": "a", "state": "queued", "started_at": "2026-01-01"}]


def test_submit_that_follows_says_why_a_run_failed(
    taas: Command, airflow: FakeAirflow, request_file: Path, capsys: Any
) -> None:
    airflow.statuses["a"] = [state("failed", "train: failed")]
    airflow.reports["a"] = REPORT
    assert taas("submit", request_file, "--run-id", "a", "--follow") == 1
    assert "rank 3 on host-1: CUDA OOM" in capsys.readouterr().out.splitlines()


def test_logs_of_a_rank_that_wrote_nothing_are_said_to_be_missing(
    taas: Command, request_file: Path, airflow: FakeAirflow, capsys: Any
) -> None:
    taas("submit", request_file, "--run-id", "a")
    airflow.statuses["a"] = [state("failed", "train: failed")]
    capsys.readouterr()
    assert taas("logs", "a", "--rank", "99") == 1
    assert capsys.readouterr().err == "taas: run a has no log of rank 99 yet\n"


def test_report_comes_as_text_and_as_json(taas: Command, airflow: FakeAirflow, capsys: Any) -> None:
    airflow.reports["a"] = REPORT
    assert taas("report", "a") == 0
    assert capsys.readouterr().out.startswith("run a: failed\nverdict: rank 3")
    assert taas("report", "a", "--json") == 0
    assert json.loads(capsys.readouterr().out) == REPORT


def test_a_run_without_a_report_is_one_line(taas: Command, capsys: Any) -> None:
    assert taas("report", "a") == 1
    assert capsys.readouterr().err == "taas: run 'a' has no report yet\n"


def test_logs_are_printed_as_they_are(taas: Command, airflow: FakeAirflow, request_file: Path, capsys: Any) -> None:
    taas("submit", request_file, "--run-id", "a")
    capsys.readouterr()
    airflow.logs["a", 2] = [([("h", 2, "x\ny")], False), ([], False)]
    assert taas("logs", "a", "--rank", "2") == 0
    assert capsys.readouterr().out == "x\ny"


def test_logs_of_a_run_that_runs_are_those_until_now_and_go_on_when_followed(
    taas: Command, airflow: FakeAirflow, request_file: Path, capsys: Any
) -> None:
    taas("submit", request_file, "--run-id", "a")
    airflow.statuses["a"] = [state("running")]
    for more in ([], ["--follow"]):
        capsys.readouterr()
        airflow.logs["a", None] = [([("h", 2, "x\n")], False), ([], False), ([("i", 9, "y\n")], False), ([], True)]
        assert taas("logs", "a", *more) == 0
        assert capsys.readouterr().out == ("[h r2] x\n[i r9] y\n" if more else "[h r2] x\n")


def test_cancel_stops_a_run_and_says_when_it_is_over(
    taas: Command, airflow: FakeAirflow, request_file: Path, capsys: Any
) -> None:
    taas("submit", request_file, "--run-id", "a")
    assert taas("cancel", "a") == 0
    assert airflow.runs["a"]["state"] == "failed"
    assert taas("cancel", "a") == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["run a is being stopped", "run a is over already: failed"]
    assert taas("cancel", "unknown") == 1


def test_a_project_is_put_listed_and_got(taas: Command, tmp_path: Path, capsys: Any) -> None:
    source = fill(tmp_path / "source", {"train.py": b"1", "pkg/x.py": b"2"})
    assert taas("project", "put", "lm", source) == 0
    assert taas("project", "put", "lm", source) == 0
    assert taas("project", "ls", "lm") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "project lm: record 1, 2 file(s) new or changed"
    assert out[1] == "project lm: nothing changed since record 1"
    assert [line.split()[-1] for line in out[2:4]] == ["pkg/x.py", "train.py"]
    assert out[4] == "2 file(s), record 1"
    assert taas("project", "get", "lm", tmp_path / "copy") == 0
    assert content(tmp_path / "copy") == content(source)
    (source / "train.py").unlink()
    assert taas("project", "put", "lm", source, "--delete") == 0
    assert "0 file(s) new or changed, 1 removed" in capsys.readouterr().out
    assert taas("project", "ls", "lm", "--json") == 0
    assert [file["path"] for file in json.loads(capsys.readouterr().out)["files"]] == ["pkg/x.py"]


def test_artifacts_are_written_into_a_folder(taas: Command, airflow: FakeAirflow, tmp_path: Path, capsys: Any) -> None:
    airflow.artifacts["a"] = [("m.pt", b"w", 0o644)]
    assert taas("artifacts", "a", tmp_path / "out") == 0
    assert content(tmp_path / "out") == {"m.pt": b"w"}
    assert "1 file(s) of run a in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["submti"], "unknown command 'submti'; known: up, down, .* Did you mean 'submit'"),
        (["submit"], "the following arguments are required: request"),
        (["project"], "the following arguments are required"),
        (["project", "puts"], "Did you mean 'put'"),
        (["runs", "--limit", "x"], "invalid int value: 'x'"),
        (["runs", "--jsn"], "unrecognized arguments: --jsn"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(taas: Command, capsys: Any, words: list[str], message: str) -> None:
    assert taas(*words) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert re.search(message, err)
    assert "--help" in err


def test_help_documents_commands_and_exit_codes(taas: Command, capsys: Any) -> None:
    assert taas("--help") == 0
    out = capsys.readouterr().out
    for word in ("up", "submit", "check", "report", "project", "artifacts", "cancel", "runs", "exit codes"):
        assert word in out


def test_without_any_configuration_the_way_out_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "taas.cli", "runs"],
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("taas: nothing says where Airflow is: TAAS_URL is not set")
    assert len(done.stderr.splitlines()) == 1


def test_the_stacks_file_in_the_current_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "var" / "stack").mkdir(parents=True)
    (tmp_path / "var" / "stack" / "client.toml").write_text('url = "http://127.0.0.1:9"\ntoken = "t"\n')
    done = subprocess.run(
        [sys.executable, "-m", "taas.cli", "runs"],
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "Airflow at http://127.0.0.1:9 cannot be reached" in done.stderr


def test_the_stacks_verbs_need_the_engine_and_say_so(tmp_path: Path) -> None:
    package = Path(sys.modules["taas"].__path__[0])
    (tmp_path / "taas").symlink_to(package)
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import sys; from taas.cli import main; sys.exit(main(['up', '--x']))"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr == "taas: 'taas up' needs the package taas_tasks, which is not installed here\n"


def test_the_stacks_verbs_are_handed_over_with_their_words(tmp_path: Path) -> None:
    package = tmp_path / "taas_tasks" / "stack"
    package.mkdir(parents=True)
    (tmp_path / "taas_tasks" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    (tmp_path / "taas").symlink_to(Path(sys.modules["taas"].__path__[0]))
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import sys; from taas.cli import main; sys.exit(main(['up', '--root', 'a b']))"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (7, "['up', '--root', 'a b']\n")
