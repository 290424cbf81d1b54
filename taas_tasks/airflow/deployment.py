"""The deployment: Airflow's connections and variables as typed values.

Read inside tasks, triggers (in a thread) and the api-server, never while a DAG file is parsed:

- connection ``taas_store`` (type aws): login and password are the keys; the extra holds ``bucket`` and, as needed,
  ``endpoint_url``, ``public_endpoint_url``, ``prefix``, ``region``, ``session_token``;
- variable ``taas_inventory``: the hosts, as ``taas_tasks.compute.inventory.Inventory`` reads them;
- variable ``taas_flavors_file`` (optional): a TOML file of the site's flavors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from taas.errors import LaunchError, StoreRefused
from taas.flavors import Flavor, load_flavors
from taas_tasks.compute.inventory import Inventory
from taas_tasks.values import StoreConfig

STORE_CONNECTION = "taas_store"
INVENTORY_VARIABLE = "taas_inventory"
FLAVORS_VARIABLE = "taas_flavors_file"

_STORE_EXTRAS = ("endpoint_url", "public_endpoint_url", "bucket", "prefix", "region", "session_token")


class ConnectionLike(Protocol):
    """What is used of an Airflow connection."""

    login: str | None
    password: str | None

    @property
    def extra_dejson(self) -> dict[str, Any]:
        """The extra as a dict."""


@dataclass(frozen=True)
class Deployment:
    """Where things are at this site."""

    store: StoreConfig
    inventory: Inventory
    flavors: Mapping[str, Flavor]


def store_config(connection: ConnectionLike) -> StoreConfig:
    """Return the store that a connection describes.

    Raises:
        StoreRefused: the connection names no bucket.
    """
    extra = {name: value for name, value in connection.extra_dejson.items() if name in _STORE_EXTRAS and value}
    if "bucket" not in extra:
        raise StoreRefused(
            f"connection {STORE_CONNECTION!r} names no bucket; put it into the extra, e.g. "
            '{"bucket": "taas", "endpoint_url": "https://s3.example.org"}'
        )
    return StoreConfig(access_key=connection.login or None, secret_key=connection.password or None, **extra)


def read_store_config() -> StoreConfig:
    """Read the store's connection.

    Raises:
        StoreRefused: there is no such connection, or it names no bucket.
    """
    from airflow.sdk import Connection
    from airflow.sdk.exceptions import AirflowNotFoundException, AirflowRuntimeError

    try:
        connection = Connection.get(STORE_CONNECTION)
    except (AirflowNotFoundException, AirflowRuntimeError) as error:
        raise StoreRefused(
            f"Airflow has no connection {STORE_CONNECTION!r}: {error}; add one of type aws whose extra names the bucket"
        ) from error
    return store_config(connection)


def _variable(name: str) -> str | None:
    from airflow.sdk import Variable

    value = Variable.get(name, default=None)
    return str(value) if value else None


def read_flavors() -> dict[str, Flavor]:
    """Return the flavors of this site."""
    site_file = _variable(FLAVORS_VARIABLE)
    return load_flavors(Path(site_file) if site_file else None)


def read_inventory() -> Inventory:
    """Return the hosts of this site.

    Raises:
        LaunchError: there is no inventory, or it is wrong.
    """
    text = _variable(INVENTORY_VARIABLE)
    if text is None:
        raise LaunchError(
            f"Airflow has no variable {INVENTORY_VARIABLE!r}; set it to the JSON list of hosts (docs/architecture.md)"
        )
    return Inventory.parse(text)


def read_deployment() -> Deployment:
    """Read everything. Not for the event loop of a triggerer: call it by ``asyncio.to_thread`` there."""
    return Deployment(store=read_store_config(), inventory=read_inventory(), flavors=read_flavors())
