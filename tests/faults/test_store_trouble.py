"""A store that throttles, loses answers, cuts connections, or refuses expired credentials, under the real parts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from taas_tasks.store import open_store
from taas_tasks.store.answers import Retries
from taas_tasks.store.files import write_then_move
from taas_tasks.values import StoreConfig
from tests.faults.conftest import MakeScene
from tests.faults.scene import KEYS, Scene
from tests.prep import oracle
from tests.support.faulty_proxy import CutBody, CutUpload, LoseAnswer, Refuse, Request, Rule
from tests.support.s3_server import S3Server

pytestmark = pytest.mark.store
SLOW_DOWN = Refuse(503, "SlowDown")


def storm(scene: Scene, *, seconds: float, then_share: float) -> tuple[Rule, Rule]:
    """Every request is refused for some seconds from the first one on, then a share of them."""
    began: list[float] = []

    def is_raging(_: object) -> bool:
        began.append(time.monotonic())
        return time.monotonic() - began[0] < seconds

    return scene.proxy.add(SLOW_DOWN, when=is_raging), scene.proxy.add(SLOW_DOWN, share=then_share, seed=3)


def assert_whole(scene: Scene) -> None:
    """Every unit is committed once, and the store holds no object that no record names."""
    assert len(scene.committed()) == scene.units
    assert sorted(scene.objects(f"{KEYS.root}shards/")) == sorted(one.key for one in scene.records())


def test_a_storm_of_503_while_preparing_loses_and_doubles_nothing(scene: Scene) -> None:
    rules = storm(scene, seconds=1.0, then_share=0.1)
    told = scene.prepare()
    assert all(rule.met > 0 for rule in rules)
    assert told["committed"] == len(scene.records()) and told["notes"] == []
    assert_whole(scene)


def test_a_storm_of_503_while_delivering_loses_and_doubles_nothing_and_speed_comes_back(scene: Scene) -> None:
    scene.prepare()
    wanted = scene.committed()
    rules = storm(scene, seconds=1.0, then_share=0.2)
    with scene.feeding() as host:
        oracle.assert_same_stream(scene.delivered(host), wanted)
    assert all(rule.met > 0 for rule in rules)
    assert scene.repairs() == []
    scene.proxy.rules.clear()
    store, record = open_store(scene.far), scene.records()[0]
    store.get(record.key)
    began = time.monotonic()
    for _ in range(20):
        store.get(record.key)
    assert time.monotonic() - began < 2  # no pause is left over


def test_a_store_that_is_down_for_longer_than_its_retries_does_not_end_the_delivery(scene: Scene) -> None:
    scene.prepare()
    wanted = scene.committed()
    down = scene.proxy.add(SLOW_DOWN, method="GET", key="shards/", times=20)
    with scene.feeding(retries=Retries(max_attempts=2, first_wait_s=0.01)) as host:
        oracle.assert_same_stream(scene.delivered(host), wanted)
    assert down.met == 20


def test_lost_answers_and_cut_uploads_while_preparing_lose_and_double_nothing(scene: Scene) -> None:
    rules = [
        scene.proxy.add(LoseAnswer(), method="PUT", key="ledger/", times=2),
        scene.proxy.add(LoseAnswer(), method="PUT", key="shards/", times=2),
        scene.proxy.add(CutUpload(700), method="PUT", key="shards/", times=2),
        scene.proxy.add(CutUpload(100), method="PUT", key="ledger/", times=2),
    ]
    told = scene.prepare()
    assert [rule.met for rule in rules] == [2, 2, 2, 2]
    assert told["committed"] == len(scene.records())
    assert_whole(scene)


def test_a_half_written_object_is_never_seen(scene: Scene) -> None:
    """A machine that ends in the middle of its upload leaves no object, no record, and nothing in the way."""
    cut = scene.proxy.add(CutUpload(500), method="PUT", key="shards/")
    with pytest.raises(Exception, match="does not answer"):
        scene.prepare(retries=Retries(max_attempts=2))
    assert cut.met == 2
    assert scene.objects(f"{KEYS.root}shards/") == {} and scene.records() == []
    scene.proxy.rules.clear()
    assert scene.prepare(generation=2)["committed"] == len(scene.records())
    assert_whole(scene)


@pytest.fixture
def session(make_scene: MakeScene, s3_server: S3Server, tmp_path: Path) -> tuple[Scene, StoreConfig, Path]:
    """A scene whose store has its credentials from a file."""
    scene = make_scene()
    path = tmp_path / "keys.json"
    write_keys(path, {"access_key": str(scene.far.access_key), "secret_key": str(scene.far.secret_key)})
    return (
        scene,
        scene.far.model_copy(update={"access_key": None, "secret_key": None, "credentials_path": str(path)}),
        path,
    )


def write_keys(path: Path, keys: dict[str, str]) -> None:
    with write_then_move(path, mode=0o600) as file:
        file.write(json.dumps(keys).encode())


def expire_at(scene: Scene, s3_server: S3Server, path: Path, *, method: str, key: str) -> Rule:
    """The old keys are refused from the third matching request on; the first refusal has them renewed."""
    new = s3_server.new_keys()
    seen: list[Request] = []

    def is_expired(request: Request) -> bool:
        seen.append(request)
        return len(seen) > 2 and request.access_key == scene.far.access_key

    refusal = scene.proxy.add(Refuse(403, "ExpiredToken"), method=method, key=key, when=is_expired)
    scene.proxy.on_refusal = lambda: write_keys(path, new)
    return refusal


def test_credentials_that_expire_while_preparing_are_renewed(
    session: tuple[Scene, StoreConfig, Path], s3_server: S3Server
) -> None:
    scene, config, path = session
    refusal = expire_at(scene, s3_server, path, method="PUT", key="shards/")
    scene.prepare(config=config)
    assert refusal.met > 0
    assert_whole(scene)


def test_credentials_that_expire_in_the_middle_of_a_shard_while_delivering_are_renewed(
    session: tuple[Scene, StoreConfig, Path], s3_server: S3Server
) -> None:
    scene, config, path = session
    scene.prepare(config=config)
    wanted = scene.committed()
    cut = scene.proxy.add(CutBody(500), method="GET", key="shards/", times=2)
    refusal = expire_at(scene, s3_server, path, method="GET", key="shards/")
    with scene.feeding(config=config) as host:
        oracle.assert_same_stream(scene.delivered(host), wanted)
    assert cut.met == 2 and refusal.met > 0
    assert scene.repairs() == []
