"""Which hosts there are, by flavor, and how each is reached."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from taas.errors import LaunchError
from taas_tasks.compute.local import LocalTransport
from taas_tasks.compute.transport import Transport
from taas_tasks.values import Value


class Host(Value):
    """One machine.

    Attributes:
        name: Unique; fixed order of gangs is the order of the inventory.
        transport: How it is reached: ``local`` emulates a host by a folder of this machine.
        address: Where the other hosts of a training reach it.
        root: The folder that jobs, slots, runs and caches live below (absolute).
        python: The interpreter that programs run with on the host.
        slots: Jobs that may hold the host at once.
        connection_id: Airflow connection of a remote host.
        env: Added to the environment of every job on the host.
    """

    name: str = Field(min_length=1)
    flavor: str = Field(min_length=1)
    transport: Literal["local", "ssh"] = "local"
    address: str = "127.0.0.1"
    root: str
    python: str
    slots: int = Field(default=1, ge=1)
    connection_id: str | None = None
    env: dict[str, str] = Field(default={}, repr=False)

    @field_validator("root", "python")
    @classmethod
    def _is_absolute(cls, value: str) -> str:
        if not Path(value).is_absolute():
            raise ValueError(f"must be an absolute path, got {value!r}")
        return value


class Inventory(Value):
    """All hosts, in the fixed order in which gangs take them."""

    hosts: list[Host]

    @classmethod
    def parse(cls, text: str) -> Inventory:
        """Return the inventory that a JSON list of hosts describes (or an object with that list under ``hosts``).

        Raises:
            LaunchError: Every fault at once, each with the host it is in.
        """
        try:
            value = json.loads(text)
            inventory = cls.model_validate({"hosts": value} if isinstance(value, list) else value)
        except json.JSONDecodeError as error:
            raise LaunchError(f"the inventory is no JSON: {error}; give a list of hosts") from error
        except ValidationError as error:
            raise LaunchError(f"the inventory is wrong: {_faults(error, value)}") from error
        inventory._refuse_doubles()
        return inventory

    def of_flavor(self, flavor: str) -> list[Host]:
        """Return the hosts of a flavor in fixed order.

        Raises:
            LaunchError: There is none; names the flavors there are.
        """
        found = [host for host in self.hosts if host.flavor == flavor]
        if not found:
            known = ", ".join(sorted({host.flavor for host in self.hosts})) or "none"
            raise LaunchError(
                f"no host of flavor {flavor!r} in the inventory; it has: {known}. Add a host or ask for one of these",
                flavor=flavor,
            )
        return found

    def host(self, name: str) -> Host:
        """Return the host of that name.

        Raises:
            LaunchError: There is none.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        known = ", ".join(host.name for host in self.hosts) or "none"
        raise LaunchError(f"no host {name!r} in the inventory; it has: {known}", host=name)

    def _refuse_doubles(self) -> None:
        places = [(host.transport, host.address, host.root) for host in self.hosts]
        for what, values in (("name", [host.name for host in self.hosts]), ("place (address, root)", places)):
            double = [value for value, count in Counter(values).items() if count > 1]
            if double:
                raise LaunchError(f"two hosts of the inventory have the same {what}: {double[0]}; each needs its own")


def open_transport(host: Host) -> Transport:
    """Return the transport that reaches a host.

    Raises:
        LaunchError: This version has no such transport.
    """
    if host.transport == "local":
        return LocalTransport(Path(host.root), python=host.python)
    raise LaunchError(
        f"host {host.name!r} names transport {host.transport!r}, which this version cannot drive; known: local",
        host=host.name,
    )


def _faults(error: ValidationError, value: Any) -> str:
    return "; ".join(f"{_place(fault['loc'], value)}: {fault['msg']}" for fault in error.errors())


def _place(location: tuple[int | str, ...], value: Any) -> str:
    hosts = value if isinstance(value, list) else value.get("hosts", []) if isinstance(value, dict) else []
    parts = [str(part) for part in location if part != "hosts"]
    if parts and parts[0].isdigit():
        entry = hosts[int(parts[0])]
        name = entry.get("name") if isinstance(entry, dict) else None
        parts[0] = f"host {name!r}" if name else f"host number {int(parts[0]) + 1}"
    return " ".join(parts) or "the list"
