"""The trigger form: every field of the request, the right widget, and no check of its own."""

import pytest

from taas.request import TrainRequest, request_schema
from taas_tasks.airflow.form import form_params

PARAMS = form_params()
# What the UI does: the first type that is not null names the widget; more than one type without examples is a JSON
# editor; without any type the default's own type counts.


def widget(param) -> str:
    types = [kind for kind in param.schema.get("type", []) if kind != "null"]
    if len(types) > 1 and "examples" not in param.schema:
        return "json"
    if types:
        return types[0]
    return {list: "array", dict: "object"}[type(param.value)]


def test_every_field_of_the_request_is_in_the_form():
    assert set(PARAMS) == set(TrainRequest.model_fields)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("project", "string"),
        ("gpus", "integer"),
        ("cpus", "integer"),
        ("cache_gb", "number"),
        ("max_cost", "number"),
        ("reuse", "boolean"),
        ("args", "array"),
        ("loaders", "object"),
        ("env", "object"),
        ("cell", "json"),
        ("start", "string"),
    ],
)
def test_widget(name, expected):
    assert widget(PARAMS[name]) == expected


@pytest.mark.parametrize("name", sorted(PARAMS))
def test_form_leaves_checking_to_the_conf_check(name):
    for value in (None, -1, 10**13, "x", 1.5, True, ["a", 1], {"a": 1}):
        assert form_params()[name].resolve(value) == value


@pytest.mark.parametrize("name", sorted(PARAMS))
def test_texts_and_defaults_are_those_of_the_schema(name):
    field = request_schema()["properties"][name]
    assert PARAMS[name].schema["title"] == field["title"]
    assert PARAMS[name].description == field["description"]
    assert form_params()[name].value == field.get("default")


def test_suggestions_of_a_text_field_are_texts():
    assert PARAMS["start"].schema["examples"] == ["auto", "all", "20480", "0.25"]
    assert "g2.8" in PARAMS["flavor"].schema["examples"]
