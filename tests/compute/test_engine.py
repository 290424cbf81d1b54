"""The engine's archive, its name, and how it is unpacked."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from taas_tasks.compute.engine import Engine, engine, engine_of
from taas_tasks.compute.unpack import EXEC, shipment, unpack

ROOT = Path(__file__).parents[2]


def test_it_holds_what_hosts_run_and_nothing_of_airflow():
    files = engine().files
    for name in ("taas/flavors.py", "taas_tasks/compute/hostctl.py", "taas_tasks/launch/agent_program.py"):
        assert name in files
    assert not [name for name in files if name.startswith(("taas_tasks/airflow", "taas_tasks/stack"))]
    assert not [name for name in files if "__pycache__" in name]


def test_equal_sources_give_an_equal_digest_and_archive_wherever_and_whenever(tmp_path: Path):
    for package in ("taas", "taas_tasks"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in tmp_path.rglob("*.py"):
        os.utime(path, (1, 1))
    copy, again = engine_of(tmp_path), engine_of(ROOT)
    assert (copy.digest, copy.archive) == (again.digest, again.archive)
    (tmp_path / "taas" / "errors.py").write_text("changed")
    assert engine_of(tmp_path).digest != copy.digest


def test_every_program_of_a_host_is_whole_in_it(tmp_path: Path):
    unpack(tmp_path / "e", engine().archive)
    modules = ["taas_tasks.prep.inspect_program", "taas_tasks.launch.agent_program", "taas_tasks.delivery.feeder"]
    code = (
        f"import sys; sys.path = [{str(tmp_path / 'e')!r}] + [p for p in sys.path if p != {str(ROOT)!r}]; "
        + "".join(f"import {name}; assert {name}.__file__.startswith({str(tmp_path)!r}); " for name in modules)
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=120)


def small() -> Engine:
    return Engine("digest", {"a/b.py": b"one", "c.toml": b""})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_unpacking_gives_the_files_and_leaves_no_temporary(tmp_path: Path):
    for _ in range(2):
        unpack(tmp_path / "engines" / "digest", small().archive)
        assert contents(tmp_path / "engines") == {"digest/a/b.py": b"one", "digest/c.toml": b""}


def test_a_folder_that_lacks_files_is_replaced(tmp_path: Path):
    (tmp_path / "digest").mkdir()
    (tmp_path / "digest" / "c.toml").touch()
    unpack(tmp_path / "digest", small().archive)
    assert contents(tmp_path) == {"digest/a/b.py": b"one", "digest/c.toml": b""}


def test_what_killed_shippers_left_long_ago_is_swept(tmp_path: Path):
    for name, age in ((".digest.1.1", 1), (".digest.2.2", None)):
        (tmp_path / name).mkdir()
        if age:
            os.utime(tmp_path / name, (age, age))
    unpack(tmp_path / "digest", small().archive)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".digest.2.2", "digest"]


def test_an_archive_that_is_cut_publishes_nothing(tmp_path: Path):
    with pytest.raises((tarfile.TarError, EOFError, OSError)):
        unpack(tmp_path / "digest", small().archive[:-20])
    assert list(tmp_path.iterdir()) == []


def test_the_shipment_runs_by_the_command_that_is_sent(tmp_path: Path):
    data = shipment(tmp_path / "ö x" / "digest", small().archive)
    done = subprocess.run([sys.executable, "-I", "-S", "-c", EXEC], input=data, capture_output=True, timeout=60)
    assert done.stdout.strip() == b'{"ok": {}}', done.stderr
    assert contents(tmp_path / "ö x" / "digest") == dict(small().files)


def test_nothing_in_the_archive_tells_who_made_it():
    with tarfile.open(fileobj=io.BytesIO(engine().archive)) as tar:
        assert {(m.uid, m.gid, m.mtime, m.uname) for m in tar} == {(0, 0, 0, "")}
