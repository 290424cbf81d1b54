"""Refuse a wrong conf when the run is triggered, with every fault, before anything runs.

Airflow has no hook for a check across params. SQLAlchemy's ``init`` event of ``DagRun`` is the first moment at which
all three ways in (trigger form, REST, ``airflow dags trigger``) pass through the same place: a ``ValueError`` there
becomes REST's 400, the form's red box and the CLI's last line, each with our text. Rows read from the database do not
fire it.
The task ``validate`` checks again, so a conf that comes another way is refused too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taas.errors import RequestError
from taas.flavors import Flavor, load_flavors
from taas.request import parse_request
from taas_tasks.airflow.deployment import FLAVORS_VARIABLE

DAG_ID = "taas_train"
_CHECKED_RUN_TYPES = ("manual", "operator_triggered")


def _site_flavors() -> dict[str, Flavor]:
    """Return the site's flavors, read from the database: this runs where runs are made, not in a task."""
    from airflow.models.variable import Variable

    site_file = Variable.get(FLAVORS_VARIABLE, default_var=None)
    return load_flavors(Path(site_file) if site_file else None)


def check_new_run(_run: Any, _args: Any, kwargs: Mapping[str, Any]) -> None:
    """SQLAlchemy listener: raise ``ValueError`` with all faults when a run of our DAG is made with a wrong conf."""
    run_type = getattr(kwargs.get("run_type"), "value", kwargs.get("run_type"))
    if kwargs.get("dag_id") != DAG_ID or run_type not in _CHECKED_RUN_TYPES:
        return
    try:
        parse_request(kwargs.get("conf") or {}, flavors=_site_flavors())
    except RequestError as error:
        raise ValueError(error.message) from None


def install() -> None:
    """Check every new run from now on in this process; doing it twice changes nothing."""
    from airflow.models.dagrun import DagRun
    from sqlalchemy import event

    if not event.contains(DagRun, "init", check_new_run):
        event.listen(DagRun, "init", check_new_run)
