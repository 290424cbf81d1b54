"""What the programs on c1.4 share: their input, the project's folder, and the outcome that every end leaves."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from taas.errors import LoaderError, PrepareError, TaasError
from taas_tasks.prep.elements import describe, users_traceback
from taas_tasks.program_values import ProgramInput
from taas_tasks.store import open_store
from taas_tasks.store.base import ObjectStore

_log = logging.getLogger(__name__)


Input = TypeVar("Input", bound=ProgramInput)
Run = Callable[[Input, ObjectStore, Path], dict[str, Any]]


def run_program(argv: list[str], kind: type[Input], run: Run[Input]) -> int:
    """Run a program on the input file that ``argv`` names; return the exit code.

    Leaves ``outcome.json`` beside the input on every way to end but a kill, written whole or not at all.
    ``run`` is given the input, the store, and a folder of its own that is removed at the end.
    """
    if len(argv) != 1:
        sys.stderr.write("usage: python -m MODULE INPUT.json\n")
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    path = Path(argv[0]).resolve()
    folder = path.parent / "project"
    try:
        outcome = _outcome(path, kind, run, folder)
    finally:
        os.chdir(path.parent)
        shutil.rmtree(folder, ignore_errors=True)
    _write_whole(path.parent / "outcome.json", json.dumps(outcome))
    return 0


def _outcome(path: Path, kind: type[Input], run: Run[Input], folder: Path) -> dict[str, Any]:
    try:
        given = kind.read(path)
        folder.mkdir(exist_ok=True)
        return {"ok": True, "result": run(given, open_store(given.store), folder)}
    except TaasError as error:
        _log.error("%s\n%s", error.message, error.fields.get("traceback", ""))
        return {"ok": False, "error": error.to_dict()}
    except SystemExit as error:
        ended = LoaderError(f"the loader's code called exit({error.code!r})", traceback=users_traceback(error))
        return {"ok": False, "error": ended.to_dict()}
    except Exception as error:  # noqa: BLE001 (every way to end leaves an outcome)
        _log.exception("unexpected")
        unexpected = PrepareError(f"unexpected: {describe(error)}", traceback=users_traceback(error))
        return {"ok": False, "error": unexpected.to_dict()}


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def leave(code: int) -> None:
    """End this process although threads or processes of the user's may live on; the outcome is written."""
    for child in multiprocessing.active_children():
        child.terminate()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
