"""Flavors: machine configurations by name. A site adds or overrides some in one TOML file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Flavor:
    """A machine configuration. ``price`` is in units per second."""

    name: str
    vcpus: int
    gpus: int
    gpu_model: str | None
    ram_gb: int
    price: float


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
