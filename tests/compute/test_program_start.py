"""Programs in the environment of their request: made once, whole, seeing the host's packages; refusals in words."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from taas.errors import HostRefused, RequirementsFailed
from taas_tasks.compute import jobs, program_start
from taas_tasks.compute.job import JobState
from taas_tasks.layout import HostPaths
from tests.compute.hosts import EmulatedHost

PROGRAM = """
import json, os, sys
import multiprocessing, multiprocessing.forkserver
import pydantic, widget

def told(_):
    import widget
    return [sys.executable, widget.__version__]

if __name__ == "__main__":
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        forked = pool.map(told, [0])[0]
    with open(sys.argv[1]) as file:
        given = file.read()
    found = {"python": sys.executable, "widget": widget.__version__, "pydantic": pydantic.__file__, "forked": forked}
    print(json.dumps({**found, "input": given, "pid": os.getpid()}))
"""


def make_wheel(folder: Path, version: str, *, name: str = "widget") -> None:
    """Write a wheel of one module that knows its version."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{path},sha256={_sum(text)},{len(text)}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def _sum(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    for version in ("1.0", "2.0"):
        make_wheel(tmp_path / "wheels", version)
    return tmp_path / "wheels"


def run(
    host: EmulatedHost, wheels: Path, *requirements: str, job_id: str = "job", engine: Path | None = None, **env: str
) -> JobState:
    """Run the program with requirements to its end."""
    envs = HostPaths(host.root).envs
    start = program_start.start_file("program", envs=envs, requirements=requirements, engine=engine)
    modules = host.root / "modules"
    modules.mkdir(exist_ok=True, parents=True)
    (modules / "program.py").write_text(PROGRAM)
    host.submit(
        [sys.executable, "-I", program_start.__file__, "{job}"],
        job_id=job_id,
        env={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PYTHONPATH": str(modules), **env},
        files={program_start.START_FILE: start, "input.json": "the input {job}"},
    )
    return host.ended(job_id)


def said(host: EmulatedHost, job_id: str = "job") -> dict[str, Any]:
    text = jobs.log(host.transport, job_id).text
    found: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return found


def test_a_program_and_what_it_forks_run_with_the_requirements_and_the_hosts_packages(host: EmulatedHost, wheels: Path):
    state = run(host, wheels, "widget==1.0")
    assert state.succeeded, jobs.log(host.transport, "job").text
    found = said(host)
    assert found["widget"] == "1.0"
    assert found["python"].startswith(str(HostPaths(host.root).envs))
    assert found["forked"] == [found["python"], "1.0"]
    assert not found["pydantic"].startswith(str(host.root))
    assert found["input"] == "the input {job}"
    assert found["pid"] == state.pid  # nothing is between the supervisor and the program


def test_an_environment_is_made_once_whatever_the_order_and_whoever_comes_at_once(host: EmulatedHost, wheels: Path):
    make_wheel(wheels, "1.0", name="gadget")
    orders = [("widget==1.0", "gadget==1.0"), ("gadget==1.0", "widget==1.0")]
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(run, host, wheels, *order, job_id=f"job-{number}") for number, order in enumerate(orders)]
        assert [one.result().succeeded for one in both] == [True, True]
    logs = [jobs.log(host.transport, f"job-{number}").text for number in range(2)]
    assert sum("making an environment" in log for log in logs) == 1
    assert said(host, "job-0")["python"] == said(host, "job-1")["python"]


def test_other_versions_get_another_environment(host: EmulatedHost, wheels: Path):
    run(host, wheels, "widget==1.0")
    run(host, wheels, "widget==2.0", job_id="other")
    assert (said(host)["widget"], said(host, "other")["widget"]) == ("1.0", "2.0")


def test_an_environment_that_was_begun_and_not_finished_is_made_anew(host: EmulatedHost, wheels: Path):
    name = program_start.env_name(["widget==1.0"], python=sys.executable)
    begun = HostPaths(host.root).envs / name / "bin"
    begun.mkdir(parents=True)
    (begun / "python").write_text("half")
    assert run(host, wheels, "widget==1.0").succeeded


def test_a_failing_pip_is_told_with_its_last_lines_and_no_retry_helps(host: EmulatedHost, wheels: Path):
    error = jobs.failure(run(host, wheels, "widget==3.0"), host="c1-0")
    assert isinstance(error, RequirementsFailed) and not error.retryable
    assert "widget==3.0" in error.message
    assert "No matching distribution found for widget==3.0" in error.message
    assert error.fields["requirements"] == ["widget==3.0"]
    again = jobs.failure(run(host, wheels, "widget==3.0", job_id="again"), host="c1-0")
    assert isinstance(again, RequirementsFailed)


def test_without_requirements_the_hosts_own_python_runs(host: EmulatedHost, wheels: Path):
    (host.root / "modules").mkdir(parents=True)
    (host.root / "modules" / "widget.py").write_text("__version__ = 'own'")
    assert run(host, wheels).succeeded
    assert said(host)["python"] == sys.executable
    assert not HostPaths(host.root).envs.exists()


def test_the_engine_is_found_behind_all_else(host: EmulatedHost, wheels: Path, tmp_path: Path):
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "program.py").write_text("raise SystemExit('the engine came first')")
    (engine / "widget.py").write_text("__version__ = 'of the engine'")
    assert run(host, wheels, engine=engine).succeeded
    assert said(host)["widget"] == "of the engine"


def test_packages_that_the_host_lacks_are_named(host: EmulatedHost, tmp_path: Path):
    bare = tmp_path / "bare"
    import venv

    venv.create(bare, symlinks=True)
    start = program_start.start_file("program", envs=tmp_path, requirements=[], engine=tmp_path)
    argv = [str(bare / "bin" / "python"), "-I", program_start.__file__, "{job}"]
    host.submit(argv, files={program_start.START_FILE: start, "input.json": ""})
    error = jobs.failure(host.ended(), host="c1-0")
    assert isinstance(error, HostRefused)
    assert f"python {bare}/bin/python lacks torch, numpy, pyarrow" in error.message


def test_what_a_host_needs_is_what_the_package_asks_for():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["host"]]
    names = {text.split(">")[0].split("=")[0] for text in asked}
    assert names - {"httpx"} == set(program_start.NEEDED)  # httpx: the client's alone
