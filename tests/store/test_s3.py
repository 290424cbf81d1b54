"""What only S3 has: networks that fail, credentials, presigned URLs."""

from __future__ import annotations

import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from taas.errors import ObjectCorrupt, StoreError, StoreRefused, StoreUnavailable
from taas_tasks.stack.ports import free_port
from taas_tasks.store import open_store
from taas_tasks.store.answers import Retries, error_for
from taas_tasks.store.s3 import S3Store
from tests.store.reading import gathered
from tests.support.faulty_proxy import Answer, Call, Cut, CutUpload, FaultyProxy, Refuse, faulty_proxy, request_proxy
from tests.support.s3_server import S3Server

pytestmark = pytest.mark.store
QUICK = Retries(max_attempts=3, first_wait_s=0.01)
CONTENT = os.urandom(3 << 20)


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3_server.ports.s3) as found:
        yield found


@pytest.fixture
def far(s3_server: S3Server, proxy: FaultyProxy) -> Iterator[S3Store]:
    """A store behind the faulty proxy; ``big`` is in it."""
    config = s3_server.fresh_config(endpoint_url=proxy.url)
    S3Store(config.model_copy(update={"endpoint_url": s3_server.config.endpoint_url})).put("big", CONTENT)
    store = S3Store(config, retries=QUICK)
    yield store
    store.close()


def near(s3_server: S3Server, far: S3Store) -> S3Store:
    """The same objects without the proxy."""
    return S3Store(far._config.model_copy(update={"endpoint_url": s3_server.config.endpoint_url}))


def read_into(store: S3Store, _: Path) -> bytes:
    return gathered(store, "big", 0, len(CONTENT))


def get_file(store: S3Store, folder: Path) -> bytes:
    store.get_file("big", folder / "f")
    return (folder / "f").read_bytes()


Read = Callable[[S3Store, Path], bytes]
READS: list[Read] = [read_into, get_file, lambda store, _: store.get("big")]


@pytest.mark.parametrize("read", READS, ids=["read_into", "get_file", "get"])
def test_a_body_cut_in_the_middle_is_taken_up_where_it_stopped(
    far: S3Store, proxy: FaultyProxy, tmp_path: Path, read: Read
) -> None:
    proxy.faults = [Cut(1 << 20), Cut(100), Cut(1 << 20)]
    assert read(far, tmp_path) == CONTENT
    assert proxy.num_connections == 4


@pytest.mark.parametrize("read", READS, ids=["read_into", "get_file", "get"])
def test_an_object_replaced_while_it_is_read_is_corrupt_and_never_mixed(
    far: S3Store, proxy: FaultyProxy, s3_server: S3Server, tmp_path: Path, read: Read
) -> None:
    proxy.faults = [Cut(1 << 20), Call(lambda: near(s3_server, far).put("big", bytes(len(CONTENT))))]
    with pytest.raises(ObjectCorrupt, match="replaced"):
        read(far, tmp_path)
    assert not (tmp_path / "f").exists()


def test_a_connection_that_never_brings_a_byte_is_given_up(far: S3Store, proxy: FaultyProxy, tmp_path: Path) -> None:
    proxy.always = Cut(0)
    for act in (lambda: read_into(far, tmp_path), lambda: far.put("k", b""), lambda: far.head("k")):
        with pytest.raises(StoreUnavailable):
            act()


def test_a_throttled_store_is_asked_again(far: S3Store, proxy: FaultyProxy, tmp_path: Path) -> None:
    slow = Answer(503, "SlowDown")
    proxy.faults = [slow, slow]
    assert read_into(far, tmp_path) == CONTENT
    for act in (lambda: far.put("k", b"1"), lambda: far.put_if_absent("n", b"1"), lambda: list(far.list(""))):
        proxy.drop_connections()
        proxy.faults = [slow, slow]
        act()
        assert proxy.faults == []
    assert (far.get("k"), far.get("n")) == (b"1", b"1")


def test_a_store_that_throttles_for_ever_is_unavailable_and_a_retry_can_help(
    far: S3Store, proxy: FaultyProxy, tmp_path: Path
) -> None:
    proxy.always = Answer(503, "SlowDown")
    for act in (lambda: read_into(far, tmp_path), lambda: far.put("k", b""), lambda: far.put_if_absent("k", b"")):
        with pytest.raises(StoreUnavailable, match="SlowDown") as caught:
            act()
        assert caught.value.retryable


def test_a_conditional_put_in_conflict_with_another_is_asked_again(far: S3Store, proxy: FaultyProxy) -> None:
    proxy.faults = [Answer(409, "ConditionalRequestConflict")]
    assert far.put_if_absent("k", b"mine") is True
    proxy.drop_connections()
    proxy.always = Answer(409, "ConditionalRequestConflict")
    with pytest.raises(StoreUnavailable, match="others"):
        far.put_if_absent("n", b"mine")


