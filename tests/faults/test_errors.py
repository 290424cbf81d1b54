"""What users and hosts do wrong is told in a sentence that says where, with what numbers, and how to mend it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from taas.errors import DeliveryError, ElementError, LoaderError
from tests.delivery.support import Prepared, feeding, launch_plan
from tests.faults.conftest import MakeScene
from tests.faults.scene import NUMBERS

pytestmark = pytest.mark.store

UNSTORABLE = NUMBERS.replace(
    '"x": torch.randn(64)', '"x": torch.randn(64), "meta": {"what": Odd() if index == 21 else 1}'
).replace("class Numbers", "class Odd:\n    pass\n\nclass Numbers")

RAISING = NUMBERS.replace(
    "        return {", '        if index == 21:\n            raise KeyError("no such file")\n        return {'
)


def test_an_element_that_no_column_can_hold_names_loader_elements_path_and_way_out(make_scene: MakeScene) -> None:
    scene = make_scene(source=UNSTORABLE)
    with pytest.raises(ElementError) as caught:
        scene.prepare()
    message = caught.value.message
    assert "loader 'data', epoch 0, elements 12 to 27" in message
    assert "meta" in message and "what" in message and "Odd" in message and "allow_pickle" in message
    assert [one.n for one in scene.records()] in ([0], [0, 1])  # what was whole before it stays


def test_a_dataset_that_raises_names_loader_element_index_and_host_and_shows_the_users_traceback(
    make_scene: MakeScene,
) -> None:
    scene = make_scene(source=RAISING)
    with pytest.raises(LoaderError) as caught:
        scene.prepare()
    message, fields = caught.value.message, caught.value.fields
    assert "loader 'data' raised KeyError: 'no such file' at element 21 of epoch 0" in message
    assert "dataset indices 21" in message and "on c1-0" in message
    assert (fields["epoch"], fields["index"], fields["host"]) == (0, 21, "c1-0")
    assert 'raise KeyError("no such file")' in fields["traceback"] and "data_of_faults.py" in fields["traceback"]
    assert "elements.py" not in fields["traceback"]


def test_a_full_disk_of_a_host_is_told_to_its_ranks_with_both_numbers(small_disk: Path) -> None:
    from taas_tasks.store.memory import MemoryStore

    prepared = Prepared(MemoryStore(), units=32, length=32, width=1 << 15).commit_all()  # 128 KiB an element
    with (
        feeding(prepared.store, launch_plan(prepared, nproc=1, cache_bytes=1 << 30), small_disk) as host,
        pytest.raises(DeliveryError) as caught,
    ):
        list(host.loader(0))
    message, fields = caught.value.message, caught.value.fields
    assert f"host host-0 cannot have {fields['needed_bytes']} bytes of cache in" in message
    assert f"where {fields['free_bytes']} bytes are free: No space left on device" in message
    assert fields["needed_bytes"] > fields["free_bytes"] and "lower cache_gb" in message
    assert os.statvfs(small_disk).f_bfree > 0  # what was fetched is given back
