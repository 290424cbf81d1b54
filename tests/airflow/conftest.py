"""Airflow for tests in this process: a home of its own, an empty sqlite database, no examples.

Airflow reads its home when it is first imported, so this must come before any test module of the folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOME = Path(tempfile.mkdtemp(prefix="taas-airflow-"))

os.environ.update(
    AIRFLOW_HOME=str(HOME),
    AIRFLOW__CORE__LOAD_EXAMPLES="False",
    AIRFLOW__CORE__DAGS_FOLDER=str(ROOT / "dags"),
    AIRFLOW__CORE__PLUGINS_FOLDER=str(ROOT / "plugins"),
    AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS="admin:admin,viewer:viewer",
    AIRFLOW__DATABASE__SQL_ALCHEMY_CONN=f"sqlite:///{HOME}/airflow.db",
    AIRFLOW__API_AUTH__JWT_SECRET="a secret of the tests, long enough for HS512, which wants 64 bytes of it",
    AIRFLOW__LOGGING__BASE_LOG_FOLDER=str(HOME / "logs"),
    _AIRFLOW_PROCESS_CONTEXT="server",
)


@pytest.fixture(scope="session", autouse=True)
def _home() -> Iterator[None]:
    yield
    shutil.rmtree(HOME, ignore_errors=True)


@pytest.fixture(scope="session")
def airflow_db(_home: None) -> None:
    """The metadata database, made once."""
    from airflow.utils.db import initdb

    initdb()
