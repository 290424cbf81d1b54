from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from taas_tasks.compute.job import JobSpec, JobState, job_id

BASE = ("taas_train", "manual__2026-01-01T00:00:00+00:00", "prepare", 3, 1)


def test_a_job_id_is_readable_and_always_the_same():
    assert job_id(*BASE) == job_id(*BASE)
    assert re.fullmatch(r"prepare-3-g1-[0-9a-f]{20}", job_id(*BASE))
    assert job_id(*BASE[:3], -1, 2).startswith("train-g2-".replace("train", "prepare"))


@pytest.mark.parametrize("position", range(5))
def test_each_part_changes_the_id(position: int):
    other = list(BASE)
    other[position] = 7 if isinstance(other[position], int) else f"{other[position]}x"
    assert job_id(*other) != job_id(*BASE)  # type: ignore[arg-type]


def test_parts_are_not_confused_with_each_other():
    assert job_id("a", "bc", "t", 0, 0) != job_id("ab", "c", "t", 0, 0)


@given(st.text(), st.text(), st.text(), st.integers(-1, 9999), st.integers(0, 999))
def test_any_id_is_safe_as_the_name_of_a_folder(dag: str, run: str, task: str, index: int, generation: int):
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", job_id(dag, run, task, index, generation))


def test_secrets_do_not_show_in_a_specification():
    spec = JobSpec(job_id="j", owner="o", argv=["x"], env={"K": "s3cret"}, files={"f": "s3cret"})
    assert "s3cret" not in repr(spec) and "s3cret" not in str(spec)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_an_empty_command_is_refused():
    with pytest.raises(ValidationError):
        JobSpec(job_id="j", owner="o", argv=[])


@pytest.mark.parametrize(
    ("fields", "succeeded"),
    [
        ({"phase": "ended", "ended_by": "exit", "exit_code": 0}, True),
        ({"phase": "ended", "ended_by": "timeout", "exit_code": 0}, False),
        ({"phase": "ended", "ended_by": "exit", "exit_code": 1}, False),
        ({"phase": "running"}, False),
    ],
)
def test_success_is_an_end_by_itself_with_zero(fields: dict[str, object], succeeded: bool):
    assert JobState.model_validate({"job_id": "j", **fields}).succeeded == succeeded
