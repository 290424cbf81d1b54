"""The JSON schema of the request: what the trigger form and the client are built from."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from taas.request import TrainRequest, parse_request, request_schema

BASE = {"project": "demo", "script": "train.py"}


def test_every_field_of_the_schema_has_title_description_and_fitting_examples() -> None:
    schema = request_schema()
    assert list(schema["properties"]) == list(TrainRequest.model_fields)
    for name, field in schema["properties"].items():
        assert field["title"], name
        assert field["description"], name
        assert field["examples"], name
        for example in field["examples"]:
            jsonschema.Draft202012Validator(field).validate(example)
    assert "$ref" not in json.dumps(schema)
    assert schema["required"] == ["project"]


def test_the_schema_and_its_example_are_valid() -> None:
    schema = request_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for example in schema["examples"]:
        jsonschema.Draft202012Validator(schema).validate(example)
        parse_request(example)


@pytest.mark.parametrize(
    "conf", [{**BASE, "x": 1}, {**BASE, "gpus": "8"}, {**BASE, "cpus": 9}, {"script": "x"}, {**BASE, "flavor": "c1.4"}]
)
def test_the_schema_refuses_what_it_can_say(conf: dict[str, Any]) -> None:
    assert not jsonschema.Draft202012Validator(request_schema()).is_valid(conf)
