"""The two sources: a static nginx over memory (the client's limit) and SeaweedFS (a real store). Both are read as S3.

nginx serves ``www/BUCKET/KEY``, which is what an S3 client asks for by path; it looks at no signature.
"""

from __future__ import annotations

import os
import shutil
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.delivery.preparing import children_of, cpu_seconds, s3_server
from taas_tasks.stack import processes, seaweed
from taas_tasks.stack.ports import free_port
from taas_tasks.store import open_store
from taas_tasks.values import StoreConfig

_UPLOADERS = 8
_NGINX = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
events {{ worker_connections 256; }}
http {{
  access_log off;
  sendfile on;
  tcp_nopush on;
  keepalive_requests 1000000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port} backlog=512;
    root {root};
    location = /status {{ stub_status; }}
  }}
}}
"""


@dataclass(frozen=True)
class Source:
    """A server that has all the data. ``config``: how our store reads it; ``pid``: of the server."""

    name: str
    config: StoreConfig
    pid: int

    def cpu_s(self) -> float:
        """Return the CPU seconds of the server so far."""
        return sum(cpu_seconds(pid) for pid in [self.pid, *children_of(self.pid)])

    def requests(self) -> int | None:
        """Return how many requests nginx has answered; None for another server."""
        if self.name != "nginx":
            return None
        with urllib.request.urlopen(f"{self.config.endpoint_url}/status", timeout=5) as answer:
            return int(answer.read().split()[9])

    def env(self) -> dict[str, str]:
        """Return the environment by which peers' S3 clients find the server."""
        return {
            "S3_ENDPOINT_URL": self.config.endpoint_url or "",
            "AWS_ENDPOINT_URL": self.config.endpoint_url or "",
            "AWS_ACCESS_KEY_ID": self.config.access_key or "",
            "AWS_SECRET_ACCESS_KEY": self.config.secret_key or "",
            "AWS_DEFAULT_REGION": self.config.region,
            "AWS_REGION": self.config.region,
            "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def nginx_binary() -> str:
    """Return nginx.

    Raises:
        SystemExit: there is none; says how to get it.
    """
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise SystemExit("this benchmark reads from a static nginx, and there is none: apt-get install nginx-light")
    return found


@contextmanager
def nginx(root: Path, folder: Path) -> Iterator[Source]:
    """A static server over ``root``, of one process: gone at the end, in whatever way the benchmark ends."""
    port = free_port(taken=set())
    folder.mkdir(parents=True)
    text = _NGINX.format(folder=folder, root=root, port=port)
    if os.geteuid() == 0:
        text = "user root;\n" + text  # the folder is this user's alone
    (folder / "nginx.conf").write_text(text)
    argv = [sys.executable, "-I", "-m", "taas_tasks.stack.guard"]
    argv += [nginx_binary(), "-c", str(folder / "nginx.conf"), "-e", str(folder / "nginx.log")]
    server = processes.start(argv, env={"PATH": "/usr/bin:/bin"}, log=folder / "start.log", cwd=folder)
    url = f"http://127.0.0.1:{port}"
    config = StoreConfig(endpoint_url=url, bucket=seaweed.BUCKET, access_key="any", secret_key="any")
    source = Source("nginx", config, server.pid)
    try:
        if not processes.wait_until(lambda: _answers(source), timeout_s=10):
            raise SystemExit(f"nginx does not answer: {processes.tail(folder / 'nginx.log')}")
        yield source
    finally:
        processes.stop(server, grace_s=2)


def _answers(source: Source) -> bool:
    try:
        return source.requests() is not None
    except OSError:
        return False


@contextmanager
def seaweedfs(root: Path, folder: Path) -> Iterator[Source]:
    """A SeaweedFS with everything that lies below ``root/BUCKET``."""
    with s3_server(folder) as server:
        store = open_store(server.config)
        bucket = root / seaweed.BUCKET
        files = [path for path in sorted(bucket.rglob("*")) if path.is_file()]
        with ThreadPoolExecutor(_UPLOADERS) as pool:
            for _ in pool.map(lambda path: store.put_file(str(path.relative_to(bucket)), path), files):
                pass
        yield Source("seaweedfs", server.config, server.pid)
