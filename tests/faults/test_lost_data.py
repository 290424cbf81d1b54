"""Data that is lost or wrong after it was committed: fetched again, then prepared again, and never noticed by ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from taas.errors import DeliveryError
from taas_tasks.layout import HostPaths
from taas_tasks.prep import repair_program
from tests.faults.conftest import MakeScene
from tests.faults.scene import KEYS, NUMBERS, RUN, TWO_STREAMS, Scene
from tests.launch.conftest import MakeGang
from tests.launch.gang import Gang
from tests.prep import oracle
from tests.support.faulty_proxy import CutBody, FlipByte

pytestmark = pytest.mark.store


def test_vanished_objects_and_records_are_prepared_again_and_the_ranks_get_all(scene: Scene) -> None:
    scene.prepare()
    wanted, records = scene.committed(), scene.records()
    shards, ledger = scene.objects(f"{KEYS.root}shards/"), scene.objects(KEYS.ledger("data"))
    lost_object, lost_record = records[2], records[-1]
    assert lost_record.last_of_epoch and lost_record.num_padding > 0
    scene.near.delete(lost_object.key)
    scene.near.delete(scene.record_key(lost_record))
    with scene.feeding() as host:
        oracle.assert_same_stream(scene.delivered(host), wanted)
    oracle.assert_same_stream(scene.committed(), wanted)
    assert scene.objects(f"{KEYS.root}shards/").items() >= shards.items()
    assert [one.content_digest for one in scene.records()] == [one.content_digest for one in records]
    changed = {key for key, data in scene.objects(KEYS.ledger("data")).items() if ledger[key] != data}
    assert changed == {scene.record_key(lost_record)}  # the ledger's other records are as they were
    first, second = sorted(scene.repairs(), key=lambda note: "epoch 1" in note)
    assert f"segment {lost_object.n} of epoch 0 of loader 'data' was lost (no object has the key" in first
    assert f"segment {lost_record.n} of epoch 1" in second and "its record is gone from the ledger" in second
    assert "host host-0 prepared it again in" in second
    assert not scene.repair_folder.exists()


def test_a_byte_that_is_wrong_at_rest_is_mended_in_the_store(scene: Scene) -> None:
    scene.prepare()
    wanted, record = scene.committed(), scene.records()[1]
    whole = scene.near.get(record.key)
    at = record.lanes[5].offset + record.lanes[5].length - 1
    scene.near.put(record.key, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with scene.feeding() as host:
        oracle.assert_same_stream(scene.delivered(host), wanted)
    assert scene.near.get(record.key) == whole
    (note,) = scene.repairs()
    assert "lane " in note and "has checksum" in note


def test_bytes_that_are_wrong_or_cut_in_transit_are_fetched_again_and_nothing_is_prepared(scene: Scene) -> None:
    scene.prepare()
    wanted = scene.committed()
    rules = [
        scene.proxy.add(FlipByte(300), method="GET", key="shards/", times=2),
        scene.proxy.add(CutBody(1000), method="GET", key="shards/", times=3),
    ]
    with scene.feeding() as host:
        oracle.assert_same_stream(scene.delivered(host), wanted)
    assert [rule.met for rule in rules] == [2, 3]
    assert scene.repairs() == []


DRIFTING = """
import os, torch
from torch.utils.data import DataLoader, Dataset

