"""Secrets: only the project's own names, only at the moment of the start."""

import pytest

from taas.errors import RequestError
from taas_tasks.airflow.secret_values import resolve_secrets, split_reference


@pytest.mark.parametrize("kind", ["conn", "var"])
def test_reference_to_the_projects_own_name(kind):
    assert split_reference(f"{kind}:taas/lm/token", project="lm") == (kind, "taas/lm/token")


@pytest.mark.parametrize(
    "reference",
    [
        "var:taas/other/token",
        "var:token",
        "conn:taas_store",
        "conn:taas/lm",
        "var:taas/lm/../other/token",
        "file:taas/lm/token",
        "taas/lm/token",
        "",
    ],
)
def test_any_other_reference_is_refused_without_showing_it(reference):
    with pytest.raises(RequestError) as caught:
        split_reference(reference, project="lm")
    assert "taas/lm/<name>" in caught.value.message


def test_values_of_variables_and_connections(airflow_db, monkeypatch):
    monkeypatch.setenv("AIRFLOW_VAR_TAAS/LM/TOKEN", "s3cr3t")
    monkeypatch.setenv("AIRFLOW_CONN_TAAS/LM/DB", "postgres://me:pw@db:5432/x")
    found = resolve_secrets({"TOKEN": "var:taas/lm/token", "DB": "conn:taas/lm/db"}, project="lm")
    assert found["TOKEN"] == "s3cr3t"
    assert "me:pw@db:5432/x" in found["DB"]


def test_every_missing_secret_is_named_at_once(airflow_db):
    with pytest.raises(RequestError) as caught:
        resolve_secrets({"A": "var:taas/lm/a", "B": "conn:taas/lm/b"}, project="lm")
    assert "secrets.A: Airflow has no variable 'taas/lm/a'" in caught.value.message
    assert "secrets.B: Airflow has no connection 'taas/lm/b'" in caught.value.message
