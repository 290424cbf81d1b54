from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taas.errors import RequestError, error_from_dict
from taas.flavors import FLAVORS, Flavor
from taas.request import (
    LoaderRef,
    PayloadRef,
    TrainRequest,
    conf_from_json,
    parse_request,
    request_digest,
    request_from_json,
    request_schema,
)

SHA256 = "9f86d08" + "0" * 57
BASE: dict[str, Any] = {"project": "lm", "script": "train.py"}
SCHEMA = jsonschema.Draft202012Validator(request_schema())
DATA: dict[str, Any] = {**BASE, "cpus": 1, "units": 100, "loaders": {"data_loader": "data.py:make_loader"}}


def faults(conf: Any) -> list[tuple[str, str]]:
    with pytest.raises(RequestError) as caught:
        parse_request(conf)
    return [(fault["field"], fault["message"]) for fault in caught.value.fields["faults"]]


def fault(conf: Any) -> tuple[str, str]:
    found = faults(conf)
    assert len(found) == 1, found
    return found[0]


def test_the_smallest_request_has_the_defaults() -> None:
    request = parse_request(BASE)
    assert (request.flavor, request.gpus, request.cpus, request.units, request.loaders) == ("g2.8", 8, None, None, {})
    assert (request.seed, request.randomness, request.remainder, request.start) == (0, "element", "pad", "auto")


def test_the_documents_own_request_is_valid() -> None:
    request = parse_request({**DATA, "gpus": 8, "units": 20480000, "args": ["--epochs", "3"]})
    assert request.units_of("data_loader") == 20480000
    assert request.args == ("--epochs", "3")
    assert request.loaders == {"data_loader": LoaderRef(source="data.py:make_loader")}


def test_null_is_the_same_as_leaving_out() -> None:
    everything = dict.fromkeys(TrainRequest.model_fields)
    assert parse_request({**everything, **BASE}) == parse_request(BASE)


def test_own_units_of_a_loader_go_before_the_requests() -> None:
    loaders = {"a": {"source": "data.py:a", "units": 7}, "b": "data.py:b"}
    request = parse_request({**DATA, "loaders": loaders})
    assert (request.units_of("a"), request.units_of("b")) == (7, 100)


def test_units_of_every_loader_make_the_requests_unneeded() -> None:
    request = parse_request({**BASE, "cpus": 2, "loaders": {"a": {"source": "data.py:a", "units": 7}}})
    assert request.units_of("a") == 7


def test_loaders_without_units_stay_plain() -> None:
    request = parse_request({**BASE, "loaders": {"a": "data.py:a"}})
    assert request.units_of("a") is None


@pytest.mark.parametrize(
    ("given_start", "start"),
    [
        ("auto", "auto"),
        ("all", "all"),
        (1, 1),
        (100, 100),
        (0.25, 0.25),
        (1.0, "all"),
        ("0.5", 0.5),
        ("7", 7),
        ("1.0", "all"),
    ],
)
def test_start_has_one_form_for_each_meaning(given_start: Any, start: Any) -> None:
    parsed = parse_request({**DATA, "start": given_start}).start
    assert parsed == start
    assert type(parsed) is type(start)


@pytest.mark.parametrize("number", [0, 0.0, 1.5, -1, True, "soon", "nan", float("nan"), float("inf"), [], "0", "-3"])
def test_start_outside_its_range_is_refused(number: Any) -> None:
    field, message = fault({**DATA, "start": number})
    assert field == "start"
    assert '"auto", "all", an integer of units' in message
    assert "1.0 means all" in message


