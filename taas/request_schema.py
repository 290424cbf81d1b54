"""The JSON schema of a request, generated from the model, in the plain form that trigger forms understand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from taas.flavors import Flavor, gpu_flavors

_EXAMPLE = {
    "project": "lm",
    "script": "train.py",
    "flavor": "g2.8",
    "gpus": 8,
    "cpus": 1,
    "units": 20480000,
    "loaders": {"data_loader": "data.py:make_loader"},
}


def build_schema(model: type[BaseModel], *, flavors: Mapping[str, Flavor]) -> dict[str, Any]:
    """Return the schema without ``$ref``; the known GPU flavors are an enum."""
    generated = model.model_json_schema(mode="validation")
    schema: dict[str, Any] = _plain(generated, generated.get("$defs", {}))
    schema["properties"]["flavor"] |= {"enum": gpu_flavors(flavors), "examples": gpu_flavors(flavors)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Training request",
        "examples": [_EXAMPLE],
    }


def _plain(node: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_plain(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    # Examples and defaults hold values, not schemas.
    return {
        key: value if key in ("examples", "default") else _plain(value, definitions)
        for key, value in node.items()
        if key != "$defs"
    }
