"""The table of data cases names tests: they must exist, and no case may be without one."""

from __future__ import annotations

import re

import pytest

from tests.support.cases import NAMED, missing_tests, name_of, rows_of

ROWS = rows_of("data-cases.md")


def test_every_case_has_its_row() -> None:
    cases = [name_of(row) for row in ROWS]
    assert [case for case in cases if re.fullmatch(r"D\d+", case)] == [f"D{number}" for number in range(1, 22)]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_the_tests_that_a_row_names_exist(row: str) -> None:
    assert NAMED.findall(row), "no test is named"
    assert missing_tests(row) == []
