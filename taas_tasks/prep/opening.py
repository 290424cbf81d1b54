"""Opening a user's DataLoader: from a file of the project, or from an uploaded payload."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Protocol

import cloudpickle
from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from taas.errors import LoaderError, ObjectCorrupt
from taas.made_with import differences, refusal, versions_here, versions_of
from taas_tasks.prep.elements import describe, users_traceback
from taas_tasks.store.base import ObjectStore


class LoaderSource(Protocol):
    """Where a loader comes from: a ``LoaderRef`` of the request or a ``LoaderPlan``."""

    @property
    def source(self) -> str | None:
        """``"data.py:make_loader"``."""

    @property
    def payload(self) -> str | None:
        """The key of an uploaded payload."""

    @property
    def sha256(self) -> str | None:
        """The payload's sha256."""


def open_loader(
    ref: LoaderSource, project_folder: Path, store: ObjectStore, *, is_to_be_prepared: bool = True
) -> DataLoader[Any]:
    """Return the user's DataLoader, checked to be one that can be prepared.

    A loader that ranks use as it is (``is_to_be_prepared`` False) may be split among them or have no order.

    The project's folder becomes the current folder of this process and the first entry of ``sys.path``, and both stay:
    the dataset reads its files and imports its modules later. A payload is verified before it is opened.

    Raises:
        LoaderError: The user's code raised, or gives no DataLoader, or one that cannot be prepared.
        ObjectCorrupt: The payload is not the one that the request names.
    """
    enter_project(project_folder)
    if ref.source is not None:
        found = _from_source(ref.source, project_folder)
        return check_loader(found, ref.source, is_to_be_prepared=is_to_be_prepared)
    if ref.payload is None or ref.sha256 is None:
        raise LoaderError(
            "a loader needs a source like 'data.py:make_loader', or a payload and its sha256; got neither"
        )
    found = open_payload(store.get(ref.payload), ref.payload, ref.sha256)
    return check_loader(found, "the uploaded loader", is_to_be_prepared=is_to_be_prepared)


def enter_project(folder: Path) -> None:
    """Make the project's folder the current one and the first that modules are imported from."""
    os.chdir(folder)
    path = str(folder.resolve())
    sys.path[:] = [path] + [entry for entry in sys.path if entry != path]
    importlib.invalidate_caches()


def check_loader(found: Any, where: str, *, is_to_be_prepared: bool = True) -> DataLoader[Any]:
    """Return ``found`` if it is a DataLoader, and one whose stream can be prepared where it is to be.

    Raises:
        LoaderError: It is something else, is already split among ranks, or has no order of its own.
    """
    if not isinstance(found, DataLoader):
        raise LoaderError(
            f"{where} gives a {type(found).__name__}; allowed: a torch.utils.data.DataLoader, or a function without"
            " arguments that returns one"
        )
    if not is_to_be_prepared:
        return found
    _refuse_split(found, where)
    if isinstance(found.dataset, IterableDataset) and not found.in_order:
        raise LoaderError(
            f"{where}: in_order=False gives an iterable loader another order each time, so its elements have no ids;"
            " leave in_order at True"
        )
    return found


def _refuse_split(loader: DataLoader[Any], where: str) -> None:
    batch_sampler = loader.batch_sampler
    for sampler in (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise LoaderError(
                f"{where} is already split among {sampler.num_replicas} replicas by a DistributedSampler, so it yields"
                " only one replica's part; give the whole loader (no DistributedSampler): ranks get their parts here",
                num_replicas=sampler.num_replicas,
            )


# --- a file of the project ------------------------------------------------------------------------------------------


def _from_source(source: str, folder: Path) -> Any:
    path, _, name = source.partition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise LoaderError(
            f"source is {source!r}; allowed: a Python file of the project and a name in it, 'data.py:name'"
        )
    if not (folder / path).is_file():
        known = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.py"))[:20]
        raise LoaderError(f"the project has no file {path!r} (source {source!r}); its Python files: {', '.join(known)}")
    module = _import(path, folder, source)
    try:
        found = getattr(module, name)
    except AttributeError:
        names = sorted(n for n, value in vars(module).items() if not n.startswith("_") and _may_be_loader(value))
        raise LoaderError(f"{path} has no name {name!r} (source {source!r}); it has: {', '.join(names)}") from None
    return _call(found, source) if callable(found) and not isinstance(found, DataLoader) else found


def _may_be_loader(value: Any) -> bool:
    return isinstance(value, DataLoader) or (callable(value) and not isinstance(value, type))


def _import(path: str, folder: Path, source: str) -> ModuleType:
    name = path.removesuffix(".py").replace("/", ".")
    loaded = sys.modules.get(name)
    if loaded is not None and not _is_in(loaded, folder):
        raise LoaderError(
            f"the file {path!r} (source {source!r}) has the name of the installed module {name!r}; rename the file"
        )
    try:
        return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 (user code may raise anything)
        _raise(f"importing {path} failed", error)


def _is_in(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(folder.resolve())


def _call(function: Any, source: str) -> Any:
    try:
        return function()
    except Exception as error:  # noqa: BLE001 (user code may raise anything)
        _raise(f"calling {source} failed", error)


# --- a payload ------------------------------------------------------------------------------------------------------


def open_payload(data: bytes, key: str, sha256: str) -> Any:
    """Return what a payload holds, unpickled only after its sha256 and its versions have been compared.

    Raises:
        LoaderError: It was made with versions that do not fit these, or opening it raised.
        ObjectCorrupt: It is not the one that the request names.
    """
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ObjectCorrupt(
            f"the payload {key} has sha256 {found}, the request names {sha256}; it was not opened. Upload the loader"
            " again, and find out who wrote this object",
            key=key,
        )
    made, here = versions_of(data), versions_here()
    if why := refusal(made, here):
        raise LoaderError(f"the uploaded loader cannot be opened here: {why}", made_with=made, versions=here)
    try:
        opened = cloudpickle.loads(data)
        _show_classes_in_main()
        return opened
    except Exception as error:  # noqa: BLE001 (unpickling runs user code)
        hint = (
            "the uploaded loader cannot be opened here (is a package missing, or of another version than where it was"
        )
        others = "; ".join(differences(made, here)) or f"this is Python {here['python']}"
        _raise(f"{hint} made? {others})", error)


def _show_classes_in_main() -> None:
    """Let classes that came with a payload from a notebook be found in ``__main__``, where pickle looks for them.

    Loader workers send elements of such classes (dataclasses, namedtuples) by reference.
    """
    main = sys.modules["__main__"]
    for found in list(_DYNAMIC_CLASS_TRACKER_BY_ID.values()):
        if found.__module__ == "__main__" and not hasattr(main, found.__qualname__):
            setattr(main, found.__qualname__, found)


def _raise(what: str, error: Exception) -> NoReturn:
    tail = users_traceback(error)
    raise LoaderError(f"{what}: {describe(error)}", traceback=tail) from None
