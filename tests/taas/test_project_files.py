from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taas.client import Client, FileInfo, ProjectFiles
from taas.errors import ClientError
from taas.project_files import PutResult, get_artifacts, get_project, plan_put, put_folder, scan_folder
from tests.taas.fake_airflow import FakeAirflow, answers, sha256


@pytest.fixture
def airflow() -> FakeAirflow:
    return FakeAirflow()


@pytest.fixture
def client(airflow: FakeAirflow) -> Iterator[Client]:
    with airflow.client() as client:
        yield client


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def remote(airflow: FakeAirflow, project: str) -> dict[str, bytes]:
    return {path: airflow.blobs[item["sha256"]] for path, item in airflow.heads[project][1].items()}


def test_put_then_get_gives_the_same_files(airflow: FakeAirflow, client: Client, tmp_path: Path) -> None:
    files = {"train.py": b"print(1)", "pkg/data.py": b"x", "empty": b"", "ünï/ß.txt": b"y", "pkg/same.py": b"x"}
    source = fill(tmp_path / "source", files)
    (source / "train.py").chmod(0o755)
    assert put_folder(client, "lm", source) == PutResult(record=1, num_changed=5, num_removed=0)
    assert get_project(client, "lm", tmp_path / "copy") == 5
    assert content(tmp_path / "copy") == files
    assert os.access(tmp_path / "copy" / "train.py", os.X_OK)


def test_equal_contents_are_uploaded_once(airflow: FakeAirflow, client: Client, tmp_path: Path) -> None:
    put_folder(client, "lm", fill(tmp_path, {"a": b"x", "b": b"x", "c": b"y"}))
    assert len([request for request in airflow.requests if request.method == "PUT"]) == 2


def test_only_what_differs_goes_up(airflow: FakeAirflow, client: Client, tmp_path: Path) -> None:
    airflow.put_project("lm", {"a": b"1", "b": b"2", "made-by-rank-0": b"3"})
    source = fill(tmp_path, {"a": b"1", "b": b"changed", "c": b"new"})
    assert put_folder(client, "lm", source) == PutResult(record=2, num_changed=2, num_removed=0)
    assert remote(airflow, "lm") == {"a": b"1", "b": b"changed", "c": b"new", "made-by-rank-0": b"3"}
    assert put_folder(client, "lm", source) == PutResult(record=2, num_changed=0, num_removed=0)


def test_with_delete_what_the_folder_lacks_goes(airflow: FakeAirflow, client: Client, tmp_path: Path) -> None:
    airflow.put_project("lm", {"a": b"1", "old": b"2"})
    assert put_folder(client, "lm", fill(tmp_path, {"a": b"1"}), delete=True) == PutResult(2, 0, 1)
    assert remote(airflow, "lm") == {"a": b"1"}


def test_someone_elses_commit_meanwhile_is_told(airflow: FakeAirflow, client: Client, tmp_path: Path) -> None:
    fill(tmp_path, {"a": b"1"})
    client.runs()

    def someone_else(_request: httpx.Request) -> None:
        airflow.put_project("lm", {"b": b"2"})

    airflow.before = [lambda _: None, someone_else]
    with pytest.raises(ClientError, match="project lm is at record 1 now"):
        put_folder(client, "lm", tmp_path)
    assert remote(airflow, "lm") == {"b": b"2"}


def test_the_commit_names_the_record_that_was_looked_at(airflow: FakeAirflow, client: Client, tmp_path: Path) -> None:
    airflow.put_project("lm", {"a": b"1"})
    put_folder(client, "lm", fill(tmp_path, {"b": b"2"}))
    commit = next(request for request in airflow.requests if request.url.path.endswith("/commits"))
    assert json.loads(commit.content) == {
        "changes": [{"path": "b", "sha256": sha256(b"2"), "bytes": 1, "mode": 0o644}],
        "removed": [],
        "base": 1,
    }


def test_nothing_is_committed_when_an_upload_fails(airflow: FakeAirflow, client: Client, tmp_path: Path) -> None:
    client.runs()
    airflow.before = [lambda _: None, lambda _: None, answers(403)]
    with pytest.raises(ClientError, match="was refused by the store"):
        put_folder(client, "lm", fill(tmp_path, {"a": b"1"}))
    assert airflow.heads == {}


