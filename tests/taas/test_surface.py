"""The public surface of ``taas``, and what importing it costs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import taas
from taas import errors

FUNCTIONS = ["attach", "checkpoint", "loader", "log", "register", "runs", "submit", "unregister", "unregistered"]
HEAVY = ["airflow", "taas_tasks", "torch", "numpy", "pydantic", "httpx", "cloudpickle", "packaging"]


def error_names() -> list[str]:
    return [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]


def test_the_public_names_are_these_and_the_errors() -> None:
    assert sorted(taas.__all__) == sorted(FUNCTIONS + error_names())
    assert dir(taas) == sorted(taas.__all__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_is_there_and_documented(name: str) -> None:
    function = getattr(taas, name)
    assert callable(function)
    assert function.__doc__


def test_the_two_names_of_unregister_are_one_function() -> None:
    assert taas.unregister is taas.unregistered


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'taas' has no attribute 'regster'"):
        taas.regster  # noqa: B018


def imported_by(code: str) -> list[str]:
    script = f"import sys, json\n{code}\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import taas", []),
        ("import taas.cli", []),
        ("import taas; taas.register; taas.loader; taas.log; taas.checkpoint", []),
        ("import taas.request", ["pydantic", "packaging"]),
        ("import taas.run", ["pydantic", "packaging", "httpx"]),
    ],
)
def test_importing_brings_only_what_is_needed(code: str, allowed: list[str]) -> None:
    assert set(imported_by(code)) <= set(allowed)


def test_importing_is_fast() -> None:
    script = "import time; t = time.process_time(); import taas, taas.cli; print(time.process_time() - t)"
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True) for _ in range(3)
    ]
    assert min(float(done.stdout) for done in runs) < 0.3
