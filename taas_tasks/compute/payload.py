"""What a verb may be asked: payloads are checked here before anything is done.

Standard library only, Python >= 3.9: runs on hosts, beside the other files of ``transport.HOST_FILES``.
"""

from __future__ import annotations

import re
from typing import Any

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")
_VARIABLE = re.compile(r"[^=\0]+")
_JSON_FILES = ("spec", "state", "lease", "cancel", "tombstone", "seen")
_OURS = ["lock", "control", "wake", "log", "outcome.json", "supervisor.log", *(f"{name}.json" for name in _JSON_FILES)]


class Refused(ValueError):
    """The payload is wrong, or asks for what must not be done; repeating it does not help."""


def job_id(value: Any) -> str:
    """Return the id of a job, which is the name of its folder."""
    if not isinstance(value, str) or not _JOB_ID.fullmatch(value):
        raise Refused(f"job_id {value!r} is no name of a folder; allowed: letters, digits, '_', '.', '-', 200 at most")
    return value


def number(payload: dict[str, Any], name: str, *, least: float = 0, default: float | None = None) -> float:
    """Return a finite number of the payload."""
    value = payload.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < float("inf"):
        raise Refused(f"{name} must be a number of at least {least:g}, got {value!r}")
    return value


def text(payload: dict[str, Any], name: str) -> str:
    """Return a text of the payload that is not empty."""
    value = payload.get(name)
    if not isinstance(value, str) or not value:
        raise Refused(f"{name} must be a text that is not empty, got {value!r}")
    return value


def check_text(what: str, value: Any) -> None:
    """Refuse what no argument, variable or file can hold."""
    if not isinstance(value, str):
        raise Refused(f"{what} must be a text, got {type(value).__name__}")
    if "\0" in value:
        raise Refused(f"{what} has a NUL character; no argument or variable can hold one")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Refused(f"{what} is no valid unicode text: {error.reason} at character {error.start}") from error


def check_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the specification with every field, or refuse it."""
    full = {"env": {}, "files": {}, "cwd": None, "slots_owner": None, "kill_grace_s": 10, **spec}
    text(full, "owner")
    if not isinstance(full.get("argv"), list) or not full["argv"]:
        raise Refused(f"argv must be a list of at least one text, got {full.get('argv')!r}")
    for position, part in enumerate(full["argv"]):
        check_text(f"argv[{position}]", part)
    for name in ("env", "files"):
        if not isinstance(full[name], dict):
            raise Refused(f"{name} must map names to texts, got {type(full[name]).__name__}")
    for name, value in full["env"].items():
        if not _VARIABLE.fullmatch(name):
            raise Refused(f"{name!r} is no name of an environment variable: it is empty, or has '=' or NUL")
        check_text(f"env name {name!r}", name)
        check_text(f"env[{name!r}]", value)
    for name, value in full["files"].items():
        check_file_name(name)
        check_text(f"files[{name!r}]", value)
    for name in ("timeout_s", "lease_s"):
        full[name] = None if full.get(name) is None else number(full, name)
    number(full, "kill_grace_s")
    if full["cwd"] is not None:
        check_text("cwd", full["cwd"])
    return full


def check_file_name(name: str) -> None:
    """Refuse a name that leaves the job's folder, is hidden, or is one of the supervisor's own files."""
    check_text(f"the file name {name!r}", name)
    if "/" in name or name in ("", ".", "..") or name.startswith(".") or len(name.encode()) > 200:
        raise Refused(f"the file name {name!r} must be a plain name without '/' and a '.' in front, 200 bytes at most")
    if name in _OURS:
        raise Refused(f"the file name {name!r} is taken; not allowed: {', '.join(_OURS)}")