def test_a_lost_reply_of_a_conditional_put_says_taken_and_the_content_is_ours(far: S3Store, proxy: FaultyProxy) -> None:
    proxy.faults = [Cut(0)]
    assert far.put_if_absent("k", b"mine") is False
    assert far.get("k") == b"mine"


def test_an_idle_connection_that_the_server_closed_costs_no_retry(
    s3_server: S3Server, far: S3Store, proxy: FaultyProxy, tmp_path: Path
) -> None:
    once = S3Store(far._config, retries=Retries(max_attempts=1))
    read_into(once, tmp_path)
    proxy.drop_connections()
    time.sleep(0.05)
    assert read_into(once, tmp_path) == CONTENT
    once.close()


def test_one_connection_serves_many_reads(far: S3Store, proxy: FaultyProxy) -> None:
    for start in range(50):
        assert far.get_range("big", start, start + 10) == CONTENT[start : start + 10]
    assert proxy.num_connections == 1


def test_many_threads_read_what_they_asked_for(s3_server: S3Server, far: S3Store) -> None:
    store = near(s3_server, far)

    def read(n: int) -> bool:
        start = n * 7919
        return gathered(store, "big", start, start + 100_000) == CONTENT[start : start + 100_000]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(200)))
    store.close()


def test_a_forked_child_reads_by_connections_of_its_own(s3_server: S3Server, far: S3Store) -> None:
    store = near(s3_server, far)
    assert store.get_range("big", 0, 4) == CONTENT[:4]
    assert threading.active_count() < 50
    pid = os.fork()
    if pid == 0:
        right = all(store.get_range("big", n, n + 4) == CONTENT[n : n + 4] for n in range(20))
        os._exit(0 if right else 1)
    right = all(store.get_range("big", n, n + 9) == CONTENT[n : n + 9] for n in range(20))
    assert os.waitpid(pid, 0)[1] == 0
    assert right
    store.close()


@pytest.mark.parametrize("wrong", [{"secret_key": "wrong"}, {"access_key": "nobody"}, {"bucket": "no-such-bucket"}])
def test_wrong_credentials_or_bucket_are_refused_at_once(s3_server: S3Server, wrong: dict[str, str]) -> None:
    store = S3Store(s3_server.fresh_config(**wrong))
    started = time.monotonic()
    for act in (
        lambda: store.get("k"),
        lambda: store.put("k", b"") if "bucket" not in wrong else store.get("k"),
        lambda: list(store.list("")),
        lambda: gathered(store, "k", 0, 1),
    ):
        with pytest.raises(StoreRefused, match=r"check the access key|bucket does not exist") as caught:
            act()
        assert not caught.value.retryable
    assert time.monotonic() - started < 5
    store.close()


def test_a_large_write_that_is_refused_before_its_end_says_why(s3_server: S3Server) -> None:
    store = S3Store(s3_server.fresh_config(secret_key="wrong"), retries=QUICK)
    with pytest.raises(StoreRefused, match="check the access key"):
        store.put("k", bytes(64 << 20))
    store.close()


def test_a_write_that_is_cut_is_sent_again_whole(far: S3Store, proxy: FaultyProxy, s3_server: S3Server) -> None:
    proxy.faults = [Cut(0), Answer(503, "SlowDown")]
    far.put("k", [memoryview(CONTENT), memoryview(b"end")])
    assert near(s3_server, far).get("k") == CONTENT + b"end"


@pytest.mark.parametrize("after_bytes", [0, 5])
@pytest.mark.parametrize("write", [S3Store.put, S3Store.put_if_absent])
def test_a_writer_that_dies_behind_its_headers_leaves_no_object(
    s3_server: S3Server, write: Any, after_bytes: int
) -> None:
    """Else an empty ledger record would stand under its key for ever."""
    config = s3_server.fresh_config()
    with request_proxy(s3_server.ports.s3) as proxy:
        proxy.add(CutUpload(after_bytes), method="PUT")
        dying = S3Store(config.model_copy(update={"endpoint_url": proxy.url}), retries=Retries(max_attempts=1))
        with pytest.raises(StoreUnavailable):
            write(dying, "record", b"all of the record")
        dying.close()
    store = S3Store(config)
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:  # the server takes its time to see that nothing more comes
        assert store.head("record") is None
        time.sleep(0.2)
    assert store.put_if_absent("record", b"all of the record")
    assert store.get("record") == b"all of the record"
    store.close()


def test_a_server_that_is_not_there_is_unavailable(s3_server: S3Server) -> None:
    url = f"http://127.0.0.1:{free_port(taken=set())}"
    store = S3Store(s3_server.fresh_config(endpoint_url=url), retries=QUICK)
    for act in (lambda: store.get("k"), lambda: store.put("k", b""), lambda: store.head("k")):
        with pytest.raises(StoreUnavailable, match="does not answer"):
            act()