def test_caches_version_control_and_unfinished_downloads_stay_out(tmp_path: Path) -> None:
    kept = {"a.py": b"", "pkg/b.py": b"", ".env.example": b"", "x.part": b""}
    left = {".git/config": b"", "__pycache__/a.pyc": b"", "pkg/c.pyc": b"", ".venv/x": b"", ".taas-1.part": b""}
    assert sorted(scan_folder(fill(tmp_path, {**kept, **left}))) == sorted(kept)


def test_a_folder_that_is_not_there_is_a_sentence(client: Client, tmp_path: Path) -> None:
    with pytest.raises(ClientError, match=r"there is no folder .*none"):
        put_folder(client, "lm", tmp_path / "none")


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, {"in/a": b"1", "secret": b"2"})
    (tmp_path / "in" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ClientError, match="link is a link that leaves the folder"):
        scan_folder(tmp_path / "in")


def test_links_to_folders_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, {"in/sub/a": b"1"})
    (tmp_path / "in" / "link").symlink_to(tmp_path / "in" / "sub")
    with pytest.raises(ClientError, match="link is a link to a folder"):
        scan_folder(tmp_path / "in")


def test_a_link_within_the_folder_is_its_content(tmp_path: Path) -> None:
    fill(tmp_path, {"a": b"1"})
    (tmp_path / "b").symlink_to("a")
    assert scan_folder(tmp_path)["b"].sha256 == sha256(b"1")


def test_dangling_links_and_pipes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(ClientError, match=r"cannot read .*link: No such file"):
        scan_folder(tmp_path)
    (tmp_path / "link").unlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ClientError, match="pipe is no plain file"):
        scan_folder(tmp_path)


def test_get_leaves_files_that_differ_alone_unless_told(airflow: FakeAirflow, client: Client, tmp_path: Path) -> None:
    airflow.put_project("lm", {"a": b"1", "b": b"2", "c": b"3"})
    fill(tmp_path, {"a": b"1", "b": b"mine", "other": b"9"})
    with pytest.raises(ClientError, match=r"holds 1 file\(s\) that differ: b; nothing was written. .* --overwrite"):
        get_project(client, "lm", tmp_path)
    assert content(tmp_path) == {"a": b"1", "b": b"mine", "other": b"9"}
    assert get_project(client, "lm", tmp_path, overwrite=True) == 2
    assert content(tmp_path) == {"a": b"1", "b": b"2", "c": b"3", "other": b"9"}


def test_a_path_that_leaves_the_folder_stops_all(airflow: FakeAirflow, client: Client, tmp_path: Path) -> None:
    airflow.put_project("lm", {"a": b"1", "../evil": b"2"})
    with pytest.raises(ClientError, match="leaves the folder"):
        get_project(client, "lm", tmp_path / "copy")
    assert content(tmp_path) == {}


def test_artifacts_come_down_over_what_is_there(airflow: FakeAirflow, client: Client, tmp_path: Path) -> None:
    airflow.artifacts["r:1"] = [("out/model.pt", b"weights", 0o644), ("log.txt", b"", 0o600)]
    fill(tmp_path, {"log.txt": b"older"})
    files = get_artifacts(client, "r:1", tmp_path)
    assert [file.path for file in files] == ["out/model.pt", "log.txt"]
    assert content(tmp_path) == {"out/model.pt": b"weights", "log.txt": b""}


FILES = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(["1", "2", "3"]))


@given(FILES, FILES, st.booleans())
def test_the_plan_makes_the_project_the_folders(local: dict[str, str], there: dict[str, str], delete: bool) -> None:
    infos = {path: FileInfo(path, sha, 1) for path, sha in local.items()}
    head = ProjectFiles(1, "s", {path: FileInfo(path, sha, 1) for path, sha in there.items()})
    plan = plan_put(infos, head, delete=delete)
    after = {path: sha for path, sha in there.items() if path not in plan.removed}
    after |= {file.path: file.sha256 for file in plan.changes}
    assert after == (local if delete else {**there, **local})
    assert plan.is_empty == (after == there)
