"""Airflow's four processes as the local stack runs them: command lines, environment, health."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from taas_tasks.stack.ports import LOOPBACK
from taas_tasks.values import StoreConfig

COMMANDS: dict[str, list[str]] = {
    "api-server": ["api-server"],
    "scheduler": ["scheduler", "--skip-serve-logs"],
    "dag-processor": ["dag-processor"],
    "triggerer": ["triggerer", "--skip-serve-logs"],
}
USERS = {"admin": "admin", "viewer": "viewer"}  # name -> role


@dataclass(frozen=True)
class AirflowSetup:
    """What the four processes must agree on."""

    home: Path
    port: int
    database_url: str
    dags: Path
    plugins: Path
    fernet_key: str
    jwt_secret: str
    api_secret_key: str
    passwords_file: Path
    store: StoreConfig
    inventory: Mapping[str, Any]
    connections: Mapping[str, str]

    @property
    def url(self) -> str:
        """The UI and the API."""
        return f"http://{LOOPBACK}:{self.port}"


def command(name: str) -> list[str]:
    """Return the command line of one of the processes."""
    return [sys.executable, "-m", "airflow", *COMMANDS[name]]


def environment(setup: AirflowSetup) -> dict[str, str]:
    """Return the environment of every Airflow process and of the ``airflow`` command."""
    found = {f"AIRFLOW__{section.upper()}__{key.upper()}": value for section, key, value in _settings(setup)}
    return {
        **found,
        **setup.connections,
        "AIRFLOW_HOME": str(setup.home),
        "AIRFLOW_CONN_TAAS_STORE": store_connection(setup.store),
        "AIRFLOW_VAR_TAAS_INVENTORY": json.dumps(dict(setup.inventory)),
        "PYTHONUNBUFFERED": "1",
        "_AIRFLOW_PROCESS_CONTEXT": "server",
    }


def _settings(setup: AirflowSetup) -> list[tuple[str, str, str]]:
    return [
        *_places(setup),
        *_secrets(setup),
        # Short ways: without these a task waits up to 5 s for nothing (the defaults suit large installations).
        ("workers", "min_heartbeat_interval", "1"),
        ("scheduler", "scheduler_idle_sleep_time", "0.1"),
        ("core", "parallelism", "8"),
        ("core", "max_active_tasks_per_dag", "64"),
        ("core", "dags_are_paused_at_creation", "False"),
        ("dag_processor", "refresh_interval", "10"),
        ("dag_processor", "min_file_process_interval", "15"),
        # A killed task, scheduler or triggerer is noticed within 15 s.
        ("scheduler", "task_instance_heartbeat_timeout", "15"),
        ("scheduler", "task_instance_heartbeat_timeout_detection_interval", "3"),
        ("scheduler", "scheduler_health_check_threshold", "15"),
        ("scheduler", "orphaned_tasks_check_interval", "10"),
        ("triggerer", "triggerer_health_check_threshold", "10"),
    ]


def _places(setup: AirflowSetup) -> list[tuple[str, str, str]]:
    return [
        ("core", "dags_folder", str(setup.dags)),
        ("core", "plugins_folder", str(setup.plugins)),
        ("core", "load_examples", "False"),
        ("core", "executor", "LocalExecutor"),
        ("core", "execution_api_server_url", f"{setup.url}/execution/"),
        ("api", "base_url", setup.url),
        ("api", "host", LOOPBACK),
        ("api", "port", str(setup.port)),
        ("logging", "base_log_folder", str(setup.home / "logs")),
    ]


def _secrets(setup: AirflowSetup) -> list[tuple[str, str, str]]:
    return [
        ("database", "sql_alchemy_conn", setup.database_url),
        ("database", "sql_alchemy_conn_async", setup.database_url.replace("+psycopg2", "+asyncpg")),
        ("core", "fernet_key", setup.fernet_key),
        ("core", "simple_auth_manager_users", ",".join(f"{name}:{role}" for name, role in USERS.items())),
        ("core", "simple_auth_manager_passwords_file", str(setup.passwords_file)),
        ("api", "secret_key", setup.api_secret_key),
        ("api_auth", "jwt_secret", setup.jwt_secret),
    ]


def store_connection(store: StoreConfig) -> str:
    """Return the Airflow connection ``taas_store`` in its JSON form."""
    extra = {
        name: value
        for name in ("endpoint_url", "public_endpoint_url", "bucket", "prefix", "region")
        if (value := getattr(store, name))
    }
    fields = {"conn_type": "aws", "login": store.access_key, "password": store.secret_key, "extra": extra}
    return json.dumps(fields)


def inventory(root: Path, *, hosts_gpu: int, hosts_cpu: int) -> dict[str, Any]:
    """Return the emulated hosts: one folder each, a slot for one job at a time."""
    names = [(f"c1-{n}", "c1.4") for n in range(hosts_cpu)] + [(f"g2-{n}", "g2.8") for n in range(hosts_gpu)]
    return {
        "hosts": [
            {
                "name": name,
                "flavor": flavor,
                "transport": "local",
                "root": str(root / name),
                "python": sys.executable,
                "slots": 1,
            }
            for name, flavor in names
        ]
    }


def health(port: int) -> dict[str, Any] | None:
    """Return what the api-server says of all four; None when it does not answer."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=5)
    try:
        connection.request("GET", "/api/v2/monitor/health")
        answer = connection.getresponse()
        body = answer.read()
        return dict(json.loads(body)) if answer.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def unhealthy_reason(name: str, answer: Mapping[str, Any] | None, *, since: float) -> str | None:
    """Return why a process is not healthy by the api-server's answer; None when it is.

    ``since`` (unix seconds): only a heartbeat behind it counts, so that a dead predecessor's does not.
    """
    if answer is None:
        return "the api-server does not answer"
    if name == "api-server":
        return None if answer["metadatabase"]["status"] == "healthy" else "it cannot reach its database"
    key = name.replace("-", "_")
    about = answer.get(key) or {}
    beat = about.get(f"latest_{key}_heartbeat")
    if about.get("status") != "healthy" or beat is None:
        return "no heartbeat yet" if beat is None else f"its last heartbeat was at {beat}"
    return None if datetime.fromisoformat(beat).timestamp() >= since else "no heartbeat since its start"