@pytest.mark.parametrize(
    ("status", "code", "kind", "text"),
    [
        (403, "RequestTimeTooSkewed", StoreRefused, "clock"),
        (400, "ExpiredToken", StoreRefused, "session credentials"),
        (429, "", StoreUnavailable, "overloaded"),
        (500, "InternalError", StoreUnavailable, "overloaded"),
        (418, "Teapot", StoreError, "418 Teapot"),
    ],
)
def test_an_answer_becomes_the_error_that_says_what_to_do(
    status: int, code: str, kind: type[StoreError], text: str
) -> None:
    found = error_for("k", status=status, code=code)
    assert type(found) is kind
    assert text in found.message


@pytest.mark.parametrize(("ahead_s", "words"), [(2000, "s ahead of the store's"), (-2000, "s behind the store's")])
def test_a_store_that_refuses_for_the_clock_says_by_how_much_it_is_off(
    s3_server: S3Server, ahead_s: float, words: str
) -> None:
    with request_proxy(s3_server.ports.s3) as proxy:
        store = S3Store(s3_server.fresh_config(endpoint_url=proxy.url), retries=QUICK)
        date = formatdate(time.time() - ahead_s, usegmt=True)
        proxy.add(Refuse(403, "RequestTimeTooSkewed", date=date), times=10)
        for act in (lambda: store.get("k"), lambda: store.put("k", b""), lambda: store.head("k")):
            with pytest.raises(StoreRefused, match=r"clock is (19|20)\d\d s") as caught:
                act()
            assert words in caught.value.message
            assert abs(caught.value.fields["skew_s"]) == pytest.approx(2000, abs=10)


def test_a_refusal_that_names_another_reason_is_not_put_down_to_the_clock() -> None:
    date = formatdate(time.time() - 2000, usegmt=True)
    assert "clock" not in error_for("k", status=403, code="AccessDenied", date=date).message
    assert "clock" in error_for("k", status=403, code="403", date=date).message


def fetch(url: str, *, method: str = "GET", data: bytes | None = None) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, data=data, method=method), timeout=10) as answer:
        return bytes(answer.read())


def status_of(url: str, *, method: str = "GET", data: bytes | None = None) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:
        fetch(url, method=method, data=data)
    with caught.value:
        return caught.value.code


@pytest.mark.parametrize("key", ["plain", "a b/ü+&=?#%20.txt"])
def test_presigned_urls_work_without_any_client(s3_server: S3Server, key: str) -> None:
    store = open_store(s3_server.fresh_config())
    fetch(store.presign_put(key, expires_s=60), method="PUT", data=b"up")
    assert store.get(key) == b"up"
    assert fetch(store.presign_get(key, expires_s=60)) == b"up"


def test_a_presigned_url_does_one_thing_to_one_key_for_its_time(s3_server: S3Server) -> None:
    store = open_store(s3_server.fresh_config())
    store.put("k", b"1")
    store.put("other", b"2")
    short = store.presign_get("k", expires_s=1)
    get = store.presign_get("k", expires_s=60)
    assert status_of(get, method="PUT", data=b"evil") == 403
    assert status_of(get.replace("/k?", "/other?")) == 403
    time.sleep(2.1)
    assert status_of(short) == 403
    assert store.get("k") == b"1"


def test_presigned_urls_name_the_public_endpoint(s3_server: S3Server, proxy: FaultyProxy) -> None:
    store = open_store(s3_server.fresh_config(public_endpoint_url=proxy.url))
    store.put("k", b"1")
    assert proxy.num_connections == 0
    url = store.presign_get("k", expires_s=60)
    assert url.startswith(proxy.url + "/")
    assert fetch(url) == b"1"


def test_prefixes_do_not_see_each_other(s3_server: S3Server) -> None:
    one, two = s3_server.fresh_config(prefix="x/one"), s3_server.fresh_config(prefix="x/one-more/")
    open_store(one).put("k", b"1")
    assert list(open_store(two).list("")) == []
    assert open_store(two).head("k") is None
    assert [info.key for info in open_store(one).list("")] == ["k"]


def test_opening_a_store_connects_to_nothing(s3_server: S3Server) -> None:
    open_store(s3_server.fresh_config(endpoint_url="http://127.0.0.1:1"))


def test_objects_survive_kill_9_of_the_server(tmp_path: Path) -> None:
    from tests.support.s3_server import running_s3_server

    with running_s3_server(tmp_path) as server:
        store = open_store(server.fresh_config())
        for n in range(20):
            store.put(f"k/{n:02d}", b"%d" % n)
        server.stop()
        server.start()
        assert [store.get(info.key) for info in store.list("k/")] == [b"%d" % n for n in range(20)]
