from __future__ import annotations

import pickle
import platform

import pytest

from taas.made_with import differences, marked, refusal, versions_here, versions_of
from taas.pickling import pickled

HERE = {"python": "3.11.2", "cloudpickle": "3.1.2", "torch": "2.13.0"}


def test_payload_says_with_which_versions_it_was_made_and_opens_as_before() -> None:
    payload = pickled([1, 2], name="x")
    assert versions_of(payload) == versions_here()
    assert versions_of(payload)["python"] == platform.python_version()
    assert pickle.loads(payload) == [1, 2]


@pytest.mark.parametrize("payload", [b"", pickle.dumps("x"), b"\ntaas-made-with {", b"\ntaas-made-with 7"])
def test_payload_that_does_not_say_it_has_no_versions(payload: bytes) -> None:
    assert versions_of(payload) == {}


def test_versions_are_those_at_the_end_whatever_the_pickle_holds() -> None:
    assert versions_of(marked(marked(b"", {"python": "2.7"}), HERE)) == HERE


@pytest.mark.parametrize(
    "made", [{}, HERE, {**HERE, "python": "3.11.9"}, {**HERE, "torch": "2.9.1"}, {"unknown": "1.0"}]
)
def test_versions_that_may_fit_are_not_refused(made: dict[str, str]) -> None:
    assert refusal(made, HERE) is None


@pytest.mark.parametrize(("name", "version"), [("python", "3.12.1"), ("cloudpickle", "2.2.1"), ("torch", "1.13.1")])
def test_versions_that_cannot_fit_are_refused_with_both(name: str, version: str) -> None:
    why = refusal({**HERE, name: version}, HERE)
    assert why is not None
    assert f"{name} {version} where it was made, {HERE[name]} here" in why
    assert len(differences({**HERE, name: version}, HERE)) == 1