class Drifting(Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        return {"at": index, "x": torch.frombuffer(bytearray(os.urandom(64)), dtype=torch.uint8)}

def make_loader():
    return DataLoader(Drifting(), batch_size=None)
"""


def test_a_lost_segment_of_a_loader_that_is_not_deterministic_is_told_with_the_way_out(make_scene: MakeScene) -> None:
    scene = make_scene(source=DRIFTING, units=48)
    scene.prepare()
    record = scene.records()[1]
    scene.near.delete(record.key)
    with pytest.raises(DeliveryError) as caught:
        repair_program.run(scene.repair_input(record, generation=1001), scene.near, scene.folder / "project")
    assert "segment 1 of epoch 0 of loader 'data' (elements 4 to 11) was lost, and prepared again on c1-0 it has" in (
        caught.value.message
    )
    assert "not deterministic" in caught.value.message and "start the run anew" in caught.value.message
    assert scene.near.head(record.key) is None  # nothing takes the place of what hosts have read


def test_a_segment_that_two_hosts_prepare_again_has_one_record(scene: Scene) -> None:
    scene.prepare()
    record = scene.records()[0]
    scene.near.delete(scene.record_key(record))
    scene.near.delete(record.key)
    folder = scene.folder / "project"
    first, second = (
        repair_program.run(scene.repair_input(record, generation=generation), scene.near, folder)
        for generation in (1001, 2001)
    )
    assert first == second
    assert scene.records()[0].generation == 1001
    assert list(scene.objects(f"{KEYS.root}shards/data/000000/0000/00000000")) == [first["key"]]


def test_a_garbage_record_ends_the_training_with_a_sentence(scene: Scene) -> None:
    scene.prepare()
    key = scene.record_key(scene.records()[1])
    scene.near.put(key, b"garbage")
    with scene.feeding() as host, pytest.raises(DeliveryError, match="data") as caught:
        list(host.loader(0))
    assert key in caught.value.message


IN_SEQUENCE = """
import torch
from torch.utils.data import DataLoader, IterableDataset

class Stream(IterableDataset):
    def __iter__(self):
        return ({"at": index, "x": torch.randn(64)} for index in range(48))

def make_loader():
    return DataLoader(Stream(), batch_size=None)
"""


def test_a_lost_segment_of_a_loader_that_is_read_in_sequence_is_read_again_up_to_it(make_scene: MakeScene) -> None:
    reading = {"kind": "iterable", "order": "sequential", "read_by": "process", "epoch_length": None}
    scene = make_scene(source=IN_SEQUENCE, inspection=reading)
    scene.prepare()
    records, before = scene.records(), scene.objects()
    for record in (records[1], records[-1]):
        scene.near.delete(record.key)
        repair_program.run(scene.repair_input(record, generation=1001), scene.near, scene.folder / "project")
    assert scene.objects() == before


BY_WORKERS = """
import time
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

class Parts(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for index in range(info.id, 70, info.num_workers):
            if info.id != 1 or index < 20:
                yield {"at": index, "x": torch.randn(64)}
            elif index == 21:
                time.sleep(0.3)  # the second worker ends early, and late: the first waits until more of it is certain

def make_loader():
    return DataLoader(Parts(), batch_size=None, num_workers=2)
"""


def test_lost_segments_of_loader_workers_streams_are_made_again_as_they_were(make_scene: MakeScene) -> None:
    scene = make_scene(source=BY_WORKERS, inspection=TWO_STREAMS, units=80)
    scene.prepare()
    records, shards = scene.records(), scene.objects(f"{KEYS.root}shards/")
    of_first = [one for one in records if (one.epoch, one.stream) == (1, 0)]
    assert [(one.start, one.stop) for one in of_first] == [(0, 4), (4, 12), (12, 18), (18, 25)]  # [12, 28) was cut
    of_second = [one for one in records if (one.epoch, one.stream) == (1, 1) and one.stop > one.start]
    for record in [records[1], *of_first, of_second[-1]]:
        scene.near.delete(record.key)
        repair_program.run(scene.repair_input(record, generation=1001), scene.near, scene.folder / "project")
        assert scene.near.get(record.key) == shards[record.key], record
    lost = of_first[2]
    scene.near.delete(scene.record_key(lost))
    repair_program.run(scene.repair_input(lost, generation=1001), scene.near, scene.folder / "project")
    assert [(one.start, one.stop, one.content_digest) for one in scene.records()] == [
        (one.start, one.stop, one.content_digest) for one in records
    ]


WITH_SECRET = NUMBERS.replace(
    "import torch",
    "import os, torch\nSECRET = os.environ['THE_SECRET'] if 'TAAS_TEST_GANG' in os.environ else 's3cret'",
).replace('"at": index', '"at": index, "gpus": torch.cuda.device_count(), "secret": SECRET')

ITERATES = """
import taas, torch.distributed as dist
dist.init_process_group("nccl", init_method="env://")
print("sum", sum(element["at"] for element in taas.loader("data")))
dist.destroy_process_group()
"""


def test_a_training_goes_on_although_its_data_was_lost_and_says_so_in_its_result(
    make_gang: MakeGang, process_as_before: None, tmp_path: Path
) -> None:
    def prepare(gang: Gang) -> None:
        scene = Scene(gang.config, gang.store, tmp_path, source=WITH_SECRET, units=48)
        scene.prepare()
        scene.near.delete(scene.records()[1].key)
        gang.snapshot = scene.snapshot
        gang.plan["loaders"] = {"data": scene.loader_plan.model_dump()}

    gang = make_gang(ITERATES, nproc=2, run=RUN, before=prepare)
    result = gang.wait()
    assert result.ok, gang.all_output()
    sums = [int(line.split("sum ")[1]) for line in gang.out().splitlines() if "sum " in line]
    assert sum(sums) == sum(range(48))
    (note,) = result.nodes[0].repairs
    assert "segment 1 of epoch 0 of loader 'data' was lost" in note and "host host-0 prepared it again" in note
    scratch = HostPaths(gang.host_root(0)).scratch(RUN, 1)
    assert not (scratch / "repair").exists()
    assert not (scratch / "feeder.json").exists()  # it held the secret
    told = [line for line in gang.out().splitlines() if line.startswith("[host-0 feeder]")]
    assert any("host host-0 prepares it again, its ranks wait" in line for line in told)
    assert "s3cret" not in gang.all_output()
