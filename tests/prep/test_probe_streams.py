from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, get_worker_info

from taas.errors import LoaderError
from taas_tasks.prep.probe_streams import Probed, probe_streams
from tests.prep import cases, stream_cases


def probed(dataset: Any, **more: Any) -> Probed:
    def make() -> DataLoader[Any]:
        return DataLoader(dataset, **{"batch_size": None, "num_workers": 2} | more)

    return probe_streams(make, producer=cases.producer(0), seed=0)


class AsksOnly(stream_cases.Everything):
    """Asks for its worker info, and may well share by it later."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        assert info.num_workers == 2
        yield from super().__iter__()


def test_who_asks_for_worker_info_is_believed_to_share() -> None:
    assert probed(AsksOnly(9)).is_shared
    assert not probed(stream_cases.Everything(9)).is_shared


def test_one_loader_worker_has_nobody_to_share_with() -> None:
    assert probed(stream_cases.Everything(9), num_workers=1) == Probed(True, False, [])


class Dies(stream_cases.Everything):
    def __iter__(self) -> Iterator[Any]:
        yield from (1, 2)
        os._exit(4)


def test_a_loader_worker_that_dies_is_told() -> None:
    with pytest.raises(LoaderError, match=r"loader 'data': loader worker [01] exited with code 4"):
        probed(Dies(9))
