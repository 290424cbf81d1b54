"""What validate refuses before any machine is taken, beyond the request itself."""

import pytest

from taas.errors import RequestError
from taas.request import parse_request
from taas_tasks import project as repository
from taas_tasks.airflow.run_steps import pin
from taas_tasks.store.memory import MemoryStore

CONF = {
    "project": "p",
    "script": "trian.py",
    "gpus": 8,
    "cpus": 1,
    "units": 8,
    "loaders": {"one": "dat.py:make", "two": "data.py:make"},
}


def test_every_file_that_the_project_lacks_is_named_at_once():
    store = MemoryStore()
    repository.commit(store, "p", {"train.py": b"", "data.py": b""}, author="tests")
    with pytest.raises(RequestError) as caught:
        pin(store, "r", "r", parse_request(CONF))
    assert [fault["field"] for fault in caught.value.fields["faults"]] == ["script", "loaders.one"]
    assert "has no file 'trian.py' (record 1); put it there: taas project put p FOLDER" in caught.value.message


def test_a_request_whose_files_are_there_is_pinned_to_the_head():
    store = MemoryStore()
    repository.commit(store, "p", {"train.py": b"", "data.py": b""}, author="tests")
    request = parse_request({**CONF, "script": "train.py", "loaders": {"two": "data.py:make"}})
    pinned = pin(store, "r", "r", request)
    assert (pinned.base_record, pinned.snapshot) == repository.head(store, "p")