WRONG: list[tuple[dict[str, Any], str, str]] = [
    # unknown and missing
    ({**BASE, "projct": "x"}, "projct", "unknown field; known: project, .* Did you mean 'project'?"),
    ({**BASE, "gpu": 8}, "gpu", "Did you mean 'gpus'?"),
    ({"script": "a.py"}, "project", "is missing; allowed: a string"),
    # types
    ({**BASE, "gpus": "8"}, "gpus", 'got "8" .a string.; allowed: an integer.* Write 8 without quotes'),
    ({**BASE, "gpus": True}, "gpus", "got true .a boolean.; allowed: an integer"),
    ({**BASE, "gpus": 8.0}, "gpus", "got 8.0 .a number.; allowed: an integer.* Write 8"),
    ({**BASE, "gpus": [8]}, "gpus", "got .8. .a list."),
    ({**BASE, "reuse": "true"}, "reuse", "allowed: true or false. Write true without quotes"),
    ({**BASE, "reuse": 1}, "reuse", "got 1 .an integer.; allowed: true or false"),
    ({**BASE, "args": "--x"}, "args", r"got \"--x\" .a string.; allowed: a list of strings"),
    ({**BASE, "args": ["a", 3]}, "args[1]", 'got 3 .an integer.; allowed: a string. Write "3"'),
    ({**BASE, "args": {"a": "b"}}, "args", "an object.; allowed: a list of strings"),
    ({**BASE, "env": ["A=1"]}, "env", "got a list; allowed: an object of strings"),
    ({**BASE, "env": {"A": 1}}, "env.A", "got an integer; allowed: a string"),
    ({**BASE, "loaders": ["data.py:x"]}, "loaders", "allowed: an object like"),
    ({**BASE, "loaders": {"a": 3}}, "loaders.a", 'got 3 .an integer.; allowed: "file.py:name" or an object'),
    ({**BASE, "cell": "x", "script": None}, "cell", "allowed: an object"),
    ({**BASE, "project": 3}, "project", "got 3 .an integer."),
    # ranges, patterns and choices
    ({**BASE, "project": "../other"}, "project", r"got \"../other\""),
    ({**BASE, "project": "a..b"}, "project", "single inner dots"),
    ({**BASE, "project": "a" * 64}, "project", "at most 63"),
    ({**BASE, "project": "a\n"}, "project", "allowed: a string of at most 63"),
    ({**DATA, "cpus": 0}, "cpus", "allowed: an integer from 1 to 8"),
    ({**DATA, "cpus": 9}, "cpus", "got 9 .an integer.; allowed: an integer from 1 to 8"),
    ({**DATA, "units": 0}, "units", "allowed: an integer from 1 to 1000000000000"),
    ({**BASE, "seed": -1}, "seed", "from 0 to 9007199254740991"),
    ({**BASE, "seed": 2**53}, "seed", "from 0 to 9007199254740991"),
    ({**BASE, "randomness": "exakt"}, "randomness", 'allowed: "element" or "exact". Did you mean \'exact\'?'),
    ({**BASE, "remainder": "padd"}, "remainder", "Did you mean 'pad'?"),
    ({**BASE, "other_ranks": "copy"}, "other_ranks", 'allowed: "refuse" or "scratch"'),
    ({**BASE, "cache_gb": 0}, "cache_gb", "above 0"),
    ({**BASE, "cache_gb": float("nan")}, "cache_gb", "above 0"),
    ({**BASE, "max_restarts": 101}, "max_restarts", "from 0 to 100"),
    ({**BASE, "timeout_s": 0}, "timeout_s", "from 1 to 2592000 .seconds; 30 days."),
    ({**BASE, "timeout_s": 31 * 86400}, "timeout_s", "from 1 to 2592000"),
    ({**BASE, "hang_timeout_s": -1}, "hang_timeout_s", "from 1 to 2592000 .seconds; 30 days., or 0: never"),
    ({**BASE, "max_cost": 0}, "max_cost", "a number above 0"),
    ({**BASE, "max_cost": float("inf")}, "max_cost", "a number above 0"),
    # flavor and gpus
    ({**BASE, "flavor": "g2.9"}, "flavor", "unknown flavor 'g2.9'; known GPU flavors: g1.1, .* Did you mean 'g2.8'?"),
    ({**BASE, "flavor": "c1.4"}, "flavor", "'c1.4' has no GPUs; training takes one of: g1.1"),
    ({**BASE, "gpus": 24}, "gpus", "got 24; allowed on g2.8: 8, 16, 32 .1, 2 or 4 hosts of 8 GPUs.. Did you mean 16?"),
    (
        {**BASE, "flavor": "g1.1"},
        "gpus",
        r"got 8; allowed on g1.1: 1, 2, 4 .1, 2 or 4 hosts of 1 GPU.\. .* .8 is the default.",
    ),
    ({**BASE, "gpus": 0}, "gpus", "got 0"),
    # what runs
    ({"project": "lm"}, "script", "got neither script nor cell"),
    ({**BASE, "cell": {"payload": "k", "sha256": SHA256}}, "script", "got both script and cell"),
    ({"project": "lm", "cell": {"payload": "k", "sha256": SHA256}, "args": ["a"]}, "args", "for a cell"),
    ({"project": "lm", "cell": {"payload": "k", "sha256": "abc"}}, "cell.sha256", "64 lowercase hex digits"),
    ({"project": "lm", "cell": {"payload": "../k", "sha256": SHA256}}, "cell.payload", "leaves the project by '..'"),
    ({"project": "lm", "cell": {"payload": "k"}}, "cell.sha256", "is missing"),
    ({"project": "lm", "cell": {"payload": "k", "sha256": SHA256, "sha": 1}}, "cell.sha", "Did you mean 'sha256'?"),
    ({**BASE, "script": "../train.py"}, "script", "leaves the project by '..'"),
    ({**BASE, "script": "/train.py"}, "script", "which is absolute"),
    ({**BASE, "script": "~/train.py"}, "script", "which is absolute"),
    ({**BASE, "script": "C:/train.py"}, "script", "which is absolute"),
    ({**BASE, "script": "a\\train.py"}, "script", "backslash"),
    ({**BASE, "script": "a//train.py"}, "script", "empty or '.' part"),
    ({**BASE, "script": ""}, "script", "which is empty"),
    # preparing
    (
        {**BASE, "cpus": 1, "loaders": {"a": "d.py:a"}},
        "units",
        "is missing while cpus is given; allowed: both or neither",
    ),
    ({**DATA, "cpus": None}, "cpus", "is missing while units is given; allowed: both or neither"),
    ({**BASE, "cpus": 1, "units": 5}, "loaders", "nothing to extract from.*taas.register"),
    (
        {**BASE, "cpus": 1, "loaders": {"a": {"source": "d.py:a", "units": 5}, "b": "d.py:b"}},
        "loaders.b",
        "has no number of units",
    ),
    ({**BASE, "loaders": {"a-b": "data.py:a"}}, "loaders.a-b", "a Python variable's name"),
    ({**BASE, "loaders": {"class": "data.py:a"}}, "loaders.class", "a Python variable's name"),
    ({**BASE, "loaders": {"лоадер": "data.py:a"}}, "loaders.лоадер", "ASCII"),
    ({**BASE, "loaders": {"a": "data.py"}}, "loaders.a", 'like "data.py:make_loader"'),
    ({**BASE, "loaders": {"a": "data:make"}}, "loaders.a", 'like "data.py:make_loader"'),
    ({**BASE, "loaders": {"a": "data.py:1x"}}, "loaders.a", 'like "data.py:make_loader"'),
    ({**BASE, "loaders": {"a": "../data.py:make"}}, "loaders.a", "leaves the project by '..'"),
    ({**BASE, "loaders": {"a": {"source": "/d.py:m"}}}, "loaders.a.source", "which is absolute"),
    ({**BASE, "loaders": {"a": {}}}, "loaders.a", "got neither source nor payload"),
    (
        {**BASE, "loaders": {"a": {"payload": "k"}}},
        "loaders.a",
        "got payload; allowed: either source, or payload and sha256",
    ),
    (
        {**BASE, "loaders": {"a": {"source": "d.py:m", "payload": "k", "sha256": SHA256}}},
        "loaders.a",
        "got payload and sha256 and source",
    ),
    ({**BASE, "loaders": {"a": {"source": "d.py:m", "unit": 3}}}, "loaders.a.unit", "Did you mean 'units'?"),
    ({**DATA, "loaders": {"a": {"source": "d.py:m", "units": -3}}}, "loaders.a.units", "got -3"),
    ({**DATA, "start": 101}, "start", 'got 101 units; allowed: at most the 100 that are extracted, or "all"'),
    ({**BASE, "start": "all"}, "start", "without cpus and units: nothing is prepared to wait for"),
    ({**DATA, "units": 7, "remainder": "drop"}, "remainder", "7 units of data_loader for 8 ranks: no step is left"),
    # environment and secrets
    ({**BASE, "env": {"RANK": "0"}}, "env.RANK", "RANK is set by TaaS"),
    ({**BASE, "env": {"MASTER_ADDR": "x"}}, "env.MASTER_ADDR", "is set by TaaS"),
    ({**BASE, "env": {"TAAS_CONTEXT": "x"}}, "env.TAAS_CONTEXT", "is set by TaaS"),
    ({**BASE, "env": {"1A": "x"}}, "env.1A", "not beginning with a digit"),
    ({**BASE, "env": {"A=B": "x"}}, "env.A=B", "letters, digits and '_'"),
    ({**BASE, "env": {"": "x"}}, "env.", "letters, digits and '_'"),
    ({**BASE, "env": {"HF_TOKEN": "abc"}}, "env.HF_TOKEN", '"secrets": {"HF_TOKEN": "var:taas/lm/hf_token"}'),
    ({**BASE, "args": ["--key", "AKIA" + "A" * 16]}, "args[1]", "an AWS access key .not shown."),
    ({**BASE, "secrets": {"RANK": "var:taas/lm/x"}}, "secrets.RANK", "is set by TaaS"),
    ({**BASE, "secrets": {"A": "hunter2"}}, "secrets.A", 'no reference .not shown.; allowed: "conn:taas/lm/<name>"'),
    ({**BASE, "secrets": {"A": "conn:aws_default"}}, "secrets.A", 'got "conn:aws_default"; allowed'),
    ({**BASE, "secrets": {"A": "conn:taas/lm/a/b"}}, "secrets.A", "allowed"),
    ({**BASE, "secrets": {"A": "var:taas/other/x"}}, "secrets.A", "secret of project 'other'.*the run's own project"),
    ({**BASE, "secrets": {"A": "var:taas/lm/a"}, "env": {"A": "1"}}, "secrets.A", "A is in env too"),
    # requirements
    ({**BASE, "requirements": ["einops"]}, "requirements[0]", "not pinned to one version by =="),
    ({**BASE, "requirements": ["einops>=1"]}, "requirements[0]", "not pinned"),
    ({**BASE, "requirements": ["einops==1.*"]}, "requirements[0]", "not pinned"),
    ({**BASE, "requirements": ["einops==1,==1.0"]}, "requirements[0]", "not pinned"),
    ({**BASE, "requirements": ["-r x.txt"]}, "requirements[0]", "pip's options are not allowed"),
    ({**BASE, "requirements": ["--index-url=http://x"]}, "requirements[0]", "pip's options"),
    ({**BASE, "requirements": ["a @ https://x/a.whl"]}, "requirements[0]", "addresses and files"),
    ({**BASE, "requirements": ["git+https://x/a"]}, "requirements[0]", "addresses and files"),
    ({**BASE, "requirements": ["./a.whl"]}, "requirements[0]", "addresses and files"),
    ({**BASE, "requirements": ["a b c"]}, "requirements[0]", "not a requirement"),
    ({**BASE, "requirements": [""]}, "requirements[0]", "not a requirement"),
    ({**BASE, "requirements": ["A-b==1", "a_B==1"]}, "requirements[1]", "requirements.0. names the package too"),
    # text
    ({**BASE, "args": ["a\x00b"]}, "args[0]", "NUL character"),
    ({**BASE, "env": {"A": "\ud800"}}, "env.A", "got a string|surrogate"),
]


