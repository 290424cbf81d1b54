"""The table of data cases names tests: they must exist, and no case may be without one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = (ROOT / "docs" / "data-cases.md").read_text()
ROWS = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.startswith(("| case", "| error"))]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_case_has_its_row() -> None:
    cases = [row.split("|")[1].strip() for row in ROWS]
    assert [case for case in cases if re.fullmatch(r"D\d+", case)] == [f"D{number}" for number in range(1, 22)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_the_tests_that_a_row_names_exist(row: str) -> None:
    named = NAMED.findall(row)
    assert named, "no test is named"
    assert [f"{path}::{name}" for path, name in named if name not in functions_of(path)] == []
