from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import taas
from taas import context
from taas.errors import DeliveryError, RegisterError
from taas.registry import registered


class FakeRun:
    project_dir = Path("/project")
    world_size = 2

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.is_rank0 = rank == 0
        self.loaders = {"data_loader": DataLoader([1, 2, 3])}
        self.metrics: list[dict[str, Any]] = []
        self.num_progressed = 0

    def loader(self, name: str) -> DataLoader[Any]:
        return self.loaders[name]

    def loader_names(self) -> list[str]:
        return list(self.loaders)

    def log(self, metrics: dict[str, Any]) -> None:
        self.metrics.append(metrics)

    def progressed(self) -> None:
        self.num_progressed += 1


@pytest.fixture(autouse=True)
def _outside_again() -> Iterator[None]:
    yield
    context.uninstall()
    for name in registered():
        taas.unregister(name)


def test_outside_a_run_the_registered_loader_is_given_as_it_is() -> None:
    data_loader = DataLoader([1, 2])
    taas.register(data_loader)
    assert taas.loader("data_loader") is data_loader


def test_outside_a_run_an_unregistered_name_is_refused() -> None:
    message = r"Dataloader data_loader is not registered; registered here: none.*taas.register\(data_loader\)"
    with pytest.raises(RegisterError, match=message):
        taas.loader("data_loader")


def test_inside_a_run_the_delivered_loader_is_given() -> None:
    run = FakeRun()
    data_loader = DataLoader([9])
    taas.register(data_loader)
    context.install(run)
    assert isinstance(run, context.Provider)
    assert taas.loader("data_loader") is run.loaders["data_loader"]
    assert context.current() is run


def test_inside_a_run_an_unknown_name_is_refused_with_the_known_ones() -> None:
    context.install(FakeRun())
    with pytest.raises(
        DeliveryError, match=r"no loader 'other'; it has: data_loader. Name it in the request's 'loaders'"
    ):
        taas.loader("other")


def test_a_process_belongs_to_one_run() -> None:
    run = FakeRun()
    context.install(run)
    context.install(run)
    with pytest.raises(DeliveryError, match="already belongs to a run"):
        context.install(FakeRun())


def test_metrics_of_rank_0_are_kept_and_those_of_others_passed_over() -> None:
    run = FakeRun()
    context.install(run)
    taas.log(loss=0.5, step=1)
    taas.log({"a/b": 1}, c=2)
    assert run.metrics == [{"loss": 0.5, "step": 1}, {"a/b": 1, "c": 2}]
    context.uninstall()
    other = FakeRun(rank=1)
    context.install(other)
    taas.log(loss=0.1)
    assert other.metrics == []


def test_outside_a_run_metrics_are_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="taas"):
        taas.log(loss=0.5, step=1)
    assert "metrics loss=0.5, step=1" in caplog.text


def test_a_log_and_a_checkpoint_of_any_rank_are_progress(tmp_path: Path) -> None:
    for rank, expected in ((1, 2), (0, 3)):  # rank 0 has also written its checkpoint
        run = FakeRun(rank)
        run.project_dir = tmp_path
        context.install(run)
        taas.log(loss=1)
        taas.checkpoint({}, step=1)
        assert run.num_progressed == expected
        context.uninstall()
