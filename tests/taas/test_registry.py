from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

import taas
from taas.errors import RegisterError
from taas.registry import registered


class Numbers(Dataset[int]):
    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture(autouse=True)
def _empty_registry() -> Iterator[None]:
    yield
    for name in registered():
        taas.unregister(name)


module_loader = DataLoader(Numbers(), batch_size=2)
twin_a = twin_b = DataLoader(Numbers())


def test_a_loader_is_registered_under_its_variables_name() -> None:
    data_loader = DataLoader(Numbers(), batch_size=2, shuffle=True)
    assert taas.register(data_loader, units=7) == "data_loader"
    registration = registered()["data_loader"]
    assert registration.loader is data_loader
    assert registration.units == 7
    assert registration.num_bytes > 100


def test_a_variable_of_the_module_is_found_from_within_a_function() -> None:
    assert taas.register(module_loader) == "module_loader"


def test_a_local_variable_goes_before_one_of_the_module() -> None:
    mine = module_loader
    assert taas.register(mine) == "mine"


def test_variables_of_the_notebooks_history_do_not_count() -> None:
    namespace: dict[str, Any] = {"DataLoader": DataLoader, "Numbers": Numbers, "taas": taas}
    exec("loader = DataLoader(Numbers()); _ = __ = _12 = loader; Out = {12: loader}; taas.register(loader)", namespace)
    assert list(registered()) == ["loader"]


def test_without_a_variable_a_name_is_asked_for() -> None:
    with pytest.raises(RegisterError, match=r"no variable holds this DataLoader, so it has no name.*name='...'"):
        taas.register(DataLoader(Numbers()))
    assert taas.register(DataLoader(Numbers()), name="given") == "given"


def test_two_variables_make_the_name_doubtful() -> None:
    with pytest.raises(RegisterError, match=r"2 variables hold this DataLoader: twin_a, twin_b; .*name='twin_a'"):
        taas.register(twin_a)
    assert taas.register(twin_b, name="twin_b") == "twin_b"


@pytest.mark.parametrize("name", ["1a", "a-b", "class", "", "загрузчик"])
def test_a_name_that_is_no_variables_is_refused(name: str) -> None:
    with pytest.raises(RegisterError, match="allowed: a Python variable's name"):
        taas.register(DataLoader(Numbers()), name=name)


def test_what_cannot_be_iterated_is_refused() -> None:
    number = 5
    with pytest.raises(ValueError, match="number is not iterable: got int; allowed: a torch DataLoader"):
        taas.register(number)
    with pytest.raises(ValueError, match="is not iterable"):
        taas.register(object())


def test_an_iterable_that_is_no_dataloader_is_refused() -> None:
    batches = [1, 2, 3]
    with pytest.raises(RegisterError, match=r"batches is not a torch DataLoader: got list. Wrap it"):
        taas.register(batches)


def test_the_same_loader_twice_is_refused() -> None:
    data_loader = DataLoader(Numbers())
    taas.register(data_loader)
    with pytest.raises(ValueError, match="data_loader is already registered"):
        taas.register(data_loader)
    with pytest.raises(ValueError, match="other is already registered as data_loader"):
        taas.register(data_loader, name="other")


def test_a_new_object_under_a_registered_name_is_refused_until_the_old_one_is_out() -> None:
    data_loader = DataLoader(Numbers())
    taas.register(data_loader)
    data_loader = DataLoader(Numbers(), batch_size=3)
    with pytest.raises(
        RegisterError, match=r"already registered, with another object .*taas.unregister\('data_loader'\)"
    ):
        taas.register(data_loader)
    taas.unregister(data_loader)
    taas.register(data_loader)
    assert registered()["data_loader"].loader is data_loader


@pytest.mark.parametrize("units", [0, -1, True, 1.0, "5"])
def test_units_that_are_no_positive_integer_are_refused(units: Any) -> None:
    data_loader = DataLoader(Numbers())
    with pytest.raises(RegisterError, match=r"units of data_loader: got .*; allowed: an integer of at least 1"):
        taas.register(data_loader, units=units)
    assert registered() == {}


def test_a_loader_that_a_distributed_sampler_has_split_is_refused_with_the_reason() -> None:
    data_loader = DataLoader(Numbers(), sampler=DistributedSampler(Numbers(), num_replicas=8, rank=3))
    with pytest.raises(RegisterError, match=r"sampler is a DistributedSampler with num_replicas=8, so it yields 1/8"):
        taas.register(data_loader)


