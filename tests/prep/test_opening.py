from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from taas.errors import LoaderError, ObjectCorrupt
from taas.made_with import marked
from taas.request import LoaderRef
from taas_tasks.prep.opening import check_loader, open_loader
from taas_tasks.store.memory import MemoryStore
from tests.prep import cases

GOOD = """
from pathlib import Path
import numbers_of_mine
from torch.utils.data import DataLoader

def make_loader():
    return DataLoader(numbers_of_mine.NUMBERS + [int(Path("extra.txt").read_text())])

loader = DataLoader([1, 2])
not_one = 5

def gives_none():
    pass

def breaks():
    return broken_inside()

def broken_inside():
    raise RuntimeError("no such bucket")
"""


@pytest.fixture
def files(project: Path) -> Path:
    (project / "loading").mkdir()
    (project / "data_of_mine.py").write_text(GOOD)
    (project / "loading" / "deep_one.py").write_text(GOOD)
    (project / "numbers_of_mine.py").write_text("NUMBERS = [4, 5]\n")
    (project / "extra.txt").write_text("6")
    (project / "wrong_syntax.py").write_text("def f(:\n")
    (project / "json.py").write_text("loader = None\n")
    return project


def opened(folder: Path, source: str) -> DataLoader[Any]:
    return open_loader(LoaderRef(source=source), folder, MemoryStore())


@pytest.mark.parametrize("source", ["data_of_mine.py:make_loader", "loading/deep_one.py:make_loader"])
def test_a_function_of_the_project_gives_a_loader_with_its_modules_and_files(files: Path, source: str) -> None:
    assert [int(element) for element in opened(files, source)] == [4, 5, 6]


def test_a_loader_of_the_project_is_taken_as_it_is(files: Path) -> None:
    assert [int(element) for element in opened(files, "data_of_mine.py:loader")] == [1, 2]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("data_of_mine.py:not_one", "gives a int; allowed: a torch.utils.data.DataLoader, or a function"),
        ("data_of_mine.py:gives_none", "gives a NoneType"),
        ("data_of_mine.py:make_loadr", "has no name 'make_loadr'.*it has: .*loader, make_loader"),
        ("dataa.py:make_loader", "the project has no file 'dataa.py'.*data_of_mine.py, json.py, loading/deep_one.py"),
        ("data_of_mine:make_loader", "allowed: a Python file of the project and a name in it"),
        ("data_of_mine.py:1", "allowed: a Python file of the project"),
        ("data_of_mine.py:breaks", "calling data_of_mine.py:breaks failed: RuntimeError: no such bucket"),
        ("wrong_syntax.py:f", "importing wrong_syntax.py failed: .*SyntaxError"),
        ("json.py:loader", "has the name of the installed module 'json'; rename the file"),
    ],
)
def test_a_source_that_gives_no_loader_is_refused_with_the_reason(files: Path, source: str, message: str) -> None:
    with pytest.raises(LoaderError, match="(?s)" + message):
        opened(files, source)


def test_the_users_traceback_begins_in_the_users_file(files: Path) -> None:
    with pytest.raises(LoaderError) as caught:
        opened(files, "data_of_mine.py:breaks")
    tail = caught.value.fields["traceback"]
    assert "broken_inside" in tail
    assert "opening.py" not in tail


# --- payloads -------------------------------------------------------------------------------------------------------


def put_payload(store: MemoryStore, value: Any) -> LoaderRef:
    data = cloudpickle.dumps(value)
    store.put("projects/p/payloads/x", data)
    return LoaderRef(payload="projects/p/payloads/x", sha256=hashlib.sha256(data).hexdigest())


def test_a_payload_is_opened_with_its_lambdas(project: Path, memory_store: MemoryStore) -> None:
    ref = put_payload(memory_store, DataLoader([1, 2, 3], batch_size=3, collate_fn=lambda rows: sum(rows) * 2))
    assert list(open_loader(ref, project, memory_store)) == [12]


def test_a_payload_that_is_not_the_one_named_is_not_opened(project: Path, memory_store: MemoryStore) -> None:
    ref = put_payload(memory_store, DataLoader([1]))
    memory_store.put(str(ref.payload), cloudpickle.dumps(_Trap()))
    with pytest.raises(ObjectCorrupt, match="it was not opened"):
        open_loader(ref, project, memory_store)
    assert not (project / "trapped").exists()


class _Trap:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("trapped"),)


def test_a_payload_of_another_python_is_not_opened_and_says_both_versions(
    project: Path, memory_store: MemoryStore
) -> None:
    data = marked(cloudpickle.dumps(_Trap()), {"python": "3.99.1"})
    memory_store.put("projects/p/payloads/x", data)
    ref = LoaderRef(payload="projects/p/payloads/x", sha256=hashlib.sha256(data).hexdigest())
    with pytest.raises(LoaderError, match=r"python 3\.99\.1 where it was made, 3\.\d+\.\d+ here"):
        open_loader(ref, project, memory_store)


def test_a_payload_that_cannot_be_opened_says_what_is_missing(project: Path, memory_store: MemoryStore) -> None:
    (project / "only_there.py").write_text("def collate(rows): return rows\n")
    sys.path.insert(0, str(project))
    import only_there  # type: ignore[import-not-found]

    ref = put_payload(memory_store, DataLoader([1], collate_fn=only_there.collate))
    sys.path.remove(str(project))
    del sys.modules["only_there"]
    (project / "only_there.py").unlink()
    with pytest.raises(LoaderError, match="ModuleNotFoundError: No module named 'only_there'"):
        open_loader(ref, project, memory_store)


def test_elements_of_a_notebooks_class_pass_between_processes(project: Path, memory_store: MemoryStore) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Sample:\n"
        "    x: int\n"
        "def collate(rows):\n"
        "    return Sample(sum(rows))\n",
        namespace,
    )
    ref = put_payload(memory_store, DataLoader([1, 2], batch_size=2, num_workers=1, collate_fn=namespace["collate"]))
    del namespace
    (element,) = open_loader(ref, project, memory_store)
    assert element.x == 3


# --- loaders that cannot be prepared --------------------------------------------------------------------------------


def test_a_loader_split_among_ranks_is_refused_with_the_reason() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(cases.Squares(8), num_replicas=8, rank=0)
    with pytest.raises(LoaderError, match="already split among 8 replicas by a DistributedSampler"):
        check_loader(DataLoader(cases.Squares(8), sampler=sampler), "x")
    loader = DataLoader(cases.Squares(8), sampler=sampler)
    assert check_loader(loader, "x", is_to_be_prepared=False) is loader


def test_a_distributed_sampler_of_one_replica_is_fine() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(cases.Squares(8), num_replicas=1, rank=0)
    loader = DataLoader(cases.Squares(8), sampler=sampler)
    assert check_loader(loader, "x") is loader


def test_an_iterable_loader_without_order_is_refused() -> None:
    with pytest.raises(LoaderError, match="in_order=False gives an iterable loader another order each time"):
        check_loader(DataLoader(cases.Numbers(4), num_workers=2, in_order=False), "x")


def test_a_reference_to_nothing_is_refused(project: Path, memory_store: MemoryStore) -> None:
    with pytest.raises(LoaderError, match="needs a source like"):
        open_loader(LoaderRef(), project, memory_store)
