from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from torch.utils.data import DataLoader

from taas.made_with import marked
from taas.pickling import pickled
from taas_tasks.launch.files import RankFiles
from taas_tasks.launch.payload_check import payload_findings
from taas_tasks.values import LaunchPlan
from tests.launch.test_preflight import plan

pytestmark = pytest.mark.usefixtures("fork_server")


def missing_module() -> None:
    raise ModuleNotFoundError("No module named 'tokenizers_x'")


class Unopenable:
    """Raises where it is opened."""

    def __reduce__(self) -> Any:
        return missing_module, ()


@pytest.fixture
def files(tmp_path: Path) -> RankFiles:
    found = RankFiles(tmp_path / "scratch")
    found.make_folders()
    (tmp_path / "project").mkdir()
    return found


def with_payload(files: RankFiles, data: bytes) -> LaunchPlan:
    sha256 = hashlib.sha256(data).hexdigest()
    files.payload(sha256).write_bytes(data)
    return plan(plain_payloads={"data": ("key", sha256)})


def findings(plan: LaunchPlan, files: RankFiles) -> list[str]:
    return payload_findings(plan, files, files.scratch.parent / "project")


def test_payload_that_opens_has_no_findings(files: RankFiles) -> None:
    assert findings(with_payload(files, pickled(DataLoader([1, 2, 3]), name="data")), files) == []


def test_payload_of_another_python_is_not_opened_and_both_versions_are_said(files: RankFiles) -> None:
    data = marked(cloudpickle.dumps(Unopenable()), {"python": "3.99.1"})
    (found,) = findings(with_payload(files, data), files)
    assert found.startswith("loader 'data': ")
    assert "python 3.99.1 where it was made" in found
    assert "tokenizers_x" not in found


def test_payload_that_raises_is_told_with_the_users_traceback(files: RankFiles) -> None:
    (found,) = findings(with_payload(files, pickled(Unopenable(), name="data")), files)
    assert "No module named 'tokenizers_x'" in found
    assert "in missing_module" in found


def test_cell_is_opened_too(files: RankFiles) -> None:
    data = cloudpickle.dumps({"format": 1, "namespace": {"x": Unopenable()}})
    files.cell.write_bytes(data)
    (found,) = findings(plan(cell_payload="key", cell_sha256=hashlib.sha256(data).hexdigest()), files)
    assert "the captured cell cannot be opened here: ModuleNotFoundError" in found
    assert "in missing_module" in found


def test_payload_that_kills_its_process_is_a_finding(files: RankFiles) -> None:
    class Deadly:
        def __reduce__(self) -> Any:
            import os

            return os._exit, (3,)

    (found,) = findings(with_payload(files, pickled(Deadly(), name="data")), files)
    assert "its process ended with code 3" in found