def test_a_distributed_sampler_inside_a_batch_sampler_is_found() -> None:
    sampler: Any = DistributedSampler(Numbers(), num_replicas=2, rank=0)
    batches: Any = torch.utils.data.BatchSampler(sampler, batch_size=2, drop_last=False)
    data_loader = DataLoader(Numbers(), batch_sampler=batches)
    with pytest.raises(RegisterError, match=r"batch_sampler.sampler is a DistributedSampler"):
        taas.register(data_loader)


def test_a_distributed_sampler_of_one_replica_is_fine() -> None:
    data_loader = DataLoader(Numbers(), sampler=DistributedSampler(Numbers(), num_replicas=1, rank=0))
    assert taas.register(data_loader) == "data_loader"


def test_lambdas_local_classes_and_generators_of_torch_can_be_registered() -> None:
    class Local(Numbers):
        pass

    generator = torch.Generator().manual_seed(3)
    data_loader = DataLoader(
        Local(lambda x: x + 1),
        sampler=RandomSampler(Local(), generator=generator),
        collate_fn=lambda items: torch.tensor(items) + 1,
        generator=generator,
    )
    assert taas.register(data_loader) == "data_loader"


def test_classes_of_a_notebook_can_be_registered() -> None:
    source = """
import taas
from torch.utils.data import DataLoader, Dataset
class Cell(Dataset):
    def __init__(self): self.scale = lambda x: 2 * x
    def __len__(self): return 4
    def __getitem__(self, i): return self.scale(i)
data_loader = DataLoader(Cell(), batch_size=2)
taas.register(data_loader)
"""
    exec(compile(source, "<cell>", "exec"), {"__name__": "__main__"})
    assert list(registered()) == ["data_loader"]


def test_an_open_file_is_refused_with_the_path_of_the_attribute(tmp_path: Any) -> None:
    class Transform:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

    (tmp_path / "words.txt").write_text("a")
    with (tmp_path / "words.txt").open() as handle:
        data_loader = DataLoader(Numbers(Transform(handle)))
        with pytest.raises(ValueError, match="data_loader cannot be serialized") as caught:
            taas.register(data_loader)
    message = str(caught.value)
    assert "data_loader.dataset.transform.handle is a _io.TextIOWrapper" in message
    assert "Open it where it is used" in message
    assert registered() == {}


def test_a_lock_deep_inside_is_refused_with_its_path() -> None:
    data_loader = DataLoader(Numbers({"steps": [1, {"guard": threading.Lock()}]}))
    with pytest.raises(
        RegisterError, match=r"data_loader.dataset.transform\['steps'\]\[1\]\['guard'\] is a _thread.lock"
    ):
        taas.register(data_loader)


def test_registering_patches_nothing_and_leaves_other_loaders_alone() -> None:
    before = {name: getattr(DataLoader, name) for name in dir(DataLoader)}
    data_loader = DataLoader(Numbers(), batch_size=5)
    other = DataLoader(Numbers(), batch_size=5)
    attributes = dict(vars(data_loader))
    taas.register(data_loader)
    assert {name: getattr(DataLoader, name) for name in dir(DataLoader)} == before
    assert vars(data_loader) == attributes
    assert type(data_loader) is DataLoader
    assert [batch.tolist() for batch in other] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [batch.tolist() for batch in data_loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_registering_draws_no_random_number() -> None:
    data_loader = DataLoader(Numbers(), shuffle=True)
    state = torch.get_rng_state()
    taas.register(data_loader)
    assert torch.equal(torch.get_rng_state(), state)


def test_unregistering_takes_object_or_name_and_has_two_names() -> None:
    data_loader = DataLoader(Numbers())
    taas.register(data_loader)
    taas.unregister(data_loader)
    taas.register(data_loader)
    taas.unregistered("data_loader")
    assert registered() == {}


def test_unregistering_an_unknown_loader_is_refused() -> None:
    data_loader = DataLoader(Numbers())
    with pytest.raises(ValueError, match="Dataloader data_loader is not registered; registered: none"):
        taas.unregister(data_loader)
    with pytest.raises(ValueError, match=r"Dataloader \(DataLoader\) is not registered"):
        taas.unregister(DataLoader(Numbers()))
    with pytest.raises(ValueError, match="Dataloader nothing is not registered"):
        taas.unregister("nothing")


def test_what_is_registered_is_given_as_a_copy() -> None:
    data_loader = DataLoader(Numbers())
    taas.register(data_loader)
    registered().clear()
    assert list(registered()) == ["data_loader"]
