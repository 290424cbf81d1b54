"""The table of launch cases names tests: they must exist, and a case without one says what it waits for."""

from __future__ import annotations

import pytest

from tests.support.cases import NAMED, missing_tests, name_of, rows_of

ROWS = rows_of("launch-cases.md")


def test_every_case_has_its_row() -> None:
    assert [name_of(row) for row in ROWS] == [f"L{number}" for number in range(1, 30)]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_the_tests_that_a_row_names_exist(row: str) -> None:
    assert NAMED.findall(row) or "needs a GPU: written, unproven" in row, "no test is named"
    assert missing_tests(row) == []
