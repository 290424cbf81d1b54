from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from taas.client import Client, FileInfo
from taas.errors import ClientError
from taas.transfer import download, in_parallel, safe_target, upload_bytes, upload_file
from tests.taas.fake_airflow import STORE, FakeAirflow, answers, fails, sha256

BIG = bytes(range(256)) * 4096 * 3 + b"tail"  # three chunks and a bit


@pytest.fixture
def airflow() -> FakeAirflow:
    return FakeAirflow()


@pytest.fixture
def client(airflow: FakeAirflow) -> Iterator[Client]:
    with airflow.client() as client:
        yield client


def info(data: bytes, path: str = "a/b.bin", mode: int = 0o644) -> FileInfo:
    return FileInfo(path, sha256(data), len(data), mode)


def url_of(data: bytes) -> str:
    return f"{STORE}/{sha256(data)}"


@pytest.mark.parametrize("data", [b"", b"x", BIG])
def test_a_file_goes_up_whole_and_comes_down_the_same(
    airflow: FakeAirflow, client: Client, tmp_path: Path, data: bytes
) -> None:
    source = tmp_path / "source"
    source.write_bytes(data)
    upload_file(client, source, url=url_of(data), sha256=sha256(data), num_bytes=len(data))
    assert airflow.blobs[sha256(data)] == data
    download(client, info(data, mode=0o755), tmp_path / "out", url=lambda: url_of(data))
    target = tmp_path / "out" / "a" / "b.bin"
    assert target.read_bytes() == data
    assert target.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in target.parent.iterdir()] == ["b.bin"]


@pytest.mark.parametrize("now", [b"y", BIG[:-1] + b"!"])
def test_a_file_that_changed_meanwhile_is_not_stored(
    airflow: FakeAirflow, client: Client, tmp_path: Path, now: bytes
) -> None:
    source = tmp_path / "source"
    source.write_bytes(now)
    with pytest.raises(ClientError, match="changed while it was uploaded; nothing was committed"):
        upload_file(client, source, url=url_of(b"x"), sha256=sha256(b"x"), num_bytes=len(now))
    assert airflow.blobs == {}


def test_trouble_with_the_store_is_tried_again(airflow: FakeAirflow, client: Client) -> None:
    airflow.before = [fails(), answers(503)]
    upload_bytes(client, b"x", url=url_of(b"x"), what="x")
    assert airflow.blobs == {sha256(b"x"): b"x"}
    assert airflow.pauses == [0.3, 1.0]


def test_a_refusal_of_the_store_is_one_sentence(airflow: FakeAirflow, client: Client) -> None:
    airflow.before = [answers(403)]
    with pytest.raises(ClientError, match=r"^the upload of loader x was refused by the store: status 403$"):
        upload_bytes(client, b"x", url=url_of(b"x"), what="loader x")
    assert len(airflow.requests) == 1


def test_a_store_that_stays_away_is_one_sentence(airflow: FakeAirflow, client: Client) -> None:
    airflow.before = [fails(httpx.ConnectError)] * 9
    with pytest.raises(ClientError, match=r"the store cannot be reached \(the line is cut\)"):
        upload_bytes(client, b"x", url=url_of(b"x"), what="x")


def test_a_wrong_content_is_not_kept(airflow: FakeAirflow, client: Client, tmp_path: Path) -> None:
    airflow.blobs[sha256(b"right")] = b"wrong"
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.bin").write_bytes(b"old")
    with pytest.raises(ClientError, match=r"what came down as a/b.bin is not what was stored"):
        download(client, info(b"right"), tmp_path, url=lambda: url_of(b"right"))
    assert [path.read_bytes() for path in (tmp_path / "a").iterdir()] == [b"old"]


def test_a_fresh_url_is_asked_for_at_each_try(airflow: FakeAirflow, client: Client, tmp_path: Path) -> None:
    airflow.blobs[sha256(b"x")] = b"x"
    airflow.before = [answers(500)]
    asked: list[int] = []
    download(client, info(b"x"), tmp_path, url=lambda: asked.append(1) or url_of(b"x"))  # type: ignore[func-returns-value]
    assert len(asked) == 2


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", "a/\x00"])
def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ClientError, match="leaves the folder"):
        safe_target(tmp_path, path)


def test_a_path_that_leaves_by_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path)
    with pytest.raises(ClientError, match="leaves the folder by a link"):
        safe_target(tmp_path / "in", "link/x")


def test_a_folder_that_cannot_be_written_is_one_sentence(client: Client, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a file")
    with pytest.raises(ClientError, match=r"cannot write .*b.bin: "):
        download(client, info(b"x"), tmp_path, url=lambda: url_of(b"x"))


def test_in_parallel_does_all_and_raises_the_first_error() -> None:
    done: set[int] = set()
    lock = threading.Lock()

    def action(number: int) -> None:
        with lock:
            done.add(number)
        if number in (3, 5):
            raise ClientError(f"failed {number}")

    with pytest.raises(ClientError, match="failed 3"):
        in_parallel(action, range(10))
    assert done == set(range(10))
