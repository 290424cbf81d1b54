"""Whether an object can be pickled for another machine, how large that is, and else which attribute is in the way."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any

from taas.errors import RegisterError
from taas.made_with import marked, versions_here

_MAX_DEPTH = 24


class _Counter(io.RawIOBase):
    """A file that keeps nothing but the number of bytes written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.num_bytes += size
        return size


def measure_pickle(value: Any, *, name: str) -> int:
    """Return how many bytes the object's payload has (lambdas and a notebook's classes included).

    Raises:
        RegisterError: "NAME cannot be serialized: ..." with the path of the part that cannot, its type, and what to do.
    """
    counter = _Counter()
    error = _dump(value, counter)
    if error is not None:
        raise _not_serialized(name, value, error)
    return counter.num_bytes + len(marked(b"", versions_here()))


def _not_serialized(name: str, value: Any, error: Exception) -> RegisterError:
    path, culprit, reason = _culprit(name, value, error)
    kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}".removeprefix("builtins.")
    message = f"{name} cannot be serialized: {path} is a {kind} ({reason}). {_way_out(path, culprit, error)}"
    return RegisterError(message, loader=name, path=path, type=kind)


def pickled(value: Any, *, name: str) -> bytes:
    """Return the object's payload: its pickle, and behind it the versions; raises what ``measure_pickle`` raises."""
    file = io.BytesIO()
    outcome = _dump(value, file)
    if outcome is not None:
        raise _not_serialized(name, value, outcome)
    return marked(file.getvalue(), versions_here())


@cache
def _pickler() -> Any:
    """Return cloudpickle's Pickler, but for open files: it would pickle what a file holds in its place, silently."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, io.IOBase) and not _may_travel(value):
                raise pickle.PicklingError(f"cannot pickle an open file: {getattr(value, 'name', '') or 'unnamed'}")
            return super().reducer_override(value)

    return Pickler


def _may_travel(file: io.IOBase) -> bool:
    return isinstance(file, io.BytesIO | io.StringIO) or file in (sys.stdout, sys.stderr)


def _dump(value: Any, file: Any) -> Exception | None:
    """Pickle into a file; return the error that it raised, or None."""
    try:
        _pickler()(file).dump(value)
    except Exception as error:  # noqa: BLE001 - __getstate__ and __reduce__ of the user's objects may raise anything
        is_deep = isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError)
        return RecursionError("nested too deeply to be pickled") if is_deep else error
    return None


def _culprit(path: str, value: Any, error: Exception) -> tuple[str, Any, str]:
    """Follow the parts that cannot be pickled down to the innermost one; return its path, itself, and the reason."""
    seen = {id(value)}
    if isinstance(error, RecursionError):
        return path, value, str(error)
    for _ in range(_MAX_DEPTH):
        for part, child in _parts(value):
            if id(child) in seen or (found := _dump(child, _Counter())) is None:
                continue
            seen.add(id(child))
            path, value, error = path + part, child, found
            break
        else:
            break
    return path, value, _one_line(error)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, each with how one writes its path."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in list(value.items()))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{number}]", item) for number, item in enumerate(value))
    elif isinstance(value, partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(value)
    yield from ((f".{name}", item) for name, item in _attributes(value).items())


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function takes along: those around it, its defaults, and the globals it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"({name})", cell.cell_contents
        except ValueError:  # not bound yet
            continue
    yield from ((f"(default {number})", item) for number, item in enumerate(function.__defaults__ or ()))
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f"({name})", function.__globals__[name]


def _attributes(value: Any) -> dict[str, Any]:
    if isinstance(value, type | types.ModuleType | types.FunctionType):
        return {}
    found = dict(getattr(value, "__dict__", None) or {})
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found.setdefault(name, getattr(value, name))
    return found


def _one_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _way_out(path: str, culprit: Any, error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "Keep it flat, e.g. as a list or an array"
    if "._iterator" in path:
        return "Register the loader before it is iterated, or make it anew (persistent workers cannot travel)"
    if isinstance(culprit, types.GeneratorType):
        return "Make it in __iter__ of the dataset instead of keeping it"
    return (
        "Open it where it is used (in __getitem__ or __iter__ on first use, or worker_init_fn), or leave it out in "
        "__getstate__ and keep what is needed to open it again, such as its path"
    )