@pytest.mark.parametrize(("conf", "field", "message"), WRONG, ids=[f"{n}-{w[1]}" for n, w in enumerate(WRONG)])
def test_one_fault_is_told_alone_with_its_field_and_the_way_out(conf: Any, field: str, message: str) -> None:
    found_field, text = fault(conf)
    assert found_field == field
    assert re.search(re.sub(r"\?$", r"\\?", message), text), text
    assert "\n" not in text


def test_all_faults_come_together_one_per_line() -> None:
    conf = {
        "projct": "x",
        "script": "../t.py",
        "gpus": "12",
        "flavor": "g2.9",
        "cpus": 9,
        "env": {"RANK": "0", "X": 3, "HF_TOKEN": "abc"},
        "args": ["a", 3, "AKIA" + "A" * 16],
        "requirements": ["torch", 3],
        "loaders": {"a": {"units": 0, "sha": "1"}, "b-c": "x"},
        "secrets": {"A": "conn:aws"},
    }
    found = faults(conf)
    fields = [field for field, _ in found]
    for expected in [
        *("project", "projct", "script", "gpus", "flavor", "cpus", "env.RANK", "env.X", "env.HF_TOKEN", "args[1]"),
        *(
            "args[2]",
            "requirements[0]",
            "requirements[1]",
            "loaders.a.units",
            "loaders.a.sha",
            "loaders.a",
            "loaders.b-c",
        ),
        "secrets.A",
    ]:
        assert expected in fields, expected
    with pytest.raises(RequestError) as caught:
        parse_request(conf)
    lines = caught.value.message.splitlines()
    assert lines == [f"{field}: {message}" for field, message in found]


