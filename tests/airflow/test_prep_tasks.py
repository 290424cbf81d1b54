"""What the programs that open loaders are given."""

from __future__ import annotations

import pytest

from taas.request import parse_request
from taas_tasks.airflow.prep_tasks import loader_environment
from taas_tasks.compute.variables import merged
from taas_tasks.launch import environment as on_ranks


def test_loaders_and_ranks_see_the_same_variables_of_a_request(
    airflow_db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_VAR_TAAS/LM/LIBS", "/secret/lib")
    env = {"PATH": "/users/bin", "A": "; $(b) 'c'"}
    conf = {"project": "lm", "script": "train.py", "env": env, "secrets": {"LD_LIBRARY_PATH": "var:taas/lm/libs"}}
    given = loader_environment(parse_request(conf))
    assert given == {"PYTHONHASHSEED": "0", **env, "LD_LIBRARY_PATH": "/secret/lib"}
    host = {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/cuda"}
    on_host = merged(host, given)  # by the supervisor for PATH, by the job's spec for what the inventory says
    again = on_ranks.loader_environment(host, request_env=env, secrets={"LD_LIBRARY_PATH": "/secret/lib"})
    assert {name: on_host[name] for name in given} == {name: again[name] for name in given}
    assert (on_host["PATH"], on_host["LD_LIBRARY_PATH"]) == ("/users/bin:/usr/bin", "/secret/lib:/cuda")
