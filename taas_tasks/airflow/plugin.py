"""The Airflow plugin: the conf check, and the endpoints below ``/taas``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from airflow.plugins_manager import AirflowPlugin

from taas_tasks.airflow import conf_check

_Message = MutableMapping[str, Any]


class LazyApp:
    """An ASGI app that is made by the first request: every Airflow process loads plugins, one serves them."""

    def __init__(self) -> None:
        self._app: Any = None

    async def __call__(
        self,
        scope: _Message,
        receive: Callable[[], Awaitable[_Message]],
        send: Callable[[_Message], Awaitable[None]],
    ) -> None:
        """Pass a request on to ``taas_tasks.airflow.api``."""
        if self._app is None:
            from taas_tasks.airflow.api import make_app

            self._app = make_app()
        await self._app(scope, receive, send)


_TASK_MODULES = ("run_steps", "prep_tasks", "train_task", "triggers")


def warm_up() -> None:
    """Import what tasks need in the scheduler, of which LocalExecutor's task processes are forks: each saves a second.

    Elsewhere it does nothing.
    """
    if "airflow.jobs.scheduler_job_runner" not in sys.modules:
        return
    for name in _TASK_MODULES:
        importlib.import_module(f"taas_tasks.airflow.{name}")
    importlib.import_module("taas_tasks.store.s3")


class TaasPlugin(AirflowPlugin):
    """What TaaS adds to Airflow's own processes."""

    name = "taas"
    fastapi_apps = [{"app": LazyApp(), "url_prefix": "/taas", "name": "TaaS"}]

    @classmethod
    def on_load(cls, *_args: Any, **_kwargs: Any) -> None:
        """Install the conf check; in the scheduler, import what tasks need."""
        conf_check.install()
        warm_up()