def test_a_faulty_field_hides_no_fault_of_another_and_invents_none() -> None:
    found = dict(faults({**DATA, "units": "many", "remainder": "drop", "start": 5000}))
    assert list(found) == ["units"]


def test_values_of_env_and_secrets_are_never_shown() -> None:
    conf = {**BASE, "env": {"HF_TOKEN": "s3cr3t-value", "N": 12345678}, "secrets": {"A": "s3cr3t-value"}}
    text = str(faults(conf))
    assert "s3cr3t-value" not in text
    assert "12345678" not in text


def test_the_error_survives_json() -> None:
    with pytest.raises(RequestError) as caught:
        parse_request({**BASE, "gpus": 3, "x": object()})
    copy = error_from_dict(json.loads(json.dumps(caught.value.to_dict())))
    assert (type(copy), copy.message, copy.fields) == (RequestError, caught.value.message, caught.value.fields)


@pytest.mark.parametrize("conf", [None, [], "x", 3])
def test_a_conf_that_is_no_object_is_one_fault(conf: Any) -> None:
    field, message = fault(conf)
    assert field == ""
    assert "allowed: an object" in message


def test_names_that_are_no_strings_are_a_fault_not_a_crash() -> None:
    assert any("names that are strings" in message for _, message in faults({**BASE, 3: 4}))
    assert any("names that are strings" in message for _, message in faults({**BASE, "env": {3: "4"}}))
    assert any("names that are strings" in message for _, message in faults({**BASE, "loaders": {3: "d.py:a"}}))


