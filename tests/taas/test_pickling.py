from __future__ import annotations

import functools
import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from taas.errors import RegisterError
from taas.pickling import measure_pickle, pickled

LOCK = threading.Lock()


class Slotted:
    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held

    def method(self) -> None: ...


class Refuses:
    def __reduce__(self) -> Any:
        raise OSError("no\nway")


class Clean(Holder):
    def __getstate__(self) -> dict[str, Any]:
        return {}


def closure() -> Callable[[], Any]:
    lock = threading.Lock()
    return lambda: lock


def with_default(lock: Any = LOCK) -> Any:
    return lock


with_default.__module__ = "__main__"  # pickled by value, as a notebook's functions are


def numbers() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Holder(threading.Lock()), "x.held"),
        (Holder([0, {"a": (threading.Lock(),)}]), "x.held[1]['a'][0]"),
        (Slotted(), "x.lock"),
        (Holder(closure()), "x.held(lock)"),
        (Holder(with_default), "x.held(default 0)"),
        (Holder(functools.partial(print, threading.Lock())), "x.held.args[0]"),
        (Holder(Holder(threading.Lock()).method), "x.held.__self__.held"),
        (Holder(numbers()), "x.held"),
        (Holder(Refuses()), "x.held"),
    ],
)
def test_the_innermost_part_that_cannot_be_pickled_is_named(value: Any, path: str) -> None:
    with pytest.raises(RegisterError, match="x cannot be serialized") as caught:
        measure_pickle(value, name="x")
    assert caught.value.fields["path"] == path
    assert "\n" not in caught.value.message
    with pytest.raises(RegisterError) as again:
        pickled(value, name="x")
    assert again.value.message == caught.value.message


def test_an_object_that_refers_to_itself_and_cannot_be_pickled_ends() -> None:
    value = Holder(threading.Lock())
    value.me = value  # type: ignore[attr-defined]
    with pytest.raises(RegisterError) as caught:
        measure_pickle(value, name="x")
    assert caught.value.fields["path"] == "x.held"


def test_too_deep_nesting_is_a_sentence() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RegisterError, match="nested too deeply"):
        measure_pickle(deep, name="x")
    while deep:
        deep = deep.pop()


def test_what_leaves_itself_out_of_its_state_is_fine() -> None:
    assert measure_pickle(Clean(threading.Lock()), name="x") > 0


def test_a_file_in_memory_is_fine() -> None:
    copy = pickle.loads(pickled([io.BytesIO(b"abc"), io.StringIO("d")], name="x"))
    assert (copy[0].getvalue(), copy[1].getvalue()) == (b"abc", "d")


def test_a_standard_stream_is_the_other_machines() -> None:
    script = (
        "import pickle, sys; from taas.pickling import pickled; "
        "sys.exit(0 if pickle.loads(pickled([sys.stderr], name='x'))[0] is sys.stderr else 1)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_an_open_file_is_not_replaced_by_its_content(tmp_path: Any) -> None:
    (tmp_path / "a").write_text("content")
    for mode in ("r", "rb", "w"):
        with (tmp_path / "a").open(mode) as handle, pytest.raises(RegisterError, match="cannot pickle an open file"):
            measure_pickle(Holder(handle), name="x")


def test_the_measured_size_is_that_of_the_pickle() -> None:
    value = [torch.arange(100_000), np.arange(50_000), lambda x: x, "text"]
    assert measure_pickle(value, name="x") == len(pickled(value, name="x"))


def test_a_lambda_comes_back_working() -> None:
    factor = 3
    assert pickle.loads(pickled(lambda x: factor * x, name="x"))(2) == 6


class Ten(Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


def test_a_loader_whose_persistent_workers_run_says_to_register_before() -> None:
    loader = DataLoader(Ten(), num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    try:
        next(iterator)
        with pytest.raises(RegisterError, match=r"x\._iterator.*Register the loader before it is iterated"):
            measure_pickle(loader, name="x")
    finally:
        iterator._shutdown_workers()
