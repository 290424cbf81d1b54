"""What the tables of cases in ``docs`` name: rows, and the tests in them, which must exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows_of(document: str) -> list[str]:
    """Return the rows of a document's tables, without their heads."""
    lines = (ROOT / "docs" / document).read_text().splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith(("| case", "| error"))]


def name_of(row: str) -> str:
    """Return what a row is about: its first cell."""
    return row.split("|")[1].strip()


def missing_tests(row: str) -> list[str]:
    """Return the tests that a row names and that do not exist."""
    return [f"{path}::{name}" for path, name in NAMED.findall(row) if name not in _functions_of(path)]


@cache
def _functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
