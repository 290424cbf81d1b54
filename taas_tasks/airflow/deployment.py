"""The deployment: Airflow's connections and variables as typed values.

Read inside tasks, triggers (in a thread) and the api-server, never while a DAG file is parsed:

- connection ``taas_store`` (type aws): login and password are the keys; the extra holds ``bucket`` and, as needed,
  ``endpoint_url``, ``public_endpoint_url``, ``prefix``, ``region``, ``session_token``;
- variable ``taas_inventory``: the hosts, as ``taas_tasks.compute.inventory.Inventory`` reads them;
- variable ``taas_flavors_file`` (optional): a TOML file of the site's flavors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from taas.errors import LaunchError, StoreRefused
from taas.flavors import Flavor, load_flavors
from taas_tasks.compute.inventory import Inventory
from taas_tasks.store.credentials import Keys
from taas_tasks.values import StoreConfig

STORE_CONNECTION = "taas_store"
INVENTORY_VARIABLE = "taas_inventory"
FLAVORS_VARIABLE = "taas_flavors_file"

_KEYS_FILE = "store-keys.json"
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


def as_on_hosts(store: StoreConfig) -> StoreConfig:
    """Return the store as a job on a host is told it: session credentials lie in a file, where they are renewed."""
    if store.session_token is None:
        return store
    keys: dict[str, str | None] = {"access_key": None, "secret_key": None, "session_token": None}
    return store.model_copy(update={**keys, "credentials_path": _KEYS_FILE})


def key_files(store: StoreConfig) -> dict[str, str]:
    """Return the file that ``as_on_hosts`` names, if it names one."""
    if store.session_token is None:
        return {}
    return {_KEYS_FILE: store.model_dump_json(include={"access_key", "secret_key", "session_token"})}


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


class ConnectionKeys:
    """The keys of the store's connection, read again when they have expired: for what outlives session credentials."""

    def __init__(self, store: StoreConfig, *, read: Callable[[], StoreConfig]) -> None:
        self._keys = _keys_of(store)
        self._read = read

    def keys(self) -> Keys:
        """Return the keys as they were last read."""
        return self._keys

    def await_others(self, expired: Keys) -> bool:
        """Return whether the connection has other keys by now."""
        self._keys = _keys_of(self._read())
        return self._keys != expired


def _keys_of(store: StoreConfig) -> Keys:
    return Keys(store.access_key or "", store.secret_key or "", store.session_token)


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
