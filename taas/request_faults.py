"""What is wrong with a request, in words: got, allowed, how to mend, and the nearest known name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from taas.errors import RequestError

_TYPE_NAMES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", type(None): "null"}
_MAX_SHOWN = 60


@dataclass(frozen=True)
class Fault:
    """One fault of a request: the field's path (``loaders.train.units``, ``args[1]``) and a sentence."""

    field: str
    message: str


@dataclass(frozen=True)
class Allowed:
    """What a field takes, in words: metadata of the model's fields, used by messages.

    Attributes:
        text: Follows "allowed: ".
        items: What an item (of a list) or a value (of an object) may be, where the field holds several.
        choices: The few strings that are allowed, for "did you mean".
        secret: A value is never shown.
    """

    text: str
    items: str = "a string"
    choices: tuple[str, ...] = ()
    secret: bool = False


def fault_path(loc: Sequence[str | int]) -> str:
    """Return a path in words: ``("loaders", "train", "units")`` -> ``loaders.train.units``; list items in brackets."""
    path = ""
    for part in loc:
        if part == "[key]":
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def show(value: Any) -> str:
    """Return a value as the user wrote it (JSON), cut when long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return type_name(value)
    if not text.isprintable():
        text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def type_name(value: Any) -> str:
    """Return a JSON type in words."""
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    return _TYPE_NAMES.get(type(value), f"a {type(value).__name__}")


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return `` Did you mean 'x'?`` for the nearest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean '{close[0]}'?" if close else ""


def unknown_message(name: Any, known: Iterable[str]) -> str:
    """Say that a field is unknown, which are known, and which is nearest."""
    names = list(known)
    return f"unknown field; known: {', '.join(names)}.{did_you_mean(str(name), names)}"


def mismatch_message(value: Any, allowed: Allowed, *, is_item: bool = False) -> str:
    """Say what was got, what is allowed and, where it is known, how to mend it."""
    got = type_name(value) if allowed.secret else f"{show(value)} ({type_name(value)})"
    text = allowed.items if is_item else allowed.text
    mend = _mend(value, text, allowed)
    return f"got {got}; allowed: {text}.{mend}" if mend else f"got {got}; allowed: {text}"


def _mend(value: Any, text: str, allowed: Allowed) -> str:
    if isinstance(value, str) and allowed.choices:
        return did_you_mean(value, allowed.choices, cutoff=0.3)
    if isinstance(value, str) and text.startswith(("an integer", "a number")) and _is_number(value):
        return f" Write {value.strip()} without quotes"
    if isinstance(value, str) and text.startswith("true") and value.lower() in ("true", "false"):
        return f" Write {value.lower()} without quotes"
    if type(value) is float and text.startswith("an integer") and value.is_integer():
        return f" Write {int(value)}"
    if type(value) in (int, float, bool) and text.startswith("a string") and not allowed.secret:
        return f" Write {json.dumps(show(value))}"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def request_error(faults: Sequence[Fault]) -> RequestError:
    """Return the error that carries all faults: one line each in the message, and as ``fields["faults"]``."""
    listed = [{"field": _printable(fault.field), "message": _printable(fault.message)} for fault in faults]
    lines = [f"{fault['field']}: {fault['message']}" if fault["field"] else fault["message"] for fault in listed]
    return RequestError("\n".join(lines), faults=listed)


def _printable(text: str) -> str:
    """Return a text that fits one line of any terminal: names that the user made up may hold anything."""
    return text if text.isprintable() else json.dumps(text)[1:-1].replace('\\"', '"')
