"""Session credentials that expire, and are renewed in a file, while objects are read and written."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from taas.errors import StoreRefused
from taas_tasks.store.answers import Retries
from taas_tasks.store.credentials import CredentialsFile, Keys
from taas_tasks.store.files import write_then_move
from taas_tasks.store.s3 import S3Store
from tests.store.reading import gathered
from tests.support.faulty_proxy import CutBody, Refuse, RequestProxy, request_proxy
from tests.support.s3_server import S3Server

CONTENT = os.urandom(3 << 20)


def write_keys(path: Path, keys: dict[str, str]) -> None:
    with write_then_move(path, mode=0o600) as file:
        file.write(json.dumps(keys).encode())


def test_keys_are_those_of_the_file_as_it_is_now(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write_keys(path, {"access_key": "a", "secret_key": "1"})
    file = CredentialsFile(path)
    assert file.keys() == Keys("a", "1")
    write_keys(path, {"access_key": "b", "secret_key": "2", "session_token": "t"})
    assert file.keys() == Keys("b", "2", "t")


def test_a_renewal_that_does_not_come_in_time_is_told(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write_keys(path, {"access_key": "a", "secret_key": "1"})
    pauses: list[float] = []
    assert not CredentialsFile(path, patience_s=0, pause=pauses.append).await_others(Keys("a", "1"))
    assert pauses == []


def test_a_renewal_that_is_late_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write_keys(path, {"access_key": "a", "secret_key": "1"})

    def renew(_: float) -> None:
        write_keys(path, {"access_key": "b", "secret_key": "2"})

    assert CredentialsFile(path, pause=renew).await_others(Keys("a", "1"))


@pytest.mark.parametrize("text", [None, "{", "{}", '{"access_key": "a"}'])
def test_a_file_that_holds_no_keys_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "keys.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(StoreRefused, match=r"cannot be read from .*keys\.json"):
        CredentialsFile(path).keys()


@dataclass
class Session:
    """A store behind the proxy whose session credentials ``expire`` at once and are renewed a moment later."""

    store: S3Store
    proxy: RequestProxy
    path: Path
    old: dict[str, str]
    new: dict[str, str]

    def expire(self) -> None:
        self.proxy.add(Refuse(403, "ExpiredToken"), when=lambda request: request.access_key == self.old["access_key"])

    def renew_soon(self) -> threading.Timer:
        timer = threading.Timer(0.3, write_keys, (self.path, self.new))
        timer.start()
        return timer


@pytest.fixture
def session(s3_server: S3Server, tmp_path: Path) -> Iterator[Session]:
    old = {"access_key": str(s3_server.config.access_key), "secret_key": str(s3_server.config.secret_key)}
    path = tmp_path / "keys.json"
    write_keys(path, old)
    with request_proxy(s3_server.ports.s3) as proxy:
        config = s3_server.fresh_config(endpoint_url=proxy.url, access_key=None, secret_key=None)
        config = config.model_copy(update={"credentials_path": str(path)})
        store = S3Store(config, retries=Retries(max_attempts=3, first_wait_s=0.01))
        store.put("big", CONTENT)
        yield Session(store, proxy, path, old, s3_server.new_keys())
        store.close()


def read_into(store: S3Store, _: Path) -> bytes:
    return gathered(store, "big", 0, len(CONTENT))


def get_file(store: S3Store, folder: Path) -> bytes:
    store.get_file("big", folder / "f")
    return (folder / "f").read_bytes()


def put(store: S3Store, _: Path) -> bytes:
    store.put("other", CONTENT)
    return store.get("other")


def put_if_absent(store: S3Store, _: Path) -> bytes:
    assert store.put_if_absent("new", CONTENT) is True
    return store.get("new")


def put_file(store: S3Store, folder: Path) -> bytes:
    (folder / "big").write_bytes(CONTENT * 8)  # in parts
    store.put_file("parts", folder / "big")
    assert store.get("parts") == CONTENT * 8
    return CONTENT


def head(store: S3Store, _: Path) -> bytes:
    info = store.head("big")
    assert info is not None
    return CONTENT[: info.num_bytes]


def listed(store: S3Store, _: Path) -> bytes:
    assert [info.key for info in store.list("")] == ["big"]
    return CONTENT


Act = Callable[[S3Store, Path], bytes]


@pytest.mark.store
@pytest.mark.parametrize("act", [read_into, get_file, put, put_if_absent, put_file, head, listed])
def test_credentials_that_expire_are_renewed_and_what_was_under_way_succeeds(
    session: Session, tmp_path: Path, act: Act
) -> None:
    session.expire()
    timer = session.renew_soon()
    assert act(session.store, tmp_path) == CONTENT
    timer.join()


@pytest.mark.store
@pytest.mark.parametrize("act", [read_into, get_file])
def test_credentials_that_expire_in_the_middle_of_a_body_do_not_harm_it(
    session: Session, tmp_path: Path, act: Act
) -> None:
    cut = session.proxy.add(CutBody(1 << 20), method="GET", key="/big", times=1)
    session.proxy.add(
        Refuse(403, "ExpiredToken"), when=lambda one: cut.met > 0 and one.access_key == session.old["access_key"]
    )
    timer = session.renew_soon()
    assert act(session.store, tmp_path) == CONTENT
    timer.join()


@pytest.mark.store
def test_credentials_that_expired_without_a_renewal_say_how_to_mend_it(session: Session, s3_server: S3Server) -> None:
    session.expire()
    fixed = session.store._config.model_copy(update={**session.old, "credentials_path": None})
    for act in (lambda: S3Store(fixed).get("big"), lambda: S3Store(fixed).head("big")):
        with pytest.raises(StoreRefused, match=r"\(ExpiredToken\): the session credentials have expired") as caught:
            act()
        assert not caught.value.retryable
