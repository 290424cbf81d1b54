"""With which versions a payload was pickled: said behind the pickle, where it is read without opening it.

Unpickling ignores what follows, so whoever does not know of this reads the payload all the same.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping

_MARK = b"\ntaas-made-with "
_MAX_BYTES = 4096
_PACKAGES = ("cloudpickle", "torch", "numpy")


def versions_here() -> dict[str, str]:
    """Return the versions of Python and of the packages whose objects payloads are full of."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def marked(pickle: bytes, versions: Mapping[str, str]) -> bytes:
    """Return the pickle with the versions behind it."""
    return pickle + _MARK + json.dumps(versions).encode()


def versions_of(payload: bytes) -> dict[str, str]:
    """Return the versions with which a payload was made; nothing where it does not say so."""
    _, mark, text = payload[-_MAX_BYTES:].rpartition(_MARK)
    try:
        found = json.loads(text) if mark else {}
    except ValueError:
        return {}
    return {str(name): str(version) for name, version in found.items()} if isinstance(found, dict) else {}


def differences(made: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return each version that differs, with both: "Python 3.12.1 there, 3.11.2 here"."""
    names = [name for name in made if made[name] != here.get(name)]
    return [f"{name} {made[name]} where it was made, {here.get(name, 'none')} here" for name in names]


def refusal(made: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Return why a payload made with these versions cannot work here, or None where it is worth a try.

    Functions travel as bytecode, which each minor version of Python has its own of; other packages keep what they
    pickled readable within a major version.
    """
    breaking = {
        name: made[name] for name in made if name in here and _line(name, made[name]) != _line(name, here[name])
    }
    if not breaking:
        return None
    text = "; ".join(differences(breaking, here))
    return f"it was made with other versions: {text}. Use the same on both sides, and make it again"


def _line(name: str, version: str) -> list[str]:
    """Return the parts of a version within which payloads stay readable."""
    return version.split(".")[: 2 if name == "python" else 1]
