"""The loaders that the user registered, by name. Registering looks at a loader and changes nothing about it.

A loader's identity is its name: the variable that holds it where ``register`` is called.
"""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from taas.errors import RegisterError
from taas.pickling import measure_pickle

# IPython binds the last results to _, __, _12 and the last inputs to _i, _i12.
_HISTORY = re.compile(r"_+\d*|_i+\d*|_+ih|_+oh|_+dh|Out|In")


@dataclass(frozen=True)
class Registration:
    """A registered loader: the object itself, its own number of units if it has one, and its pickled size."""

    name: str
    loader: Any
    units: int | None
    num_bytes: int


_registrations: dict[str, Registration] = {}


def register(loader: Any, units: int | None = None, name: str | None = None) -> str:
    """Register a DataLoader under the name of the variable that holds it, and return that name.

    Args:
        loader: A torch DataLoader (or of a class derived from it) that can be pickled.
        units: How many elements to extract from it, where this differs from the request's ``units``.
        name: The name, where no or more than one variable holds the loader.

    Raises:
        RegisterError: it is not iterable, no DataLoader, already registered, cannot be serialized (the message names
            the attribute), is already split between ranks, or its name or ``units`` is not possible.
    """
    frame = _caller()
    if not _is_iterable(loader):
        label = name or " or ".join(_names_of(loader, frame)) or repr(loader)
        raise RegisterError(f"{label} is not iterable: got {_kind(loader)}; allowed: a torch DataLoader", loader=label)
    label = name if name is not None else _bound_name(loader, frame)
    for reason in _faults(label, loader, units):
        raise RegisterError(reason, loader=label)
    _registrations[label] = Registration(label, loader, units, measure_pickle(loader, name=label))
    return label


def unregister(loader: Any) -> None:
    """Take a loader out of the registry, given itself, its name, or what its variable holds now.

    Raises:
        RegisterError: it is not registered.
    """
    name = loader if isinstance(loader, str) else _registered_name(loader, _caller())
    if name not in _registrations:
        known = ", ".join(_registrations) or "none"
        shown = name or f"({type(loader).__name__})"
        raise RegisterError(f"Dataloader {shown} is not registered; registered: {known}", loader=shown)
    del _registrations[name]


unregistered = unregister
"""The same as ``unregister``."""


def registered() -> dict[str, Registration]:
    """Return what is registered, by name, in the order of registering (a copy)."""
    return dict(_registrations)


def _caller() -> FrameType:
    """Return the frame of the code that called the public function that calls this."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame.f_back if frame else None
    if frame is None:
        raise RegisterError(
            "the caller's variables cannot be seen from here; give the name: register(loader, name=...)"
        )
    return frame


def _names_of(value: Any, frame: FrameType) -> list[str]:
    """Return the caller's variables that hold the object: its local ones, and only without any, the module's."""
    for namespace in (frame.f_locals, frame.f_globals):
        names = [name for name, held in namespace.items() if held is value and not _HISTORY.fullmatch(name)]
        if names:
            return sorted(names)
    return []


def _bound_name(loader: Any, frame: FrameType) -> str:
    names = _names_of(loader, frame)
    if len(names) == 1:
        return names[0]
    kind = type(loader).__name__
    if not names:
        raise RegisterError(
            f"no variable holds this {kind}, so it has no name; assign it first, or give one: register(..., name='...')"
        )
    listed = ", ".join(names)
    raise RegisterError(
        f"{len(names)} variables hold this {kind}: {listed}; say which it is: register({names[0]}, name='{names[0]}')"
    )


def _registered_name(loader: Any, frame: FrameType) -> str:
    for name, registration in _registrations.items():
        if registration.loader is loader:
            return name
    names = _names_of(loader, frame)
    return next((name for name in names if name in _registrations), names[0] if names else "")


def _faults(name: str, loader: Any, units: int | None) -> Iterator[str]:
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        yield f"got the name {name!r}; allowed: a Python variable's name in ASCII letters, digits and '_'"
        return
    yield from _already_registered(name, loader)
    if not _is_dataloader(loader):
        yield f"{name} is not a torch DataLoader: got {_kind(loader)}. Wrap it: DataLoader(dataset, batch_size=...)"
    if units is not None and (type(units) is not int or units < 1):
        yield f"units of {name}: got {units!r}; allowed: an integer of at least 1, or None for the request's number"
    yield from _already_split(name, loader)


def _already_registered(name: str, loader: Any) -> Iterator[str]:
    for other in _registrations.values():
        if other.loader is loader:
            yield f"{name} is already registered" + (f" as {other.name}" if other.name != name else "")
        elif other.name == name:
            yield (
                f"{name} is already registered, with another object than {name} holds now; "
                f"take that out first: taas.unregister('{name}')"
            )


def _already_split(name: str, loader: Any) -> Iterator[str]:
    """Refuse a loader that gives one rank's part only: its stream is split between ranks by TaaS."""
    for path, sampler in _samplers(loader):
        replicas = getattr(sampler, "num_replicas", None)
        if type(replicas) is int and replicas > 1:
            yield (
                f"{name} is already split between ranks: {path} is a {_kind(sampler)} with num_replicas={replicas}, "
                f"so it yields 1/{replicas} of the data. TaaS deals the elements out itself: use shuffle=True or a "
                "plain sampler"
            )
            return


def _samplers(loader: Any) -> Iterator[tuple[str, Any]]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    yield "sampler", getattr(loader, "sampler", None)
    yield "batch_sampler", batch_sampler
    yield "batch_sampler.sampler", getattr(batch_sampler, "sampler", None)


def _is_iterable(value: Any) -> bool:
    try:
        return hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__")
    except Exception:  # noqa: BLE001 - a metaclass of the user's may raise anything
        return False


def _is_dataloader(value: Any) -> bool:
    # By name, so that a notebook that never imported torch does not have to.
    return any(
        kind.__name__ == "DataLoader" and kind.__module__.startswith("torch.utils.data") for kind in type(value).__mro__
    )


def _kind(value: Any) -> str:
    return type(value).__name__
