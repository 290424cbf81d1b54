"""The Airflow plugin: the conf check, and the endpoints below ``/taas``."""

from __future__ import annotations

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


class TaasPlugin(AirflowPlugin):
    """What TaaS adds to Airflow's own processes."""

    name = "taas"
    fastapi_apps = [{"app": LazyApp(), "url_prefix": "/taas", "name": "TaaS"}]

    @classmethod
    def on_load(cls, *_args: Any, **_kwargs: Any) -> None:
        """Install the conf check."""
        conf_check.install()
