"""The trigger form: one Airflow param per field of the request, made from the request's own JSON schema.

The params choose widgets and carry texts; they accept any value. Airflow would report the first wrong param only, in
jsonschema's words; ``conf_check`` reports every fault of the whole request at once, in ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.sdk import Param

from taas.request import request_schema

_SECTIONS = {
    "What runs": ("project", "script", "args", "cell", "env", "secrets", "requirements"),
    "Machines": ("flavor", "gpus", "timeout_s", "hang_timeout_s", "max_restarts", "max_cost"),
    "Data": (
        "cpus",
        "units",
        "loaders",
        "start",
        "seed",
        "randomness",
        "remainder",
        "reuse",
        "cache_gb",
        "allow_pickle",
    ),
    "Files": ("other_ranks",),
}
_ANY_TYPE = ("string", "integer", "number", "boolean", "array", "object", "null")
_WIDGETS = ("integer", "number", "boolean", "string")


def _types(field: Mapping[str, Any]) -> list[str]:
    """Return the JSON types that a field allows, its own first, without null."""
    named = [option.get("type", []) for option in field.get("anyOf", [field])]
    types = [kind for one in named for kind in ([one] if isinstance(one, str) else one)]
    return [kind for kind in types if kind != "null"]


def form_param(field: Mapping[str, Any], *, section: str) -> Param:
    """Return the param of one field.

    A list of types that begins with the field's own makes the form choose that widget (``examples`` keeps it from
    falling back to a JSON editor) while every value passes. Lists and objects get theirs from the default, or, with
    none, the JSON editor.
    """
    schema: dict[str, Any] = {"section": section, "title": field["title"]}
    types = _types(field)
    has_widget = types[0] in _WIDGETS
    if has_widget or field.get("default") is None:
        schema["type"] = [types[0], "null", *(kind for kind in _ANY_TYPE if kind not in (types[0], "null"))]
    if has_widget:
        examples = field.get("enum") or field.get("examples", [])
        schema["examples"] = [str(one) for one in examples] if types[0] == "string" else examples
    return Param(field.get("default"), description=field["description"], schema=schema)


def form_params() -> dict[str, Param]:
    """Return the params of the DAG, section by section."""
    fields = request_schema()["properties"]
    return {name: form_param(fields[name], section=section) for section, names in _SECTIONS.items() for name in names}
