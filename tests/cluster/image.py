"""The image of the cluster's hosts, made once: ``python -m tests.cluster.image`` prints its name.

It is the image that ``docker/host/Dockerfile`` describes, on a base that debootstrap makes from this machine's Debian
mirror, with packages that this machine's pip finds: nothing is pulled. Both bear a hash of what they are made from, so
a change makes a new one and nothing else does.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.podman import PodmanError, exists, podman, why_not

ROOT = Path(__file__).parents[2]
HOST = ROOT / "docker" / "host"
SUITE = "bookworm"  # its python is 3.11
PACKAGES = ("ca-certificates", "openssh-server", "procps", "python3", "python3-venv")
FOR_EXAMPLES = ("scikit-learn",)
_MADE_FROM = (HOST / "Dockerfile", HOST / "sshd_config", ROOT / "requirements.txt")


def image() -> str:
    """Return the name of the hosts' image; made now when it is missing."""
    base = f"localhost/taas-base:{_digest(SUITE, *PACKAGES)}"
    name = f"localhost/taas-host:{_digest(base, *_packages(), *(path.read_text() for path in _MADE_FROM))}"
    with _one_at_a_time():
        if not exists("image", name):
            if not exists("image", base):
                _make_base(base)
            _make_image(name, base)
    return name


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    with (Path(tempfile.gettempdir()) / "taas-host-image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_base(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, archive = Path(folder) / "root", Path(folder) / "root.tar"
        options = ["--variant=minbase", f"--include={','.join(PACKAGES)}"]
        _run("debootstrap", *options, SUITE, str(root), _mirror(), wait_s=900)
        _run("tar", "-C", str(root), "-cf", str(archive), ".", wait_s=120)
        podman("import", str(archive), name, wait_s=300)


def _mirror() -> str:
    """Return where this machine's apt finds Debian."""
    query = ["apt-get", "indextargets", "--format", "$(REPO_URI)", f"Codename: {SUITE}", "Created-By: Packages"]
    found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    if not found:
        raise PodmanError(f"apt knows no mirror of Debian {SUITE}: add one to its sources, and run apt-get update")
    return found[0]


def _make_image(name: str, base: str) -> None:
    """Build; packages are fetched by this machine's pip, as configured here, and only seen by the build."""
    with tempfile.TemporaryDirectory() as folder:
        _fetch_packages(Path(folder))
        podman(
            "build",
            *("--file", str(HOST / "Dockerfile"), "--tag", name, "--pull=never"),
            *("--build-arg", f"BASE={base}", "--build-arg", "PIP_NO_INDEX=1", "--build-arg", "PIP_FIND_LINKS=/wheels"),
            *("--build-arg", f"PACKAGES={' '.join(FOR_EXAMPLES)}"),
            *("--volume", f"{folder}:/wheels:ro", "--network", "none"),
            str(ROOT),
            wait_s=900,
        )


def _packages() -> list[str]:
    """Return what the image has of Python's packages: not the project's whole file, which often changes otherwise."""
    listed = [sys.executable, str(HOST / "packages.py"), str(ROOT / "pyproject.toml")]
    of_hosts = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
    return [*of_hosts, *FOR_EXAMPLES]


def _fetch_packages(folder: Path) -> None:
    wanted = folder / "packages.txt"
    wanted.write_text("\n".join(_packages()))
    options = ["--quiet", "--disable-pip-version-check", "--constraint", str(ROOT / "requirements.txt")]
    _run(sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), "-r", str(wanted), wait_s=900)


def _run(*argv: str, wait_s: float) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=wait_s, check=False)
    if done.returncode != 0:
        raise PodmanError(f"{' '.join(argv[:3])} failed: {(done.stdout + done.stderr).strip()[-2000:]}")


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(f"no image of a host can be made here: {reason}")
    started = time.monotonic()
    print(image())
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