def test_shell_characters_newlines_quotes_and_unicode_are_plain_data() -> None:
    nasty = [";", "$(rm -rf /)", "`id`", "a\nb", "'\"", "üñí 🚀", "--", "", "{job}", "%s"]
    request = parse_request({**BASE, "args": nasty, "env": {"A": "\n".join(nasty)}})
    assert list(request.args) == nasty


def test_flavors_of_the_site_are_known_when_given() -> None:
    flavors = {**FLAVORS, "g3.4": Flavor("g3.4", 96, 4, "H100", 512, 999)}
    conf = {**BASE, "flavor": "g3.4", "gpus": 16}
    assert parse_request(conf, flavors=flavors).gpus == 16
    assert fault(conf)[0] == "flavor"
    assert "g3.4" in request_schema(flavors=flavors)["properties"]["flavor"]["enum"]


def test_a_request_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_request(BASE).gpus = 16  # type: ignore[misc]


# JSON texts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"project": "lm",}', "not valid JSON: .* at line 1, column"),
        ('{"project": "a", "project": "b", "script": "x.py"}', "project: is there twice"),
        ('{"cache_gb": NaN}', "got NaN; allowed: finite numbers"),
        (b'{"project": "\xff"}', "not in UTF-8"),
        ("", "not valid JSON"),
        ("[1]", "got a list"),
        ('{"seed": ' + "9" * 5000 + "}", "not a request: Exceeds the limit"),
        ("[" * 100_000, "not a request: maximum recursion depth"),
    ],
)
def test_a_bad_json_text_is_told_with_the_place(text: str | bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        request_from_json(text)


def test_a_json_text_is_parsed() -> None:
    assert request_from_json(json.dumps(DATA)) == parse_request(DATA)
    assert conf_from_json(b"[1, 2]") == [1, 2]


# Anything at all

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ANY_FIELD = st.sampled_from([*TrainRequest.model_fields, "projct"])
ANY_VALUE = JSON | st.sampled_from(["g2.8", "../x", "a\nb", "\ud800", "data.py:x", "var:taas/\n/x", 10**5000, -1, 8])
ITEMS = st.dictionaries(st.text(max_size=5) | st.sampled_from(["RANK", "A\nB", "\ud800"]), ANY_VALUE, max_size=2)


@given(
    st.dictionaries(ANY_FIELD | st.text(max_size=5), ANY_VALUE | ITEMS | st.lists(ANY_VALUE, max_size=2), max_size=6)
)
def test_any_conf_at_all_parses_or_is_told_in_lines_that_can_be_written(conf: dict[str, Any]) -> None:
    try:
        parse_request(conf)
    except RequestError as error:
        assert len(error.message.split("\n")) == len(error.fields["faults"]) > 0
        assert error.message.isprintable() or "\n" in error.message
        json.dumps(error.to_dict(), ensure_ascii=False).encode()


def test_a_value_nested_without_end_is_a_fault_not_a_crash() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert fault({**BASE, "args": [deep]}) == ("args[0]", "got a list (a list); allowed: a string")
    assert fault({**BASE, "x": deep})[0] == "x"
    while deep:
        deep = deep.pop()


# Round trips

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,10}", fullmatch=True).filter(lambda name: name.isidentifier())
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
SOURCES = st.builds("{}.py:{}".format, NAMES, st.sampled_from(["make", "loader"]))
LOADERS = st.dictionaries(
    st.sampled_from(["train", "val", "data_loader"]),
    st.one_of(
        SOURCES,
        st.fixed_dictionaries({"source": SOURCES}, optional={"units": st.integers(32, 10**12)}),
        st.fixed_dictionaries({"payload": st.just("projects/p/payloads/x"), "sha256": st.just(SHA256)}),
    ),
    min_size=1,
)


