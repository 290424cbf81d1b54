from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch.utils.data import DataLoader

import taas.context
from taas.errors import DeliveryError
from taas_tasks.delivery import delivered_namespace, install
from taas_tasks.delivery.loader import DeliveredLoader
from taas_tasks.store.memory import MemoryStore
from tests.delivery.support import Prepared, launch_plan


@pytest.fixture(autouse=True)
def _own_context(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    path = list(sys.path)
    monkeypatch.chdir(Path.cwd())
    yield
    taas.context.uninstall()
    sys.path[:] = path


def write_context(folder: Path, *, rank: int = 0, socket: str | None = "/tmp/none", **plan: Any) -> Path:
    prepared = Prepared(MemoryStore(), units=8, length=8)
    (folder / "plan.json").write_bytes(launch_plan(prepared, nproc=2, **plan).to_bytes())
    (folder / "project").mkdir()
    (folder / "counters").mkdir()
    context = {
        "rank": rank,
        "local_rank": rank,
        "world_size": 2,
        "feeder_socket": socket,
        "launch_plan_path": str(folder / "plan.json"),
        "counters_dir": str(folder / "counters"),
        "metrics_path": str(folder / "metrics.jsonl"),
        "project_dir": str(folder / "project"),
    }
    path = folder / "context.json"
    path.write_text(json.dumps(context))
    return path


def test_installing_gives_the_delivered_loader_the_same_each_time(tmp_path: Path) -> None:
    provider = install(write_context(tmp_path))
    loader = taas.context.loader("data")
    assert isinstance(loader, DeliveredLoader) and taas.context.loader("data") is loader
    assert isinstance(provider, taas.context.Provider)
    assert len(loader) == 4
    assert (provider.rank, provider.world_size, provider.is_rank0) == (0, 2, True)


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    install(write_context(tmp_path, plain_loaders={"extra": "data.py:make"}))
    with pytest.raises(DeliveryError, match="no loader 'dta'; it has: data, extra"):
        taas.context.loader("dta")


def test_a_plain_loader_of_the_project_is_the_users_own(tmp_path: Path) -> None:
    provider = install(write_context(tmp_path, plain_loaders={"extra": "plain_data_file.py:make"}))
    source = (
        "from torch.utils.data import DataLoader\ndef make():\n    return DataLoader(list(range(6)), batch_size=3)\n"
    )
    (provider.project_dir / "plain_data_file.py").write_text(source)
    loader = taas.context.loader("extra")
    assert type(loader) is DataLoader
    assert [one.tolist() for one in loader] == [[0, 1, 2], [3, 4, 5]]


def test_a_plain_payload_is_read_from_what_the_node_agent_brought_and_verified(tmp_path: Path) -> None:
    data = cloudpickle.dumps(DataLoader(list(range(4)), batch_size=2))
    sha256 = hashlib.sha256(data).hexdigest()
    provider = install(write_context(tmp_path, plain_payloads={"extra": ("projects/p/payloads/x", sha256)}))
    (tmp_path / "payloads").mkdir()
    (tmp_path / "payloads" / sha256).write_bytes(data)
    namespace = delivered_namespace(provider)
    assert sorted(namespace) == ["data", "extra"]
    assert torch.equal(next(iter(namespace["extra"])), torch.tensor([0, 1]))


def test_a_host_without_a_feeder_says_so(tmp_path: Path) -> None:
    install(write_context(tmp_path, socket=None))
    with pytest.raises(DeliveryError, match="this host has no feeder"):
        taas.context.loader("data")


def test_metrics_are_json_lines_and_tensors_become_numbers(tmp_path: Path) -> None:
    install(write_context(tmp_path))
    taas.context.log(loss=torch.tensor(0.25), what={1: torch.ones(2)})
    taas.context.log({"step": 2})
    first, second = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert first["loss"] == 0.25 and "tensor" in first["what"]["1"] and first["time"] > 1e9
    assert second["step"] == 2
