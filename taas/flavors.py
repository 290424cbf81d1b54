"""Flavors: machine configurations by name. A site adds or overrides some in one TOML file.

The site's file holds one table per flavor; names hold a dot, so they are quoted. A flavor that the built-in table
knows may give only what differs::

    [flavors."g3.8"]
    vcpus = 192
    gpus = 8
    gpu_model = "H100"
    ram_gb = 2048
    price = 1800

    [flavors."c1.4"]
    price = 5
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from taas.errors import RequestError, TaasError

HOST_COUNTS = (1, 2, 4)
"""On how many hosts of its flavor a training may run."""

PREP_FLAVOR = "c1.4"
"""The flavor on which loaders are inspected and prepared."""


@dataclass(frozen=True)
class Flavor:
    """A machine configuration. ``price`` is in units per second, ``ram_gb`` in GB."""

    name: str
    vcpus: int
    gpus: int
    gpu_model: str | None
    ram_gb: int
    price: float

    @property
    def is_gpu(self) -> bool:
        """Whether training can run on it."""
        return self.gpus > 0


_TABLE = (
    Flavor("c1.4", 4, 0, None, 32, 4),
    Flavor("c1.8", 8, 0, None, 64, 8),
    Flavor("c1.32", 32, 0, None, 256, 32),
    Flavor("c1.80", 80, 0, None, 640, 80),
    Flavor("g1.1", 8, 1, "V100", 96, 72),
    Flavor("g1.2", 16, 2, "V100", 192, 144),
    Flavor("g1.4", 32, 4, "V100", 384, 288),
    Flavor("g2.1", 28, 1, "A100", 119, 116),
    Flavor("g2.2", 56, 2, "A100", 238, 232),
    Flavor("g2.4", 112, 4, "A100", 476, 464),
    Flavor("g2.8", 224, 8, "A100", 952, 928),
)

FLAVORS: dict[str, Flavor] = {flavor.name: flavor for flavor in _TABLE}


def gpu_flavors(flavors: Mapping[str, Flavor] = FLAVORS) -> list[str]:
    """Return the names of the flavors that training can run on, in the table's order."""
    return [flavor.name for flavor in flavors.values() if flavor.is_gpu]


def gpu_choices(flavor: Flavor) -> tuple[int, ...]:
    """Return the numbers of GPUs that a training on the flavor may take: those of 1, 2 or 4 hosts."""
    return tuple(flavor.gpus * hosts for hosts in HOST_COUNTS)


def gpus_fault(flavor: Flavor, gpus: int) -> str | None:
    """Return why a training cannot take so many GPUs of a GPU flavor, in one sentence, or None when it can."""
    choices = gpu_choices(flavor)
    if gpus in choices:
        return None
    nearest = min(choices, key=lambda choice: abs(choice - gpus))
    allowed = ", ".join(map(str, choices))
    return (
        f"got {gpus}; allowed on {flavor.name}: {allowed} (1, 2 or 4 hosts of {_gpu_word(flavor.gpus)}). "
        f"Did you mean {nearest}?"
    )


def _gpu_word(gpus: int) -> str:
    return f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"


def flavor_fault(name: str, flavors: Mapping[str, Flavor] = FLAVORS) -> str | None:
    """Return why no training can run on a flavor of this name, in one sentence, or None when it can."""
    known = gpu_flavors(flavors)
    listed = ", ".join(known)
    if name not in flavors:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        return f"unknown flavor {name!r}; known GPU flavors: {listed}.{hint}"
    if not flavors[name].is_gpu:
        return (
            f"flavor '{name}' has no GPUs; training takes one of: {listed}. "
            f"Loaders are prepared on {PREP_FLAVOR} machines, whose number is 'cpus'"
        )
    return None


def hosts_for(flavor: Flavor, gpus: int) -> int:
    """Return on how many hosts (1, 2 or 4) of a flavor so many GPUs are.

    Raises:
        RequestError: the flavor has no GPUs, or the number is not that of 1, 2 or 4 hosts.
    """
    reason = flavor_fault(flavor.name, {**FLAVORS, flavor.name: flavor})
    if reason:
        raise RequestError(f"flavor: {reason}", faults=[{"field": "flavor", "message": reason}])
    reason = gpus_fault(flavor, gpus)
    if reason:
        raise RequestError(f"gpus: {reason}", faults=[{"field": "gpus", "message": reason}])
    return gpus // flavor.gpus


def load_flavors(site_file: Path | None) -> dict[str, Flavor]:
    """Return the built-in flavors with those of the site's file added or overridden; without a file, the built-in ones.

    Raises:
        TaasError: the file cannot be read, is no TOML, or describes a flavor wrongly; all faults are named.
    """
    if site_file is None:
        return dict(FLAVORS)
    tables = _read_tables(site_file)
    faults = [fault for name, table in tables.items() for fault in _table_faults(name, table)]
    if faults:
        raise TaasError(f"flavors in {site_file}: " + "; ".join(faults), path=str(site_file), faults=faults)
    return {**FLAVORS, **{name: _flavor_from(name, table) for name, table in tables.items()}}


_FIELDS = tuple(field.name for field in fields(Flavor) if field.name != "name")


def _read_tables(site_file: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(site_file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TaasError(f"cannot read the flavors in {site_file}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaasError(f"flavors in {site_file}: not a TOML file: {error}") from error
    unknown = sorted(document.keys() - {"flavors"})
    tables = document.get("flavors", {})
    if unknown or not isinstance(tables, dict):
        got = ", ".join(unknown) or "flavors = (no table)"
        raise TaasError(f'flavors in {site_file}: got {got} at the top; allowed: tables named like [flavors."g3.8"]')
    return tables


def _table_faults(name: str, table: Any) -> Iterator[str]:
    if not isinstance(table, dict):
        yield f"'{name}': got {table!r}; allowed: a table, e.g. [flavors.\"{name}\"]"
        return
    if table and all(isinstance(value, dict) for value in table.values()):
        yield f"'{name}': a name with a dot is quoted: [flavors.\"{name}.{next(iter(table))}\"]"
        return
    base = FLAVORS.get(name)
    for key in table.keys() - set(_FIELDS):
        close = difflib.get_close_matches(key, _FIELDS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        yield f"'{name}': unknown field {key}{hint}; known: {', '.join(_FIELDS)}"
    missing = [key for key in _FIELDS if key not in table and key != "gpu_model"] if base is None else []
    if missing:
        yield f"'{name}': missing {', '.join(missing)}"
    yield from _value_faults(name, table)


def _value_faults(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    for key, least in (("vcpus", 1), ("gpus", 0), ("ram_gb", 1)):
        if key in table and not (type(table[key]) is int and table[key] >= least):
            yield f"'{name}': {key} = {table[key]!r}; allowed: an integer of at least {least}"
    price = table.get("price", 0)
    if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < float("inf"):
        yield f"'{name}': price = {price!r}; allowed: a number of at least 0 (units per second)"
    model = table.get("gpu_model")
    if model is not None and not (isinstance(model, str) and model):
        yield f"'{name}': gpu_model = {model!r}; allowed: a name in quotes"


def _flavor_from(name: str, table: Mapping[str, Any]) -> Flavor:
    base = FLAVORS.get(name)
    known = {key: getattr(base, key) for key in _FIELDS} if base else {"gpu_model": None}
    return Flavor(name=name, **{**known, **table})
