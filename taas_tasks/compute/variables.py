"""Environment variables that several parties set: whose value counts."""

from __future__ import annotations

from collections.abc import Mapping

PATH_LIKE = frozenset(
    {"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "MANPATH", "PKG_CONFIG_PATH"}
    | {"CMAKE_PREFIX_PATH", "XDG_DATA_DIRS"}
)
"""Variables to which a request's value is put in front; what the host had stays behind it."""


def merged(base: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Return ``base`` with ``added`` on top; path-like variables keep what was there."""
    result = dict(base)
    for name, value in added.items():
        before = result.get(name)
        result[name] = f"{value}:{before}" if name in PATH_LIKE and before and value else value
    return result
