"""Which hosts there are, by flavor, and how each is reached."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from taas.errors import LaunchError
from taas_tasks.values import Value

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Host(Value):
    """One machine.

    Attributes:
        name: Unique; fixed order of gangs is the order of the inventory.
        transport: How it is reached: ``local`` emulates a host by a folder of this machine, ``ssh`` logs in.
        address: Where the other hosts of a training reach it.
        root: The folder that jobs, slots, runs and caches live below (absolute).
        python: The interpreter that programs run with on the host.
        slots: Jobs that may hold the host at once.
        connection_id: Airflow connection (type ssh) of a host that is reached by ``ssh``.
        emulate_gpus: Whether its ranks run on CPUs, over gloo; by default only on ``local`` hosts.
        env: Added to the environment of every job on the host.
    """

    name: str = Field(min_length=1)
    flavor: str = Field(min_length=1)
    transport: Literal["local", "ssh"] = "local"
    address: str = "127.0.0.1"
    root: str
    python: str
    slots: int = Field(default=1, ge=1)
    connection_id: str | None = Field(default=None, validate_default=True)
    emulate_gpus: bool | None = None
    env: dict[str, str] = Field(default={}, repr=False)

    @property
    def emulates_gpus(self) -> bool:
        """Whether its ranks run on CPUs in the place of GPUs."""
        return self.transport == "local" if self.emulate_gpus is None else self.emulate_gpus

    @field_validator("root", "python")
    @classmethod
    def _is_absolute(cls, value: str) -> str:
        if not Path(value).is_absolute() or _CONTROL.search(value):
            raise ValueError(f"must be an absolute path (without control characters), got {value!r}")
        return value

    @field_validator("connection_id")
    @classmethod
    def _fits_the_transport(cls, value: str | None, info: ValidationInfo) -> str | None:
        transport = info.data.get("transport")
        if transport == "ssh" and not value:
            raise ValueError("transport 'ssh' needs the id of an Airflow connection of type ssh")
        if transport == "local" and value:
            raise ValueError(
                f"transport 'local' has no connection, got {value!r}; say transport 'ssh', or leave it out"
            )
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
        places = [(host.connection_id or host.address, host.root) for host in self.hosts]
        faults = [
            f"two hosts of the inventory have the same {what}: {value}; each needs its own"
            for what, values in (("name", [host.name for host in self.hosts]), ("place (where it is, root)", places))
            for value, count in Counter(values).items()
            if count > 1
        ]
        if faults:
            raise LaunchError("; ".join(faults))


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