@st.composite
def confs(draw: st.DrawFn) -> dict[str, Any]:
    optional: Mapping[str, st.SearchStrategy[Any]] = {
        "args": st.lists(TEXTS.filter(lambda text: "://" not in text), max_size=3),
        "flavor": st.just("g2.8"),
        "gpus": st.sampled_from([8, 16, 32]),
        "seed": st.integers(0, 2**53 - 1),
        "randomness": st.sampled_from(["element", "exact"]),
        "remainder": st.sampled_from(["pad", "drop"]),
        "reuse": st.booleans(),
        "env": st.dictionaries(st.sampled_from(["A", "OMP_NUM_THREADS"]), st.text(string.ascii_lowercase, max_size=9)),
        "secrets": st.just({"S": "conn:taas/lm/s"}),
        "requirements": st.just(["einops==0.8.1"]),
        "other_ranks": st.sampled_from(["refuse", "scratch"]),
        "cache_gb": st.floats(0.001, 65536) | st.integers(1, 1000),
        "allow_pickle": st.booleans(),
        "max_restarts": st.integers(0, 100),
        "timeout_s": st.integers(1, 2592000),
        "hang_timeout_s": st.integers(0, 86400),
        "max_cost": st.floats(0.001, 1e9) | st.none(),
    }
    conf = draw(st.fixed_dictionaries({"project": st.just("lm"), "script": st.just("a/train.py")}, optional=optional))
    if draw(st.booleans()):
        data = {
            "cpus": st.integers(1, 8),
            "units": st.integers(32, 10**12),
            "loaders": LOADERS,
            "start": st.one_of(st.sampled_from(["auto", "all", "0.5"]), st.integers(1, 32), st.floats(0.0001, 1.0)),
        }
        conf |= draw(st.fixed_dictionaries(data))
    return conf


@given(confs())
def test_a_request_is_the_same_after_every_round_trip(conf: dict[str, Any]) -> None:
    request = parse_request(conf)
    assert parse_request(request.to_conf()) == request
    assert parse_request(json.loads(json.dumps(request.to_conf()))) == request
    assert parse_request(request.model_dump(mode="json")) == request
    assert TrainRequest.model_validate_json(request.model_dump_json()) == request
    assert request_digest(TrainRequest.model_validate_json(request.model_dump_json())) == request_digest(request)


@given(confs())
def test_what_parses_fits_the_schema(conf: dict[str, Any]) -> None:
    SCHEMA.validate(conf)


def test_the_digest_does_not_depend_on_how_the_request_is_written() -> None:
    one = parse_request({**DATA, "start": 1.0, "gpus": 8, "loaders": {"a": "d.py:a", "b": "d.py:b"}})
    other = parse_request(
        {"loaders": {"b": {"source": "d.py:b"}, "a": "d.py:a"}, **BASE, "units": 100, "cpus": 1, "start": "all"}
    )
    assert request_digest(one) == request_digest(other)
    assert request_digest(one) != request_digest(parse_request({**DATA, "units": 101}))


def test_every_field_says_what_is_allowed() -> None:
    for name in TrainRequest.model_fields:
        (message,) = [text for field, text in faults({**BASE, name: object()}) if field == name]
        assert "; allowed: " in message


def test_payload_references_keep_their_fields() -> None:
    ref = PayloadRef(payload="k", sha256=SHA256)
    assert PayloadRef.model_validate_json(ref.model_dump_json()) == ref
