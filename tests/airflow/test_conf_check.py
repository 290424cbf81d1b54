"""A wrong conf is refused when the run is made: on the real ORM, as REST and the CLI make runs."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

GOOD = {"project": "lm", "script": "train.py"}


@pytest.fixture(scope="module")
def dag_run(airflow_db):
    from airflow.models.dagrun import DagRun

    from taas_tasks.airflow import conf_check

    conf_check.install()
    conf_check.install()  # a second time changes nothing

    def make(conf, **fields):
        given = {"dag_id": "taas_train", "run_id": "manual__1", "run_type": "manual", **fields}
        return DagRun(conf=conf, run_after=datetime(2026, 1, 1, tzinfo=UTC), **given)

    return make


def test_good_conf_makes_a_run(dag_run):
    assert dag_run(GOOD).conf == GOOD


def test_nulls_of_the_trigger_form_count_as_not_given(dag_run):
    assert dag_run({**GOOD, "cell": None, "cpus": None, "units": None, "max_cost": None}).run_id == "manual__1"


def test_every_fault_is_told_at_once(dag_run):
    conf = {"project": "lm", "script": "train.py", "gpu": 8, "flavor": "g2.9", "units": 5, "seed": "x"}
    with pytest.raises(ValueError) as caught:
        dag_run(conf)
    message = str(caught.value)
    for part in ("gpu: unknown field", "Did you mean 'gpus'", "flavor: unknown flavor 'g2.9'", "cpus:", "seed:"):
        assert part in message
    assert message.count("gpu: unknown field") == 1


@pytest.mark.parametrize("run_type", ["manual", "operator_triggered"])
def test_runs_that_someone_makes_are_checked(dag_run, run_type):
    from airflow.utils.types import DagRunType

    with pytest.raises(ValueError, match="project: is missing"):
        dag_run({"script": "train.py"}, run_type=DagRunType(run_type))


@pytest.mark.parametrize("fields", [{"dag_id": "another"}, {"run_type": "scheduled"}, {"run_type": "backfill"}])
def test_other_runs_are_none_of_our_business(dag_run, fields):
    assert dag_run({"anything": 1}, **fields).conf == {"anything": 1}


def test_empty_conf_is_refused(dag_run):
    with pytest.raises(ValueError, match="project: is missing"):
        dag_run(None)


def test_flavors_of_the_site_count(dag_run, tmp_path, monkeypatch):
    site = tmp_path / "flavors.toml"
    site.write_text('[flavors."g9.4"]\nvcpus = 8\ngpus = 4\nram_gb = 64\nprice = 100\n')
    conf = {**GOOD, "flavor": "g9.4", "gpus": 8}
    with pytest.raises(ValueError, match="unknown flavor"):
        dag_run(conf)
    monkeypatch.setenv("AIRFLOW_VAR_TAAS_FLAVORS_FILE", str(site))
    assert dag_run(conf).conf == conf


def test_rows_read_from_the_database_are_not_checked(dag_run, airflow_db):
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session
    from sqlalchemy import insert, select

    with create_session() as session:
        values = {"dag_id": "taas_train", "run_id": "old", "run_type": "manual", "conf": {"old": 1}}
        values |= {"run_after": datetime(2026, 1, 1, tzinfo=UTC), "clear_number": 0, "state": "success"}
        session.execute(insert(DagRun).values(**values))
        assert session.scalar(select(DagRun).where(DagRun.run_id == "old")).conf == {"old": 1}
        session.rollback()
