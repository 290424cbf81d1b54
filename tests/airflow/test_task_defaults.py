from __future__ import annotations

from taas.errors import LoaderError, StoreRefused
from taas_tasks.airflow.task_defaults import last_words


def test_a_users_traceback_is_told_with_the_failure() -> None:
    error = LoaderError(
        "loader 'data' raised KeyError: 3 at element 7", traceback='  File "data.py", line 41\nKeyError: 3\n'
    )
    assert (
        last_words(error) == "loader 'data' raised KeyError: 3 at element 7\n  File \"data.py\", line 41\nKeyError: 3"
    )


def test_a_failure_without_a_traceback_is_told_by_its_message() -> None:
    assert last_words(StoreRefused("no access", key="k")) == "no access"
    assert last_words(ValueError("odd")) == "odd"
    assert last_words(None) == ""
