"""Runs a script, or a captured cell, as ``__main__`` the way ``python script.py`` or a notebook would."""

from __future__ import annotations

import hashlib
import linecache
import os
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from taas.errors import LaunchError
from taas.made_with import refusal, versions_here, versions_of

CELL_NAME = "<taas cell>"
"""The file name that tracebacks show for a captured cell's lines."""


class _CellModule(types.ModuleType):
    """``__main__`` of a cell whose names live in the globals that its pickled functions share."""

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__("__main__")
        self.__dict__["_names"] = names

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_names"][name]
        except KeyError:
            raise AttributeError(f"module '__main__' has no attribute {name!r}") from None


def add_python_path() -> None:
    """Give effect to a PYTHONPATH of the request: multiprocessing has replaced ``sys.path`` by the node agent's."""
    wanted = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[0:0] = [entry for entry in wanted if entry not in sys.path]


def run_script(project: Path, script: str, args: list[str]) -> None:
    """Run ``script`` of the project with ``args``; what it raises passes through.

    The module stays in ``sys.modules``: freeing a script's globals would run destructors that can hang
    (``ProcessGroupGloo``), and loader workers started by spawn look for it.
    """
    path = (project / script).resolve()
    if not path.is_file():
        raise LaunchError(f"the project has no file {script!r}; give a path relative to the project's root")
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    module.__dict__.update(__builtins__=__builtins__, __cached__=None, __spec__=None)
    sys.modules["__main__"] = module
    sys.argv = [script, *args]
    sys.path.insert(0, str(path.parent))
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)


def open_cell(payload: Path, sha256: str) -> dict[str, Any]:
    """Return a captured cell's payload, unpickled only after its sha256 has been verified.

    Raises:
        LaunchError: The bytes are not those that the request names, were made with versions that do not fit these, or
            have an unknown format.
    """
    data = payload.read_bytes()
    got = hashlib.sha256(data).hexdigest()
    if got != sha256:
        raise LaunchError(f"the cell's payload has sha256 {got}, the request says {sha256}; submit the cell again")
    if why := refusal(versions_of(data), versions_here()):
        raise LaunchError(f"the cell cannot be opened here: {why}")
    import cloudpickle

    cell: dict[str, Any] = cloudpickle.loads(data)
    if not isinstance(cell, dict) or cell.get("format") != 1:
        raise LaunchError("the cell's payload has an unknown format; known: 1. Use the same version of taas everywhere")
    return cell


def run_cell(project: Path, cell: Mapping[str, Any], *, loader: Callable[[str], Any]) -> None:
    """Run a cell's source as ``__main__`` with its namespace; each registered name gives the delivered loader."""
    names = _shared_globals(cell["namespace"].values())
    main = names[0] if names else {}
    main.update(cell["namespace"])
    delivered = {name: loader(name) for name in cell["loaders"]}
    for other in [main, *names]:
        other.update(delivered)
    main.update(__name__="__main__", __builtins__=__builtins__, __doc__=None)
    sys.modules["__main__"] = _CellModule(main)
    sys.argv = [""]
    sys.path.insert(0, str(project))
    source = cell["source"]
    linecache.cache[CELL_NAME] = (len(source), None, source.splitlines(keepends=True), CELL_NAME)
    exec(compile(source, CELL_NAME, "exec", dont_inherit=True), main)


def _shared_globals(values: Any) -> list[dict[str, Any]]:
    """Return the globals of the notebook's own functions, which cloudpickle has given a dictionary of their own.

    Running the cell in that dictionary lets functions of earlier cells see what the cell defines, as in the notebook.
    """
    found: dict[int, dict[str, Any]] = {}
    for function in _functions(values):
        if function.__globals__.get("__name__") == "__main__":
            found.setdefault(id(function.__globals__), function.__globals__)
    return list(found.values())


def _functions(values: Any) -> list[types.FunctionType]:
    found: list[types.FunctionType] = []
    for value in values:
        members = vars(value).values() if isinstance(value, type) else [value]
        found += [member for member in members if isinstance(member, types.FunctionType)]
    return found
