from __future__ import annotations

from typing import Any

import pytest

from taas_tasks.compute.payload import Refused, check_spec, job_id, number

GOOD: dict[str, Any] = {"job_id": "job", "owner": "o", "argv": ["true"]}


def test_a_specification_is_filled_up():
    full = check_spec(GOOD)
    assert (full["env"], full["files"], full["cwd"], full["timeout_s"], full["lease_s"]) == ({}, {}, None, None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"owner": ""}, "owner must be a text"),
        ({"argv": []}, "argv must be a list"),
        ({"argv": "true"}, "argv must be a list"),
        ({"argv": [1]}, r"argv\[0\] must be a text, got int"),
        ({"argv": ["a\0b"]}, r"argv\[0\] has a NUL"),
        ({"argv": ["\ud800"]}, r"argv\[0\] is no valid unicode"),
        ({"env": []}, "env must map"),
        ({"env": {"A=B": "x"}}, "is no name of an environment variable"),
        ({"env": {"": "x"}}, "is no name of an environment variable"),
        ({"env": {"A": "x\0"}}, r"env\['A'\] has a NUL"),
        ({"files": {"a/b": ""}}, "must be a plain name"),
        ({"files": {"..": ""}}, "must be a plain name"),
        ({"files": {".hidden": ""}}, "must be a plain name"),
        ({"files": {"": ""}}, "must be a plain name"),
        ({"files": {"state.json": ""}}, "is taken"),
        ({"files": {"outcome.json": ""}}, "is taken"),
        ({"files": {"x": b""}}, "must be a text, got bytes"),
        ({"timeout_s": -1}, "timeout_s must be a number of at least 0, got -1"),
        ({"lease_s": "soon"}, "lease_s must be a number"),
        ({"lease_s": float("nan")}, "lease_s must be a number"),
        ({"kill_grace_s": True}, "kill_grace_s must be a number"),
        ({"cwd": 3}, "cwd must be a text"),
    ],
)
def test_a_wrong_field_is_refused_by_name(change: dict[str, Any], message: str):
    with pytest.raises(Refused, match=message):
        check_spec({**GOOD, **change})


def test_a_missing_number_takes_the_default_or_is_refused():
    assert number({}, "offset", default=3) == 3
    with pytest.raises(Refused, match="offset must be a number of at least 0, got None"):
        number({}, "offset")


@pytest.mark.parametrize("value", ["", "..", "a/b", "-x", "a b", "x" * 201, None, 7, "ä", "a\n"])
def test_an_id_that_is_no_name_of_a_folder_is_refused(value: object):
    with pytest.raises(Refused, match="no name of a folder"):
        job_id(value)
